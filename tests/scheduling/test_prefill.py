"""The policy of prefill, in exact numbers."""

import pytest

from scheduling.allocator import BlockAllocator, BlockState
from scheduling.block_hash import BlockHashes
from scheduling.first_come import FirstCome
from scheduling.prefill import MAX_PASSED_OVER, PrefillScheduler
from scheduling.sequence import Sequence
from scheduling.step_limit import MIN_STEP_TOKENS, NUM_STEPS_BEFORE_GROWTH

BLOCK_SIZE = 16


def prompt(request_id, num_tokens, *, at=0.0, priority=0):
    return Sequence(request_id, list(range(num_tokens)), num_tokens, priority, at)


def new(num_blocks=1000, max_step_tokens=100, max_waiting=100):
    allocator = BlockAllocator(num_blocks)
    return PrefillScheduler(allocator, BLOCK_SIZE, max_step_tokens, max_waiting), allocator


def add(scheduler, *prompts):
    for sequence in prompts:
        assert scheduler.add(sequence)


def step(scheduler, allocator=None):
    """One step: what each sequence got. With an allocator, finished ones are acknowledged at once."""
    scheduled = scheduler.schedule(0.0)
    scheduler.advance(scheduled)
    for chunk in scheduled:
        if allocator is not None and chunk.is_last:
            allocator.free(chunk.sequence.request_id)
    return {chunk.sequence.request_id: (chunk.start, chunk.end) for chunk in scheduled}


def test_a_long_prompt_is_computed_in_chunks():
    scheduler, allocator = new()
    long = prompt("long", 250)
    add(scheduler, long)
    assert [step(scheduler) for _ in range(3)] == [
        {"long": (0, 100)},
        {"long": (100, 200)},
        {"long": (200, 250)},
    ]
    assert scheduler.schedule(0.0) == []
    assert allocator.holdings() == {"long": (BlockState.RUNNING, 16)}


def test_sampling_is_due_at_the_last_chunk_only():
    scheduler, _ = new()
    add(scheduler, prompt("long", 150))
    first = scheduler.schedule(0.0)
    assert [chunk.is_last for chunk in first] == [False]
    scheduler.advance(first)
    assert [chunk.is_last for chunk in scheduler.schedule(0.0)] == [True]


def test_all_blocks_are_taken_with_the_first_chunk():
    scheduler, allocator = new()
    long = prompt("long", 250)
    add(scheduler, long)
    step(scheduler)
    assert len(long.block_table) == 16
    assert allocator.counts.running == 16


def test_a_short_prompt_waits_at_most_one_chunk_behind_a_long_one():
    scheduler, _ = new()
    add(scheduler, prompt("long", 5000, at=0))
    step(scheduler)
    add(scheduler, prompt("short", 70, at=1))
    assert step(scheduler) == {"long": (100, 130), "short": (0, 70)}


def test_the_oldest_gets_a_quarter_and_the_shortest_the_rest():
    scheduler, _ = new()
    add(scheduler, prompt("oldest", 5000, at=0), prompt("middle", 300, at=1), prompt("shortest", 200, at=2))
    assert step(scheduler) == {"shortest": (0, 100)}
    assert step(scheduler) == {"oldest": (0, 34), "shortest": (100, 166)}
    assert step(scheduler) == {"oldest": (34, 56), "shortest": (166, 200), "middle": (0, 44)}


def test_what_others_leave_goes_to_the_oldest():
    scheduler, _ = new()
    add(scheduler, prompt("oldest", 5000, at=0), prompt("short", 10, at=1))
    assert step(scheduler) == {"oldest": (0, 90), "short": (0, 10)}


def test_an_oldest_that_needs_less_than_a_quarter_leaves_the_rest():
    scheduler, _ = new()
    add(scheduler, prompt("oldest", 5, at=0), prompt("other", 500, at=1))
    assert step(scheduler) == {"oldest": (0, 5), "other": (0, 95)}


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones():
    scheduler, allocator = new()
    long = prompt("long", 1000, at=0)
    add(scheduler, long)
    num_steps = 0
    while long.remaining:
        num_steps += 1
        add(scheduler, prompt(f"short-{num_steps}", 100, at=num_steps))
        step(scheduler, allocator)
        assert long.num_computed >= 25 * (num_steps - 2)
    assert num_steps <= 42


