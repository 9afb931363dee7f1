"""The policy of decode, in exact numbers."""

import pytest

from scheduling.allocator import BlockAllocator, BlockState
from scheduling.block_hash import BlockHashes
from scheduling.decode import MAX_PASSED_OVER, DecodeScheduler
from scheduling.sequence import Sequence

BLOCK_SIZE = 4


class Worker:
    """A decode worker's loop without an engine: token n of an output is n."""

    def __init__(self, num_blocks=100, max_batch_size=8, max_step_tokens=64, step_target_s=None):
        self.allocator = BlockAllocator(num_blocks)
        self.scheduler = DecodeScheduler(
            self.allocator, BLOCK_SIZE, max_batch_size, max_step_tokens, step_target_s
        )

    def admit(self, request_id, num_prompt_tokens, *, at=0.0, priority=0):
        table = self.scheduler.reserve(request_id, num_prompt_tokens)
        assert table is not None
        return self.complete(request_id, num_prompt_tokens, table, at=at, priority=priority)

    def complete(self, request_id, num_prompt_tokens, table, *, at=0.0, priority=0):
        sequence = Sequence(
            request_id,
            [0] * (num_prompt_tokens + 1),
            num_prompt_tokens,
            priority,
            at,
            table,
            num_prompt_tokens,
        )
        self.scheduler.admit(sequence)
        return sequence

    def step(self):
        """Runs one step: {request: (start, end)} of what was computed, and the names of the preempted."""
        plan = self.scheduler.schedule()
        for row in plan.scheduled:
            assert len(row.sequence.block_table) * BLOCK_SIZE >= row.end
            self.scheduler.advance(row, row.sequence.num_output_tokens if row.is_last else None)
        self.allocator.check()
        got = {row.sequence.request_id: (row.start, row.end) for row in plan.scheduled}
        return got, [s.request_id for s in plan.preempted]

    def end(self, request_id):
        assert self.scheduler.remove(request_id) is not None
        self.allocator.free(request_id)


