"""PrefillScheduler under random arrivals, steps, cancels and shortages of memory.

Each step writes into a model of the cache and reads back what came before, so that a wrong block table, a
block that two write, or one that is shared for the wrong content shows as other tokens.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduling.allocator import BlockAllocator, BlockState
from scheduling.block_hash import BlockHashes
from scheduling.prefill import PrefillScheduler
from scheduling.sequence import Sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 20
MAX_WAITING = 6


class PrefillMachine(RuleBasedStateMachine):
    """The loop of a prefill worker, with acknowledgements that come when they like."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.live: dict[str, Sequence] = {}
        self.unacknowledged: dict[str, Sequence] = {}
        self.estimates: dict[str, int] = {}
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}
        self.now_s = 0.0

    @initialize(max_step_tokens=st.sampled_from([1, 7, 32, 100]))
    def start(self, max_step_tokens):
        self.max_step_tokens = max_step_tokens
        self.scheduler = PrefillScheduler(self.allocator, BLOCK_SIZE, max_step_tokens, MAX_WAITING)

    @rule(
        num_tokens=st.integers(1, NUM_BLOCKS * BLOCK_SIZE),
        family=st.integers(0, 2),
        priority=st.integers(0, 2),
        wait=st.booleans(),
    )
    def add(self, num_tokens, family, priority, wait):
        self.now_s += wait
        request_id = f"r{len(self.live) + len(self.unacknowledged)}-{self.now_s}-{num_tokens}"
        if request_id in self.live or request_id in self.unacknowledged:
            return
        # All families begin alike; within one all tokens are the same.
        tokens = [p if p < 6 else 1000 * family + p for p in range(num_tokens)]
        hashes = BlockHashes("model", "", BLOCK_SIZE)
        sequence = Sequence(request_id, tokens, num_tokens, priority, self.now_s, hashes=hashes)
        cached = self.allocator.cache.match(hashes.of(tokens)[: (num_tokens - 1) // BLOCK_SIZE])
        had_room = self.scheduler.num_waiting < MAX_WAITING
        assert self.scheduler.add(sequence) == had_room
        if had_room:
            self.live[request_id] = sequence
            self.estimates[request_id] = num_tokens - len(cached) * BLOCK_SIZE

    @rule(data=st.data())
    def step(self, data):
        scheduled = self.scheduler.schedule(self.now_s)
        self.check_plan(scheduled)
        cancelled = None
        if scheduled and data.draw(st.integers(0, 5)) == 0:
            cancelled = data.draw(st.sampled_from(scheduled)).sequence
            assert self.scheduler.remove(cancelled.request_id) is cancelled
            del self.live[cancelled.request_id]
        if scheduled and data.draw(st.integers(0, 5)) == 0:
            self.scheduler.shrink()
        else:
            self.run(scheduled, cancelled)
        if cancelled is not None:
            self.allocator.free(cancelled.request_id)

    def run(self, scheduled, cancelled=None):
        for chunk in scheduled:
            self.compute(chunk)
        self.scheduler.advance(scheduled)
        for chunk in scheduled:
            sequence = chunk.sequence
            if sequence is cancelled:
                continue
            assert sequence.num_computed == chunk.end
            if chunk.is_last:
                self.unacknowledged[sequence.request_id] = self.live.pop(sequence.request_id)

    def compute(self, chunk):
        sequence = chunk.sequence
        others = [s for s in [*self.live.values(), *self.unacknowledged.values()] if s is not sequence]
        for position in range(chunk.end):
            block = sequence.block_table[position // BLOCK_SIZE]
            content = tuple(sequence.tokens[: position + 1])
            if position >= chunk.start:
                assert not any(block in other.block_table for other in others)
                self.cache[block, position % BLOCK_SIZE] = content
            assert self.cache[block, position % BLOCK_SIZE] == content

    def check_plan(self, scheduled):
        got = {chunk.sequence.request_id: chunk.end - chunk.start for chunk in scheduled}
        used = sum(got.values())
        assert len(got) == len(scheduled)
        assert used <= self.max_step_tokens
        for chunk in scheduled:
            assert chunk.sequence is self.live[chunk.sequence.request_id]
            assert chunk.start == chunk.sequence.num_computed < chunk.end <= len(chunk.sequence.tokens)
        started = [s for s in self.live.values() if self.allocator.holds(s.request_id)]
        if not started:
            assert not self.live or self.unacknowledged
            return
        assert scheduled
        # No token of the budget is left over while one that has started wants it.
        if used < min(self.max_step_tokens, 16):
            assert all(got.get(s.request_id, 0) == s.remaining for s in started)

    @precondition(lambda self: self.unacknowledged)
    @rule(data=st.data())
    def acknowledge(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.unacknowledged)))
        sequence = self.unacknowledged.pop(request_id)
        for position in range(len(sequence.tokens)):
            place = (sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            assert self.cache[place] == tuple(sequence.tokens[: position + 1])
        self.allocator.free(request_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.remove(request_id) is self.live.pop(request_id)
        self.allocator.free(request_id)

    @invariant()
    def counted(self):
        self.allocator.check()
        held = {
            s.request_id: (BlockState.RUNNING, len(s.block_table))
            for s in [*self.live.values(), *self.unacknowledged.values()]
            if s.block_table
        }
        assert self.allocator.holdings() == held
        started = [s for s in self.live.values() if s.block_table]
        assert all(len(s.block_table) == -(-len(s.tokens) // BLOCK_SIZE) for s in started)
        assert self.scheduler.num_running == len(started)
        assert self.scheduler.num_waiting == len(self.live) - len(started)
        waiting = [self.estimates[name] for name, s in self.live.items() if not s.block_table]
        assert self.scheduler.num_pending_tokens == sum(s.remaining for s in started) + sum(waiting)

    def teardown(self):
        """Once arrivals stop and every ack comes at once, each step fills its budget or finishes someone."""
        if not hasattr(self, "scheduler"):
            return
        smallest = min(self.max_step_tokens, 16)
        bound = sum(s.remaining for s in self.live.values()) // smallest + len(self.live)
        num_steps = 0
        while self.live:
            for request_id in list(self.unacknowledged):
                del self.unacknowledged[request_id]
                self.allocator.free(request_id)
            self.run(self.scheduler.schedule(self.now_s))
            self.counted()
            num_steps += 1
            assert num_steps <= bound
        for request_id in self.unacknowledged:
            self.allocator.free(request_id)
        assert self.allocator.num_available == NUM_BLOCKS


PrefillMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPrefillSchedulerConserves = PrefillMachine.TestCase