def test_a_higher_class_goes_first_until_a_lower_one_is_behind_its_share():
    scheduler, _ = new()
    add(
        scheduler, prompt("old-low", 10, at=0), prompt("high", 150, at=5, priority=1), prompt("low", 20, at=1)
    )
    assert step(scheduler) == {"high": (0, 100)}
    assert step(scheduler) == {"high": (100, 150), "old-low": (0, 10), "low": (0, 20)}


def test_a_lower_class_advances_by_its_share_beside_a_flood_of_the_higher():
    scheduler, _ = new()
    low = prompt("low", 3000, at=0)
    add(scheduler, low, prompt("flood", 9000, at=0, priority=2))
    for _ in range(60):
        step(scheduler)
    # Two steps of priority are four times the share.
    assert low.num_computed == pytest.approx(6000 / 5, abs=300)


def test_the_order_is_the_policys():
    allocator = BlockAllocator(100)
    scheduler = PrefillScheduler(allocator, BLOCK_SIZE, 100, 100, FirstCome())
    add(scheduler, prompt("second", 10, at=2, priority=5), prompt("first", 120, at=1))
    assert step(scheduler) == {"first": (0, 100)}
    assert step(scheduler) == {"first": (100, 120), "second": (0, 10)}


def test_a_tiny_budget_goes_to_who_came_alone():
    scheduler, _ = new(max_step_tokens=1)
    add(scheduler, prompt("old", 3, at=0), prompt("short", 9, at=1))
    assert [step(scheduler) for _ in range(4)] == [
        {"old": (0, 1)},
        {"old": (1, 2)},
        {"old": (2, 3)},
        {"short": (0, 1)},
    ]


class TestMemory:
    """A cache of 10 blocks of 16 tokens."""

    @pytest.fixture
    def pools(self):
        return new(num_blocks=10, max_step_tokens=1000)

    def test_a_prompt_waits_for_blocks_until_the_ack(self, pools):
        scheduler, allocator = pools
        add(scheduler, prompt("first", 100, at=0), prompt("second", 100, at=1))
        assert step(scheduler) == {"first": (0, 100)}
        assert step(scheduler) == {}
        assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)
        allocator.free("first")
        assert step(scheduler) == {"second": (0, 100)}

    def test_a_smaller_one_may_go_first(self, pools):
        scheduler, _ = pools
        add(scheduler, prompt("holds", 100, at=0))
        step(scheduler)
        add(scheduler, prompt("big", 160, at=1), prompt("small", 16, at=2))
        assert step(scheduler) == {"small": (0, 16)}

    @pytest.mark.parametrize("big_priority", [0, 1])
    def test_a_big_one_is_passed_over_only_so_often(self, pools, big_priority):
        scheduler, allocator = pools
        add(scheduler, prompt("holds", 16, at=0))
        step(scheduler)
        add(scheduler, prompt("big", 160, at=1, priority=big_priority))
        # While it has its part of the turns still to come, the shorter ones are before it by right.
        num_before = 0 if big_priority else 3
        for i in range(num_before + MAX_PASSED_OVER):
            add(scheduler, prompt(f"small-{i}", 16, at=2.0 + i))
            assert step(scheduler, allocator) == {f"small-{i}": (0, 16)}
        add(scheduler, prompt("late", 16, at=99))
        assert step(scheduler, allocator) == {}
        allocator.free("holds")
        assert step(scheduler, allocator) == {"big": (0, 160)}
        assert step(scheduler, allocator) == {"late": (0, 16)}

    def test_running_ones_carry_on_while_nobody_may_start(self, pools):
        scheduler, allocator = pools
        scheduler, allocator = new(num_blocks=10, max_step_tokens=16)
        add(scheduler, prompt("running", 100, at=0))
        step(scheduler)
        add(scheduler, prompt("big", 160, at=1))
        for i in range(MAX_PASSED_OVER + 1):
            add(scheduler, prompt(f"small-{i}", 1, at=2.0 + i))
        assert set(step(scheduler, allocator)) == {"running", *(f"small-{i}" for i in range(3))}
        while scheduler.num_running:
            assert "running" in step(scheduler, allocator)
        assert set(step(scheduler, allocator)) == {"big"}

    def test_a_higher_class_may_start_before_one_that_was_passed_over(self, pools):
        scheduler, allocator = pools
        add(scheduler, prompt("holds", 16, at=0))
        step(scheduler)
        add(scheduler, prompt("big", 160, at=1, priority=1))
        add(scheduler, *(prompt(f"small-{i}", 1, at=2) for i in range(MAX_PASSED_OVER + 1)))
        assert len(step(scheduler, allocator)) == MAX_PASSED_OVER
        add(scheduler, prompt("high", 16, at=3, priority=2))
        assert step(scheduler, allocator) == {"high": (0, 16)}

    def test_it_is_the_best_one_lacking_blocks_that_counts(self, pools):
        scheduler, allocator = pools
        add(scheduler, prompt("holds", 16, at=0))
        step(scheduler)
        add(scheduler, prompt("best", 160, at=1, priority=2), prompt("second", 160, at=1, priority=1))
        add(scheduler, *(prompt(f"small-{i}", 1, at=2) for i in range(MAX_PASSED_OVER)))
        assert len(step(scheduler, allocator)) == MAX_PASSED_OVER
        scheduler.remove("second")
        add(scheduler, prompt("late", 1, at=3))
        assert step(scheduler, allocator) == {}

    def test_a_prompt_that_can_never_fit_is_refused(self, pools):
        scheduler, _ = pools
        with pytest.raises(ValueError, match="needs 11 blocks, and there are 10"):
            scheduler.add(prompt("huge", 161))
        add(scheduler, prompt("just", 160))