class TestReserve:
    @pytest.mark.parametrize(("num_prompt_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 2), (7, 2), (8, 3)])
    def test_it_takes_the_prompt_and_its_first_growth(self, num_prompt_tokens, num_blocks):
        worker = Worker()
        assert len(worker.scheduler.reserve("a", num_prompt_tokens)) == num_blocks
        assert worker.allocator.holdings() == {"a": (BlockState.RESERVED, num_blocks)}

    def test_what_fits_an_empty_worker_is_taken(self):
        worker = Worker(num_blocks=16)
        assert worker.scheduler.reserve("a", 16 * BLOCK_SIZE) is None
        assert len(worker.scheduler.reserve("a", 16 * BLOCK_SIZE - 1)) == 16

    def test_a_block_for_each_owner_is_kept_back_up_to_an_eighth(self):
        worker = Worker(num_blocks=16)
        assert worker.scheduler.reserve("a", 4 * BLOCK_SIZE - 1)
        assert worker.scheduler.reserve("b", 12 * BLOCK_SIZE - 1) is None
        assert worker.scheduler.reserve("b", 4 * BLOCK_SIZE - 1)
        assert worker.scheduler.reserve("c", 4 * BLOCK_SIZE - 1)
        assert worker.scheduler.reserve("d", 3 * BLOCK_SIZE - 1) is None
        assert worker.scheduler.reserve("d", 2 * BLOCK_SIZE - 1)

    def test_a_dropped_reservation_leaves_nothing(self):
        worker = Worker(num_blocks=4)
        worker.scheduler.reserve("a", 4 * BLOCK_SIZE - 1)
        worker.allocator.free("a")
        assert worker.scheduler.reserve("b", 4 * BLOCK_SIZE - 1)
        assert not worker.scheduler.has_work

    def test_at_most_two_batches_hold_blocks(self):
        worker = Worker(max_batch_size=2)
        tables = [worker.scheduler.reserve(str(i), 1) for i in range(5)]
        assert [table is not None for table in tables] == [True] * 4 + [False]

    def test_a_request_reserves_once(self):
        worker = Worker()
        worker.scheduler.reserve("a", 1)
        with pytest.raises(KeyError, match="a is here already"):
            worker.scheduler.reserve("a", 1)


class TestAdmit:
    def test_it_joins_at_the_next_step_with_its_first_output_token(self):
        worker = Worker()
        worker.admit("a", 5)
        assert worker.allocator.holdings() == {"a": (BlockState.RUNNING, 2)}
        assert worker.step() == ({"a": (5, 6)}, [])
        worker.admit("b", 2)
        assert worker.step() == ({"a": (6, 7), "b": (2, 3)}, [])

    def test_without_a_reservation_it_is_refused(self):
        worker = Worker()
        with pytest.raises(KeyError, match="a holds no blocks"):
            worker.complete("a", 1, [0])
        assert not worker.scheduler.has_work

    def test_an_incomplete_sequence_is_refused_and_stays_reserved(self):
        worker = Worker()
        table = worker.scheduler.reserve("a", 4)
        with pytest.raises(ValueError, match="a has 2 tokens to compute"):
            worker.scheduler.admit(Sequence("a", [0] * 5, 4, 0, 0.0, table, 3))
        with pytest.raises(ValueError, match="a has 1 blocks and needs 2"):
            worker.scheduler.admit(Sequence("a", [0] * 5, 4, 0, 0.0, table[:1], 4))
        assert worker.allocator.holdings() == {"a": (BlockState.RESERVED, 2)}


class TestRows:
    def test_the_batch_is_bounded_and_ranked(self):
        worker = Worker(max_batch_size=2)
        worker.admit("young", 1, at=3)
        worker.admit("old", 1, at=1)
        worker.admit("high", 1, at=9, priority=1)
        assert list(worker.step()[0]) == ["high", "old"]
        worker.end("high")
        assert list(worker.step()[0]) == ["old", "young"]

    def test_equal_ages_are_ranked_by_id(self):
        worker = Worker(max_batch_size=1)
        worker.admit("b", 1)
        worker.admit("a", 1)
        assert list(worker.step()[0]) == ["a"]

    def test_tables_grow_by_a_block_when_the_last_is_full(self):
        worker = Worker()
        sequence = worker.admit("a", 3)
        sizes = []
        for _ in range(6):
            worker.step()
            sizes.append(len(sequence.block_table))
        assert sizes == [1, 2, 2, 2, 2, 3]

    def test_tokens_are_appended_in_order(self):
        worker = Worker()
        sequence = worker.admit("a", 2)
        for _ in range(4):
            worker.step()
        assert sequence.tokens == [0, 0, 0, 1, 2, 3, 4]
        assert (sequence.num_computed, sequence.remaining) == (6, 1)

    @pytest.mark.parametrize(("num_rows", "token_id"), [(1, None), (0, 5)])
    def test_a_token_comes_when_it_is_due_and_only_then(self, num_rows, token_id):
        worker = Worker(num_blocks=9, max_step_tokens=1)
        sequence = worker.admit("a", 30)
        if not num_rows:  # Preempted and resumed, so that its step is a chunk that is not its last.
            worker.scheduler._preempt(sequence)
        (row,) = worker.scheduler.schedule().scheduled
        assert row.is_last == bool(num_rows)
        with pytest.raises(ValueError, match="due"):
            worker.scheduler.advance(row, token_id)

    def test_a_sequence_removed_during_its_step_is_passed_by(self):
        worker = Worker()
        sequence = worker.admit("a", 2)
        (row,) = worker.scheduler.schedule().scheduled
        assert worker.scheduler.remove("a") is sequence
        worker.scheduler.advance(row, 1)
        assert sequence.tokens == [0, 0, 0]
        assert worker.allocator.holdings() == {"a": (BlockState.RUNNING, 1)}
        worker.allocator.free("a")
        worker.admit("a", 2)
        worker.scheduler.advance(row, 1)
        assert sequence.tokens == [0, 0, 0]


class TestBatchLimit:
    def slow_worker(self, **options):
        worker = Worker(max_batch_size=8, step_target_s=0.05, **options)
        for index in range(8):
            worker.admit(str(index), 1, at=index)
        return worker

    def test_a_step_that_was_too_slow_halves_the_batch_and_quick_ones_bring_it_back(self):
        worker = self.slow_worker()
        sizes = []
        for step_s in (0.06, 0.04, 0.04, 0.06, 0.04):
            sizes.append(len(worker.step()[0]))
            worker.scheduler.observe(step_s)
        assert sizes == [8, 4, 5, 6, 3]
        assert worker.scheduler.batch_limit == 4

    def test_newcomers_are_held_for_two_batches_of_the_size_that_runs(self):
        worker = self.slow_worker()
        for _ in range(3):
            worker.step()
            worker.scheduler.observe(0.06)
        assert worker.scheduler.batch_limit == 1
        for name in "234567":
            worker.end(name)
        assert worker.scheduler.reserve("new", 1) is None
        worker.end("1")
        assert worker.scheduler.reserve("new", 1)

    def test_a_step_that_recomputed_says_nothing_of_the_batch(self):
        worker = self.slow_worker(num_blocks=60)
        worker.scheduler._preempt(worker.scheduler._running["7"])
        assert worker.step()[0]["7"] == (0, 2)
        worker.scheduler.observe(1.0)
        assert worker.scheduler.batch_limit == 8

    def test_running_ones_keep_their_rows(self):
        worker = self.slow_worker()
        worker.step()
        worker.scheduler.observe(0.06)
        for _ in range(MAX_PASSED_OVER):
            assert list(worker.step()[0]) == ["0", "1", "2", "3"]

    def test_who_is_left_out_for_long_has_a_row_though_it_ranks_low(self):
        worker = Worker(num_blocks=1000, max_batch_size=4)
        for index in range(4):
            worker.admit(f"high {index}", 1, at=10 + index, priority=1)
        low = [worker.admit(name, 1, at=at, priority=0) for at, name in enumerate(["old", "young"])]
        batches = [set(worker.step()[0]) for _ in range(6 * (MAX_PASSED_OVER + 2))]
        # The lowest of the high gives way, in one step of many.
        turns = [sum(name in batch for batch in batches) for name in ("high 0", "high 3", "old", "young")]
        assert turns == [len(batches), len(batches) - 12, 6, 6]
        assert [sequence.num_output_tokens for sequence in low] == [1 + 6, 1 + 6]
        assert all(len(batch) == 4 for batch in batches)

    def test_a_batch_of_one_is_shared_too(self):
        worker = Worker(max_batch_size=1)
        worker.admit("high", 1, priority=1)
        worker.admit("low", 1)
        turns = [next(iter(worker.step()[0])) for _ in range(2 * (MAX_PASSED_OVER + 1))]
        assert turns == 2 * (["high"] * MAX_PASSED_OVER + ["low"])

    def test_no_turn_is_given_to_one_that_would_lose_its_blocks_to_it(self):
        worker = Worker(num_blocks=3, max_batch_size=1)
        worker.admit("high", 7, priority=1)
        low = worker.admit("low", 3)
        low.num_passed_over = MAX_PASSED_OVER
        # Low's next token needs no block; the one after it would.
        assert worker.step()[0] == {"low": (3, 4)}
        low.num_passed_over = MAX_PASSED_OVER
        assert worker.step() == ({"high": (7, 8)}, [])


def crowded():
    """7 blocks, all held: three sequences about to grow; the oldest and highest ranks are not in id order."""
    worker = Worker(num_blocks=7)
    worker.admit("low", 7, at=1, priority=-1)
    worker.admit("young", 7, at=3)
    worker.admit("old", 7, at=2)
    assert worker.step() == ({"old": (7, 8), "young": (7, 8), "low": (7, 8)}, [])
    return worker


class TestPreemption:
    def test_the_lowest_priority_gives_way_though_it_is_oldest_then_the_youngest(self):
        worker = crowded()
        # One block is free: old takes it, young takes one of low's two.
        assert worker.step() == ({"old": (8, 9), "young": (8, 9)}, ["low"])
        for _ in range(3):
            assert worker.step()[1] == []
        # Old takes the last free block and young, the lowest now, has to give way to itself.
        assert worker.step() == ({"old": (12, 13)}, ["young"])

    def test_nothing_is_kept_of_a_preempted_sequence_but_its_tokens(self):
        worker = crowded()
        (low,) = worker.scheduler.schedule().preempted
        assert (low.request_id, len(low.tokens), low.num_computed, low.block_table) == ("low", 9, 0, [])
        assert worker.allocator.holdings() == {
            "old": (BlockState.RUNNING, 3),
            "young": (BlockState.RUNNING, 3),
        }
        assert (worker.scheduler.num_running, worker.scheduler.num_preempted) == (2, 1)

    def test_no_reservation_while_a_preempted_sequence_waits(self):
        worker = crowded()
        worker.step()
        worker.end("young")
        assert worker.allocator.num_available == 4
        assert worker.scheduler.reserve("new", 1) is None
        with pytest.raises(KeyError, match="low is here already"):
            worker.scheduler.reserve("low", 1)
        worker.step()
        assert worker.scheduler.num_preempted == 0
        assert worker.scheduler.reserve("new", 1)

    def test_it_resumes_by_recomputing_all_its_tokens_and_carries_on(self):
        worker = crowded()
        worker.step()
        worker.end("young")
        assert worker.step() == ({"old": (9, 10), "low": (0, 9)}, [])
        assert worker.step() == ({"old": (10, 11), "low": (9, 10)}, [])

    def test_it_can_be_removed_and_holds_nothing(self):
        worker = crowded()
        worker.step()
        assert worker.scheduler.remove("low").request_id == "low"
        assert worker.allocator.free("low") == 0
        assert worker.scheduler.num_preempted == 0
        assert worker.scheduler.remove("low") is None

    def test_a_reservation_is_never_taken_back(self):
        worker = Worker(num_blocks=4)
        table = worker.scheduler.reserve("reserved", 7)
        worker.admit("running", 7)
        worker.step()
        assert worker.step() == ({}, ["running"])
        assert worker.scheduler.has_work
        worker.complete("reserved", 7, table, at=1)
        worker.step()
        worker.end("reserved")
        assert worker.step() == ({"running": (0, 9)}, [])

    def test_the_first_to_resume_is_the_highest_ranked_and_smaller_ones_do_not_overtake_it(self):
        worker = Worker(num_blocks=10, max_batch_size=4)
        worker.admit("top", 11, at=0, priority=1)
        worker.admit("big", 11, at=1)
        worker.admit("small", 2, at=2)
        worker.scheduler.reserve("reserved", 7)
        for name in ("big", "small"):
            worker.scheduler._preempt(worker.scheduler._running[name])
        worker.allocator.allocate("top", 3, BlockState.RUNNING)
        assert list(worker.step()[0]) == ["top"]
        assert worker.scheduler.num_preempted == 2
        worker.allocator.free("reserved")
        # Big needs 4 of the 4 free blocks, less the watermark of 1.
        assert list(worker.step()[0]) == ["top"]
        worker.end("top")
        assert list(worker.step()[0]) == ["big", "small"]


def test_overload_costs_little_recomputation():
    """A hundred requests for a cache that holds about thirty; without the watermark it is nearly a half."""
    worker = Worker(num_blocks=256 * 4, max_batch_size=64, max_step_tokens=512)
    waiting = [f"{i:03}" for i in range(100)]
    num_computed = num_rows = 0
    while waiting or worker.scheduler.has_work:
        while waiting and worker.scheduler.reserve(waiting[0], 5) is not None:
            worker.allocator.free(waiting[0])
            worker.admit(waiting.pop(0), 5, at=100 - len(waiting))
        for name, (start, end) in worker.step()[0].items():
            num_computed += end - start
            num_rows += 1
            if end == 6 + 50 + 37 * int(name) % 250:
                worker.end(name)
    assert num_computed - num_rows < 0.25 * num_rows


class TestRecompute:
    def preempted_worker(self, **options):
        worker = Worker(num_blocks=60, **options)
        worker.admit("old", 3, at=0)
        long = worker.admit("long", 99, at=1)
        worker.scheduler._preempt(long)
        return worker

    def test_chunks_share_the_step_with_the_rows(self):
        worker = self.preempted_worker(max_step_tokens=41)
        spans = [worker.step()[0]["long"] for _ in range(4)]
        assert spans == [(0, 40), (40, 80), (80, 100), (100, 101)]
        assert len(worker.scheduler.schedule().scheduled) == 2

    def test_it_gets_on_even_where_rows_fill_the_step(self):
        worker = self.preempted_worker(max_step_tokens=1)
        assert [worker.step()[0] for _ in range(2)] == [
            {"old": (3, 4), "long": (0, 16)},
            {"old": (4, 5), "long": (16, 32)},
        ]

    def test_chunks_of_several_sequences_share_one_budget(self):
        worker = self.preempted_worker(max_step_tokens=121)
        worker.step()
        short = worker.admit("short", 49, at=2)
        for name in ("long", "short"):
            worker.scheduler._preempt(worker.scheduler._running[name])
        assert worker.step()[0] == {"old": (4, 5), "long": (0, 101), "short": (0, 19)}
        assert worker.step()[0] == {"old": (5, 6), "long": (101, 102), "short": (19, 50)}
        assert short.remaining == 1

    def test_it_gets_the_block_of_its_next_token_too(self):
        worker = self.preempted_worker(max_step_tokens=200)
        worker.step()
        assert len(worker.scheduler._running["long"].block_table) == 26

    def test_out_of_memory_makes_the_chunk_smaller_and_loses_nothing(self):
        worker = self.preempted_worker(max_step_tokens=65)
        sizes = []
        while True:
            row, chunk = worker.scheduler.schedule().scheduled
            assert (row.sequence.request_id, row.end - row.start) == ("old", 1)
            sizes.append(chunk.end - chunk.start)
            if not worker.scheduler.shrink():
                break
        assert sizes == [64, 31, 16]
        assert chunk.start == 0

    def test_decode_rows_alone_cannot_shrink(self):
        worker = Worker()
        worker.admit("a", 3)
        worker.scheduler.schedule()
        assert not worker.scheduler.shrink()


class TestOutgrown:
    def test_a_sequence_may_fill_the_whole_cache_and_no_more(self):
        worker = Worker(num_blocks=2)
        sequence = worker.admit("a", 3)
        for _ in range(5):
            worker.step()
        assert (sequence.num_computed, len(sequence.block_table)) == (8, 2)
        plan = worker.scheduler.schedule()
        assert (plan.scheduled, plan.preempted, plan.outgrown) == ([], [], [sequence])
        assert not worker.scheduler.has_work
        assert worker.allocator.free("a") == 2

    def test_a_full_sized_sequence_resumes(self):
        worker = Worker(num_blocks=2)
        sequence = worker.admit("a", 3)
        for _ in range(4):
            worker.step()
        worker.scheduler._preempt(sequence)
        assert worker.step() == ({"a": (0, 8)}, [])


@pytest.mark.parametrize("max_batch_size", [0, -1])
def test_a_batch_has_rows(max_batch_size):
    with pytest.raises(ValueError, match="max_batch_size"):
        Worker(max_batch_size=max_batch_size)


class TestSharedPrefixes:
    """A prompt's blocks that are here are not sent; a preempted sequence finds its own again."""

    @staticmethod
    def start(worker, request_id, tokens, *, salt="", at=0.0, max_held=None):
        hashes = BlockHashes("model", salt, BLOCK_SIZE)
        table = worker.scheduler.reserve(request_id, len(tokens), hashes.of(tokens))
        num_held = worker.allocator.num_shared(request_id)
        sequence = Sequence(request_id, [*tokens, 7], len(tokens), 0, at, table, len(tokens), hashes=hashes)
        worker.scheduler.admit(sequence)
        return sequence, num_held

    def test_a_prompt_that_is_here_is_held_in_whole_blocks(self):
        worker = Worker()
        first, num_held = self.start(worker, "a", range(12))
        assert num_held == 0
        second, num_held = self.start(worker, "b", range(12))
        assert num_held == 3
        assert second.block_table[:3] == first.block_table[:3]
        assert second.block_table[3] != first.block_table[3]
        third, num_held = self.start(worker, "c", range(11))
        assert num_held == 2
        assert set(third.block_table[2:]).isdisjoint(first.block_table + second.block_table)

    def test_output_blocks_are_published_as_they_fill(self):
        worker = Worker()
        sequence, _ = self.start(worker, "a", range(7))
        # Token 7 comes with the prompt; its KV, and a full second block, with the first step.
        assert len(list(worker.allocator.cache.hashes)) == 1
        worker.step()
        assert len(list(worker.allocator.cache.hashes)) == 2
        worker.end("a")
        _, num_held = self.start(worker, "b", sequence.tokens[:8])
        assert num_held == 2

    def test_room_counts_a_shared_block_once(self):
        worker = Worker(num_blocks=16)
        self.start(worker, "a", range(40))
        assert worker.scheduler.reserve("b", 40) is None
        _, num_held = self.start(worker, "c", range(40))
        assert num_held == 10
        assert worker.allocator.counts.running == 12

    def test_a_preempted_sequence_recomputes_only_what_was_evicted(self):
        worker = Worker(num_blocks=6)
        low, _ = self.start(worker, "low", range(9), at=1.0)
        high, _ = self.start(worker, "high", range(100, 109), at=0.0)
        while not (got := worker.step())[1]:
            pass
        assert got[1] == ["low"]
        num_cached = len(worker.allocator.cache.match(low.block_hashes(99)))
        assert num_cached > 0
        worker.end("high")
        got, _ = worker.step()
        assert got["low"][0] == num_cached * BLOCK_SIZE
        assert len(high.tokens) > 10

    def test_a_resumed_sequence_with_everything_cached_advances_at_once(self):
        worker = Worker(num_blocks=8)
        sequence, _ = self.start(worker, "a", range(8), at=1.0)
        worker.scheduler._preempt(sequence)
        got, _ = worker.step()
        assert got == {"a": (4, 9)}
