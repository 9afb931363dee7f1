"""The decode batch settles where a step takes as long as it should."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.batch_limit import BatchLimit


def run(limit, num_steps, *, row_s, num_ready=10**6):
    """Steps of a device that takes 10 ms and `row_s` a row; returns each step's time."""
    times = []
    for _ in range(num_steps):
        num_rows = min(limit.size, num_ready)
        times.append(0.01 + row_s * num_rows)
        limit.observe(num_rows, times[-1])
    return times


def test_without_a_target_it_stays_at_the_top():
    limit = BatchLimit(8, None)
    run(limit, 50, row_s=10)
    assert limit.size == 8


def test_it_grows_by_one_and_halves():
    limit = BatchLimit(8, 0.05)
    limit.observe(8, 0.051)
    assert limit.size == 4
    limit.observe(4, 0.05)
    assert limit.size == 5
    limit.observe(5, 0.06)
    assert limit.size == 2


def test_a_batch_that_is_not_full_lets_it_grow_no_further():
    limit = BatchLimit(8, 0.05)
    limit.observe(8, 1)
    for _ in range(20):
        limit.observe(3, 0.01)
    assert limit.size == 4


def test_what_ran_is_halved_where_the_limit_was_far_from_reached():
    limit = BatchLimit(64, 0.05)
    limit.observe(6, 0.06)
    assert limit.size == 3


@pytest.mark.parametrize("row_s", [0.0005, 0.001, 0.002])
def test_step_times_come_to_the_target_from_below_and_again_after_a_change(row_s):
    limit = BatchLimit(256, 0.05)
    run(limit, 300, row_s=row_s)
    for cost_s in (row_s, 2 * row_s, row_s / 2):
        run(limit, 100, row_s=cost_s)
        times = run(limit, 300, row_s=cost_s)
        # One row beyond the target at most, and never far below: half the batch and the fixed 10 ms.
        assert max(times) <= 0.05 + cost_s + 1e-9
        assert min(times) >= 0.025
        assert sum(times) / len(times) > 0.035
        assert sum(time > 0.05 for time in times) < len(times) / 5


@given(
    max_size=st.integers(1, 64),
    steps=st.lists(st.tuples(st.integers(0, 80), st.floats(0, 2)), max_size=100),
)
def test_it_stays_between_one_and_the_top(max_size, steps):
    limit = BatchLimit(max_size, 1.0)
    for num_rows, step_s in steps:
        limit.observe(num_rows, step_s)
        assert 1 <= limit.size <= max_size


@pytest.mark.parametrize(
    ("max_size", "target_s", "name"), [(0, None, "max_batch_size"), (1, 0, "step_target_s")]
)
def test_what_makes_no_sense_is_refused(max_size, target_s, name):
    with pytest.raises(ValueError, match=name):
        BatchLimit(max_size, target_s)
