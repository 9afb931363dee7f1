"""DecodeScheduler under random reservations, steps, cancels and shortages of memory.

Each step writes into a model of the cache and reads back what came before, so that a wrong block table, a
block that two write, or one that is shared for the wrong content shows as other tokens.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduling.allocator import BlockAllocator, BlockState
from scheduling.block_hash import BlockHashes
from scheduling.decode import MAX_PASSED_OVER, DecodeScheduler
from scheduling.sequence import Sequence, blocks_for
from scheduling.step_limit import MIN_STEP_TOKENS

BLOCK_SIZE = 4
NUM_BLOCKS = 16
MAX_TOKENS = NUM_BLOCKS * BLOCK_SIZE

# Prompt tokens, output tokens, priority, family.
REQUESTS = st.tuples(st.integers(1, 12), st.integers(2, MAX_TOKENS), st.integers(0, 2), st.integers(0, 2))


def token_at(family, position):
    """All families begin alike; within one all tokens are the same."""
    return position if position < 6 else 1000 * family + position


class DecodeMachine(RuleBasedStateMachine):
    """The loop of a decode worker. `targets` has each sequence's final number of tokens."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.reserved: dict[str, Sequence] = {}
        self.admitted: dict[str, Sequence] = {}
        self.targets: dict[str, int] = {}
        self.families: dict[str, int] = {}
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_requests = 0

    @initialize(
        max_batch_size=st.integers(1, 6),
        max_step_tokens=st.sampled_from([1, 20, 100]),
        step_target_s=st.sampled_from([None, 1.0]),
    )
    def start(self, max_batch_size, max_step_tokens, step_target_s):
        self.max_batch_size = max_batch_size
        self.max_step_tokens = max_step_tokens
        self.scheduler = DecodeScheduler(
            self.allocator, BLOCK_SIZE, max_batch_size, max_step_tokens, step_target_s
        )

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=5))
    def arrive(self, requests):
        for request in requests:
            if request_id := self.reserve_one(*request):
                self.admit(request_id)

    @rule(request=REQUESTS)
    def reserve(self, request):
        self.reserve_one(*request)

    def reserve_one(self, num_prompt_tokens, num_output_tokens, priority, family):
        idle = self.allocator.num_available == NUM_BLOCKS and not self.scheduler.has_work
        request_id = f"r{self.num_requests}"
        prompt = [token_at(family, p) for p in range(num_prompt_tokens)]
        hashes = BlockHashes("model", "", BLOCK_SIZE)
        table = self.scheduler.reserve(request_id, num_prompt_tokens, hashes.of(prompt))
        if table is None:
            assert not idle
            return None
        assert not self.scheduler.num_preempted
        assert len(table) == blocks_for(num_prompt_tokens + 1, BLOCK_SIZE)
        self.num_requests += 1
        self.targets[request_id] = min(num_prompt_tokens + num_output_tokens, MAX_TOKENS)
        self.families[request_id] = family
        self.reserved[request_id] = Sequence(
            request_id,
            [*prompt, token_at(family, num_prompt_tokens)],
            num_prompt_tokens,
            priority,
            float(self.num_requests // 2),
            table,
            hashes=hashes,
        )
        return request_id

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def complete(self, data):
        self.admit(data.draw(st.sampled_from(sorted(self.reserved))))

    def admit(self, request_id):
        sequence = self.admitted[request_id] = self.reserved.pop(request_id)
        # What is held already is not sent.
        num_held = self.allocator.num_shared(request_id) * BLOCK_SIZE
        self.compute(sequence, num_held, sequence.num_prompt_tokens)
        sequence.num_computed = sequence.num_prompt_tokens
        self.scheduler.admit(sequence)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def drop(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        del self.reserved[request_id]
        assert self.allocator.free(request_id) > 0

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def cancel(self, data):
        self.end(data.draw(st.sampled_from(sorted(self.admitted))))

    def end(self, request_id):
        assert self.scheduler.remove(request_id) is self.admitted.pop(request_id)
        self.allocator.free(request_id)

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), num_steps=st.integers(1, 12))
    def steps(self, data, num_steps):
        for _ in range(num_steps):
            plan = self.plan()
            cancelled = None
            if plan.scheduled and data.draw(st.integers(0, 9)) == 0:
                cancelled = data.draw(st.sampled_from(plan.scheduled)).sequence
                assert self.scheduler.remove(cancelled.request_id) is cancelled
            if plan.scheduled and data.draw(st.integers(0, 9)) == 0:
                self.scheduler.shrink()
            else:
                self.run(plan, cancelled)
                self.scheduler.observe(data.draw(st.sampled_from([0.5, 1.5])))
            if cancelled is not None:
                del self.admitted[cancelled.request_id]
                self.allocator.free(cancelled.request_id)

    def run(self, plan, cancelled=None):
        for row in plan.scheduled:
            self.compute(row.sequence, row.start, row.end)
        for row in plan.scheduled:
            before = list(row.sequence.tokens)
            is_last = row.is_last
            token = token_at(self.families[row.sequence.request_id], len(before))
            self.scheduler.advance(row, token if is_last else None)
            if row.sequence is cancelled:
                assert row.sequence.tokens == before
                continue
            assert row.sequence.tokens == before + [token] * is_last
            assert row.sequence.num_computed == row.end
            if len(row.sequence.tokens) == self.targets[row.sequence.request_id]:
                self.end(row.sequence.request_id)

    def compute(self, sequence, start, end):
        others = [s for s in [*self.reserved.values(), *self.admitted.values()] if s is not sequence]
        for position in range(end):
            block = sequence.block_table[position // BLOCK_SIZE]
            content = tuple(sequence.tokens[: position + 1])
            if position >= start:
                assert not any(block in other.block_table for other in others)
                self.cache[block, position % BLOCK_SIZE] = content
            assert self.cache[block, position % BLOCK_SIZE] == content

    def plan(self):
        before = {s.request_id for s in self.admitted.values() if s.block_table}
        overdue = any(s.num_passed_over >= MAX_PASSED_OVER for s in self.admitted.values())
        plan = self.scheduler.schedule()
        assert not plan.outgrown
        rows = [row for row in plan.scheduled if row.is_last and row.end - row.start == 1]
        chunks = [row for row in plan.scheduled if row not in rows]
        for row in plan.scheduled:
            assert row.sequence is self.admitted[row.sequence.request_id]
            assert row.start == row.sequence.num_computed < row.end <= len(row.sequence.tokens)
        assert len({row.sequence.request_id for row in plan.scheduled}) == len(plan.scheduled)
        assert len(rows) <= self.scheduler.batch_limit <= self.max_batch_size
        budget = max(self.max_step_tokens - len(rows), MIN_STEP_TOKENS)
        assert sum(chunk.end - chunk.start for chunk in chunks) <= budget
        self.check_ranks(plan, rows, before, overdue)
        # Nothing runs only where what is missing is reserved.
        assert plan.scheduled or not self.admitted or self.reserved
        return plan

    def check_ranks(self, plan, rows, before, overdue):
        ranks = [row.sequence.rank for row in rows]
        assert ranks == sorted(ranks)
        scheduled = {row.sequence.request_id for row in plan.scheduled}
        ready = [s for s in self.admitted.values() if s.block_table and s.remaining == 1]
        # Whoever is left out ranks below the whole batch, which is full; but for the rows of the overdue.
        for sequence in ready:
            if sequence.request_id not in scheduled and not overdue:
                assert len(rows) == self.scheduler.batch_limit
                assert sequence.rank > ranks[-1]
        # Nobody lost blocks to one that ranks lower: all who still hold some rank higher.
        for victim in plan.preempted:
            assert victim.request_id in before
            # Some resume at once: on blocks that others hold already, or that a victim after them has left.
            if victim.block_table:
                continue
            holders = [s for s in self.admitted.values() if s.block_table]
            assert all(holder.rank < victim.rank for holder in holders)
            assert (victim.num_computed, victim.block_table) == (0, [])

    @invariant()
    def counted(self):
        self.allocator.check()
        held = {s.request_id: (BlockState.RESERVED, len(s.block_table)) for s in self.reserved.values()}
        running = [s for s in self.admitted.values() if s.block_table]
        held |= {s.request_id: (BlockState.RUNNING, len(s.block_table)) for s in running}
        assert self.allocator.holdings() == held
        if not self.num_requests:
            return
        assert self.scheduler.num_running == len(running)
        assert self.scheduler.num_preempted == len(self.admitted) - len(running)
        assert self.scheduler.has_work == bool(self.admitted)

    def teardown(self):
        """Once arrivals stop, all finish in a bounded number of steps.

        In every step the highest-ranked running sequence makes a token or recomputes MIN_STEP_TOKENS. The
        tokens are counted; a recomputation is owed to a preemption, of which there is at most one for
        each block that a sequence grows.
        """
        for request_id in sorted(self.reserved):
            self.admit(request_id)
        num_left = [self.targets[s.request_id] - len(s.tokens) for s in self.admitted.values()]
        num_recomputations = sum(2 + left // BLOCK_SIZE for left in num_left)
        bound = sum(num_left) + num_recomputations * -(-MAX_TOKENS // MIN_STEP_TOKENS)
        num_steps = 0
        while self.admitted:
            self.run(self.plan())
            self.counted()
            num_steps += 1
            assert num_steps <= bound
        assert self.allocator.num_available == NUM_BLOCKS


DecodeMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestDecodeSchedulerConserves = DecodeMachine.TestCase