def test_the_queue_is_bounded_and_started_prompts_do_not_count():
    scheduler, _ = new(max_waiting=2)
    add(scheduler, prompt("a", 500), prompt("b", 400))
    assert not scheduler.add(prompt("c", 1))
    step(scheduler)
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 1)
    add(scheduler, prompt("c", 1))
    assert not scheduler.add(prompt("d", 1))


def test_a_request_is_here_only_once_until_its_blocks_are_freed():
    scheduler, allocator = new()
    add(scheduler, prompt("a", 50))
    with pytest.raises(KeyError, match="a is here already"):
        scheduler.add(prompt("a", 50))
    step(scheduler)
    with pytest.raises(KeyError, match="a is here already"):
        scheduler.add(prompt("a", 50))
    allocator.free("a")
    add(scheduler, prompt("a", 50))


def test_an_empty_prompt_is_refused():
    scheduler, _ = new()
    with pytest.raises(ValueError, match="no tokens"):
        scheduler.add(prompt("a", 0))


def test_removal_works_from_every_state_and_frees_no_blocks():
    scheduler, allocator = new()
    running, waiting = prompt("running", 500, at=0), prompt("waiting", 5000, at=1)
    add(scheduler, running)
    step(scheduler)
    add(scheduler, waiting)
    assert scheduler.num_pending_tokens == 5400
    assert scheduler.remove("running") is running
    assert scheduler.remove("waiting") is waiting
    assert scheduler.remove("waiting") is None
    assert (scheduler.num_pending_tokens, scheduler.num_running, scheduler.num_waiting) == (0, 0, 0)
    assert allocator.holdings() == {"running": (BlockState.RUNNING, 32)}


def test_a_sequence_removed_during_its_step_is_passed_by():
    scheduler, allocator = new()
    old = prompt("a", 150)
    add(scheduler, old)
    scheduled = scheduler.schedule(0.0)
    scheduler.remove("a")
    allocator.free("a")
    again = prompt("a", 150)
    add(scheduler, again)
    scheduler.schedule(0.0)
    scheduler.advance(scheduled)
    assert (old.num_computed, again.num_computed) == (0, 0)
    assert scheduler.num_pending_tokens == 150


def test_a_token_sampled_early_does_not_keep_a_prompt_here():
    scheduler, _ = new()
    sequence = prompt("a", 50)
    add(scheduler, sequence)
    scheduled = scheduler.schedule(0.0)
    sequence.tokens.append(7)
    scheduler.advance(scheduled)
    assert (scheduler.num_running, scheduler.num_pending_tokens) == (0, 0)


def test_a_prompt_that_does_not_fit_at_512_passes_at_128():
    scheduler, _ = new(max_step_tokens=512)
    add(scheduler, prompt("a", 2000))
    tried = []
    while (size := sum(chunk.end - chunk.start for chunk in scheduler.schedule(0.0))) > 128:
        tried.append(size)
        assert scheduler.shrink()
    assert tried == [512, 256]
    assert size == 128
    assert scheduler.num_pending_tokens == 2000


