"""A step that runs out of memory is retried smaller, and the worker recovers its size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.step_limit import MIN_STEP_TOKENS, NUM_STEPS_BEFORE_GROWTH, StepLimit


def fail(limit, num_tokens):
    limit.begin(num_tokens)
    return limit.shrink()


def test_it_halves_down_to_the_floor():
    limit = StepLimit(512)
    seen = []
    while fail(limit, limit.tokens):
        seen.append(limit.tokens)
    assert seen == [256, 128, 64, 32, 16]
    assert limit.tokens == MIN_STEP_TOKENS


def test_it_halves_the_step_that_failed_and_not_an_unused_limit():
    limit = StepLimit(512)
    assert fail(limit, 100)
    assert limit.tokens == 50


def test_a_step_at_the_floor_cannot_shrink_and_changes_nothing():
    limit = StepLimit(512)
    assert not fail(limit, MIN_STEP_TOKENS)
    assert limit.tokens == 512


def test_several_failures_of_one_step_shrink_on():
    limit = StepLimit(128)
    limit.begin(128)
    assert [limit.shrink() for _ in range(4)] == [True, True, True, False]


def test_without_a_step_nothing_shrinks():
    assert not StepLimit(512).shrink()


def test_it_doubles_after_good_steps_up_to_the_maximum():
    limit = StepLimit(100)
    fail(limit, 100)
    sizes = []
    for _ in range(3 * NUM_STEPS_BEFORE_GROWTH):
        limit.begin(1)
        sizes.append(limit.tokens)
    assert sizes == [50] * NUM_STEPS_BEFORE_GROWTH + [100] * (2 * NUM_STEPS_BEFORE_GROWTH)


def test_a_failure_starts_the_count_of_good_steps_again():
    limit = StepLimit(400)
    fail(limit, 400)
    for _ in range(NUM_STEPS_BEFORE_GROWTH - 5):
        limit.begin(200)
    assert fail(limit, 200)
    for _ in range(NUM_STEPS_BEFORE_GROWTH):
        limit.begin(100)
        assert limit.tokens == 100


def test_empty_steps_prove_nothing():
    limit = StepLimit(64)
    fail(limit, 64)
    for _ in range(10 * NUM_STEPS_BEFORE_GROWTH):
        limit.begin(0)
    assert limit.tokens == 32


@settings(max_examples=50, deadline=None)
@given(st.integers(MIN_STEP_TOKENS, 4096), st.integers(MIN_STEP_TOKENS, 4096))
def test_what_fits_is_found(max_tokens, fits):
    limit = StepLimit(max_tokens)
    tries = 0
    while limit.tokens > fits:
        assert fail(limit, limit.tokens)
        tries += 1
    assert tries <= 9


def test_a_limit_is_positive():
    with pytest.raises(ValueError, match="max_step_tokens"):
        StepLimit(0)