def test_the_budget_recovers_after_good_steps():
    scheduler, _ = new(max_step_tokens=64)
    add(scheduler, prompt("a", 10_000))
    scheduler.schedule(0.0)
    assert scheduler.shrink()
    sizes = [
        end - start for _ in range(NUM_STEPS_BEFORE_GROWTH + 2) for start, end in step(scheduler).values()
    ]
    assert sizes == [32] * (NUM_STEPS_BEFORE_GROWTH + 1) + [64]


def test_at_the_floor_the_loop_is_told():
    scheduler, _ = new(max_step_tokens=64)
    add(scheduler, prompt("a", 100))
    shrunk = []
    for _ in range(3):
        scheduler.schedule(0.0)
        shrunk.append(scheduler.shrink())
    assert shrunk == [True, True, False]
    assert sum(c.end - c.start for c in scheduler.schedule(0.0)) == MIN_STEP_TOKENS


class TestSharedPrefixes:
    """What is cached is not computed, and what is computed can be shared from then on."""

    @staticmethod
    def named(request_id, tokens, *, salt="", at=0.0):
        hashes = BlockHashes("model", salt, BLOCK_SIZE)
        return Sequence(request_id, list(tokens), len(tokens), 0, at, hashes=hashes)

    def test_the_second_prompt_starts_where_the_first_differs(self):
        scheduler, allocator = new()
        add(scheduler, self.named("a", range(80)))
        assert step(scheduler, allocator) == {"a": (0, 80)}
        add(scheduler, self.named("b", [*range(50), *range(7)]))
        assert scheduler.num_pending_tokens == 9
        assert step(scheduler, allocator) == {"b": (48, 57)}
        assert scheduler.num_pending_tokens == 0

    @pytest.mark.parametrize(("num_tokens", "start"), [(16, 0), (17, 16), (32, 16), (33, 32)])
    def test_at_least_the_last_token_is_computed(self, num_tokens, start):
        scheduler, allocator = new()
        for request_id in ("a", "b"):
            add(scheduler, self.named(request_id, range(num_tokens)))
            got = step(scheduler, allocator)
        assert got == {"b": (start, num_tokens)}

    def test_blocks_are_shared_while_the_first_still_runs(self):
        scheduler, allocator = new(max_step_tokens=64)
        add(scheduler, self.named("a", range(200)))
        assert step(scheduler) == {"a": (0, 64)}
        add(scheduler, self.named("b", range(70)))
        assert step(scheduler) == {"b": (64, 70), "a": (64, 122)}
        assert allocator.counts.running == 13 + 1

    def test_a_salt_of_its_own_shares_nothing(self):
        scheduler, allocator = new()
        add(scheduler, self.named("a", range(80)))
        step(scheduler, allocator)
        add(scheduler, self.named("b", range(80), salt="tenant"))
        assert step(scheduler, allocator) == {"b": (0, 80)}

    def test_a_short_rest_goes_first(self):
        scheduler, allocator = new(max_step_tokens=40)
        add(scheduler, self.named("a", range(96)))
        while step(scheduler, allocator):
            pass
        add(
            scheduler,
            self.named("oldest", [1] * 400),
            self.named("long-cached", range(100), at=2.0),
            self.named("short", [2] * 30, at=1.0),
        )
        assert list(step(scheduler)) == ["long-cached", "short", "oldest"]

    def test_what_was_evicted_while_it_waited_is_computed(self):
        scheduler, allocator = new(num_blocks=6)
        add(scheduler, self.named("a", range(64)))
        step(scheduler, allocator)
        allocator.allocate("other", 6, BlockState.RUNNING)
        allocator.free("other")
        allocator.allocate("other", 3, BlockState.RUNNING)
        add(scheduler, self.named("b", range(80)))
        assert scheduler.schedule(0.0) == []
        assert scheduler.num_pending_tokens == 80
        allocator.free("other")
        assert step(scheduler, allocator) == {"b": (0, 80)}

    def test_a_removed_prompts_blocks_are_not_published(self):
        scheduler, allocator = new()
        sequence = self.named("a", range(80))
        add(scheduler, sequence)
        scheduled = scheduler.schedule(0.0)
        scheduler.remove("a")
        scheduler.advance(scheduled)
        assert not list(allocator.cache.hashes)
