"""Which sequences decode in the next step, and which give up their blocks so that the others can.

    reserve -> reserved --admit--> running <--resume-- preempted
               (allocator)            |   --preempt-->    |
                                      +----- remove ------+

Every step takes the running sequences in the order of their rank: higher priority first, then older.
Each grows by the block that its next token needs. When none is available, the lowest-ranked running
sequence is preempted: it loses its blocks, and keeps its tokens. When enough blocks are available again it
resumes and recomputes what has been evicted since, in chunks beside the decode rows. So a running sequence
advances in every step, and all finish.

A step decodes as many rows as the batch limit lets it, by rank. Who is left out MAX_PASSED_OVER times goes
before the others once, so that a low priority advances however many high ones there are.

Full blocks are published: sequences that begin alike share them. A token goes to the block after the last
full one, which is its sequence's own, so no shared block is ever written.

Reservations are the allocator's: the loop that drops one frees its blocks there.
"""

from collections import abc
from dataclasses import dataclass

from scheduling.allocator import BlockAllocator, BlockState
from scheduling.batch_limit import BatchLimit
from scheduling.sequence import Scheduled, Sequence, blocks_for
from scheduling.step_limit import MIN_STEP_TOKENS, StepLimit

# Requests that may hold blocks, in batches: while one batch runs the next may be on its way. More
# would have their first token early and then wait long for the second.
_MAX_HELD_BATCHES = 2

# At most one part in so many of the blocks is kept back for growth. In simulated overload that lets as
# few sequences be preempted soon after they resume as no bound does; half as much lets many.
_WATERMARK_SHARE = 8

# Steps that may go by without a sequence that could decode. A low class so keeps a seventeenth of its
# pace, which shows that it lives; and the others hardly notice.
MAX_PASSED_OVER = 16

# Those that were left out so often get at most one part in so many of the batch, but at least one row.
_PASSED_OVER_SHARE = 4


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One step.

    scheduled: decode rows (one token each), then chunks to recompute; both by rank. It may be empty
        while preempted sequences wait for blocks that are reserved.
    preempted: the sequences that lost their blocks to it.
    outgrown: sequences that need more blocks than the cache has, which the router's check should have
        kept out. They have left the scheduler; the loop ends them with an error and frees their blocks.
    """

    scheduled: list[Scheduled]
    preempted: list[Sequence]
    outgrown: list[Sequence]


class DecodeScheduler:
    """Shares a decode worker's blocks and steps among its sequences.

    Not thread-safe. The loop: `schedule`, run the step, then `advance` each row, and `observe` how long the
    step took.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        max_batch_size: int,
        max_step_tokens: int,
        step_target_s: float | None = None,
    ) -> None:
        """max_batch_size: decode rows of a step. max_step_tokens: its rows and recomputed tokens.

        step_target_s: how long a step of decode rows should take at most; the batch then adapts to it.
        """
        self._allocator = allocator
        self._total = allocator.counts.total
        self._block_size = block_size
        self._batch = BatchLimit(max_batch_size, step_target_s)
        self._limit = StepLimit(max_step_tokens)
        self._num_rows = self._num_chunks = 0  # Of the last step.
        self._running: dict[str, Sequence] = {}
        self._preempted: dict[str, Sequence] = {}

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and decode or recompute."""
        return len(self._running)

    @property
    def num_preempted(self) -> int:
        """Sequences that wait for blocks to resume."""
        return len(self._preempted)

    @property
    def batch_limit(self) -> int:
        """Decode rows that a step may have now."""
        return self._batch.size

    @property
    def has_work(self) -> bool:
        """Whether any sequence is here."""
        return bool(self._running or self._preempted)

    def reserve(
        self, request_id: str, num_prompt_tokens: int, hashes: abc.Sequence[bytes] = ()
    ) -> list[int] | None:
        """Blocks, in order, for a prompt and its first output token; None where there is no room now.

        hashes: of the prompt's full blocks. The allocator's `num_shared` tells how many are here already.

        No room while preempted sequences wait (they come first), while two batches hold blocks, or
        where less than the watermark would stay available. A request that fits an empty worker gets its
        blocks there. Raises KeyError where the request is here or holds blocks.
        """
        if request_id in self._preempted or self._allocator.holds(request_id):
            raise KeyError(f"{request_id} is here already")
        num_blocks = blocks_for(num_prompt_tokens + 1, self._block_size)
        if self._preempted or self._allocator.num_owners >= _MAX_HELD_BATCHES * self._batch.size:
            return None
        if not self._has_room(num_blocks, hashes):
            return None
        return self._allocator.allocate(request_id, num_blocks, BlockState.RESERVED, hashes)

    def admit(self, sequence: Sequence) -> None:
        """The reservation is complete: the sequence joins at the next step.

        It has its block table, its prompt computed and its first output token. Raises KeyError where it
        holds no reserved blocks, ValueError where its KV is not what its tokens need.
        """
        if sequence.remaining != 1:
            raise ValueError(f"{sequence.request_id} has {sequence.remaining} tokens to compute, not 1")
        num_blocks = self._num_blocks(sequence)
        if len(sequence.block_table) < num_blocks:
            raise ValueError(
                f"{sequence.request_id} has {len(sequence.block_table)} blocks and needs {num_blocks}"
            )
        self._allocator.commit(sequence.request_id)
        self._running[sequence.request_id] = sequence
        self._publish(sequence)

    def schedule(self) -> DecodePlan:
        """The next step; grows block tables, preempts and resumes."""
        outgrown = [
            sequence for sequence in self._running.values() if self._num_blocks(sequence) > self._total
        ]
        for sequence in outgrown:
            del self._running[sequence.request_id]
        rows, preempted = self._decode_rows()
        self._resume()
        chunks = self._recompute_chunks(num_rows=len(rows))
        self._num_rows, self._num_chunks = len(rows), len(chunks)
        return DecodePlan(rows + chunks, preempted, outgrown)

    def advance(self, scheduled: Scheduled, token_id: int | None) -> None:
        """A row of the step has run: its tokens are computed, and `token_id` was sampled if it was the last.

        A sequence removed meanwhile is passed by. Raises ValueError for a token where none is due, or
        for none where one is.
        """
        sequence = scheduled.sequence
        if self._running.get(sequence.request_id) is not sequence:
            return
        if scheduled.is_last != (token_id is not None):
            due = "a token is" if scheduled.is_last else "no token is"
            raise ValueError(f"{sequence.request_id}: {due} due, and {token_id} was sampled")
        sequence.num_computed = scheduled.end
        if scheduled.fills_block(self._block_size):
            self._publish(sequence)
        if token_id is not None:
            sequence.tokens.append(token_id)

    def remove(self, request_id: str) -> Sequence | None:
        """Forgets a sequence, running or preempted; None where it is not here (any more).

        Frees no blocks: a running step may still write them. The loop frees them after that step.
        """
        return self._running.pop(request_id, None) or self._preempted.pop(request_id, None)

    def shrink(self) -> bool:
        """The last step ran out of memory: the next recomputes at most half as much. False at the floor.

        Also False where it recomputed nothing: decode rows are not cut.
        """
        return self._limit.shrink()

    def observe(self, step_s: float) -> None:
        """The last step ran and took so long. One that recomputed too says nothing of the batch's size."""
        if not self._num_chunks:
            self._batch.observe(self._num_rows, step_s)

    def num_repeats(self, max_repeats: int) -> int:
        """How often the last plan would certainly come again, up to `max_repeats`, with a token more a row.

        That is, if nothing joins or leaves, blocks included, and no output ends. For a simulator, to which
        the steps between two changes are one; 0 where that is not so simple.
        """
        num_rows = self._num_rows
        if self._batch.adapts or self._preempted or self._num_chunks or num_rows != len(self._running):
            return 0
        while max_repeats > 0 and self._num_growth(max_repeats) > self._allocator.num_available:
            max_repeats //= 2
        return max(0, max_repeats)

    def repeat(self, num_steps: int, token_id: int) -> list[Scheduled]:
        """As `advance` of each row with this token and `schedule`, so many times; the plan that runs then.

        At most `num_repeats`, of a plan that is all decode rows.
        """
        rows = sorted(self._running.values(), key=lambda sequence: sequence.rank)
        for sequence in rows:
            start = sequence.num_computed
            sequence.num_computed += num_steps
            sequence.tokens.extend([token_id] * num_steps)
            if sequence.num_computed // self._block_size > start // self._block_size:
                self._publish(sequence)
            grown = self._grow(sequence)
            assert grown, "more repeats than num_repeats"
        return [Scheduled(each, each.num_computed, len(each.tokens)) for each in rows]

    def _num_growth(self, num_steps: int) -> int:
        """Blocks that so many more tokens of each running sequence take."""
        return sum(
            max(0, blocks_for(len(each.tokens) + num_steps, self._block_size) - len(each.block_table))
            for each in self._running.values()
        )

    def _decode_rows(self) -> tuple[list[Scheduled], list[Sequence]]:
        ranked = sorted(self._running.values(), key=lambda sequence: sequence.rank)
        rows: list[Scheduled] = []
        preempted: list[Sequence] = []
        # `ranked` loses victims at its end meanwhile: all of them rank below the rows so far.
        for sequence in self._batch_of([each for each in ranked if each.remaining == 1]):
            if sequence.request_id not in self._running:
                break  # A victim, and so are all that rank lower.
            while not self._grow(sequence):
                victim = ranked.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                rows.append(Scheduled(sequence, sequence.num_computed, len(sequence.tokens)))
        return rows, preempted

    def _batch_of(self, ready: list[Sequence]) -> list[Sequence]:
        """Which of those that could decode do, by rank: the first ones, and who was passed over for long.

        The latter only while there are blocks for all: a turn is no use to who would lose its blocks to it.
        """
        size = self._batch.size
        overdue = [each for each in ready[size:] if each.num_passed_over >= MAX_PASSED_OVER]
        overdue = sorted(overdue, key=lambda each: -each.num_passed_over)[
            : max(1, size // _PASSED_OVER_SHARE)
        ]
        batch = ready[: size - len(overdue)] + sorted(overdue, key=lambda each: each.rank)
        if sum(self._num_lacking(each) for each in batch) > self._allocator.num_available:
            batch = ready[:size]
        for each in ready:
            each.num_passed_over += 1
        for each in batch:
            each.num_passed_over = 0
        return batch

    def _grow(self, sequence: Sequence) -> bool:
        num_lacking = self._num_lacking(sequence)
        if num_lacking == 0:
            return True
        blocks = self._allocator.allocate(sequence.request_id, num_lacking, BlockState.RUNNING)
        if blocks is None:
            return False
        sequence.block_table.extend(blocks)
        return True

    def _num_blocks(self, sequence: Sequence) -> int:
        return blocks_for(len(sequence.tokens), self._block_size)

    def _num_lacking(self, sequence: Sequence) -> int:
        return max(0, self._num_blocks(sequence) - len(sequence.block_table))

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence.request_id]
        self._allocator.free(sequence.request_id)
        sequence.num_computed = 0
        sequence.block_table = []
        self._preempted[sequence.request_id] = sequence

    def _resume(self) -> None:
        for sequence in sorted(self._preempted.values(), key=lambda sequence: sequence.rank):
            request_id = sequence.request_id
            num_blocks = min(blocks_for(len(sequence.tokens) + 1, self._block_size), self._total)
            # At least two tokens are computed again: a sequence that lacks one is a decode row.
            hashes = sequence.block_hashes((len(sequence.tokens) - 2) // self._block_size)
            if not self._has_room(num_blocks, hashes):
                return  # Smaller ones behind it wait too, or it might wait for ever.
            blocks = self._allocator.allocate(request_id, num_blocks, BlockState.RUNNING, hashes)
            assert blocks is not None
            sequence.block_table = blocks
            sequence.num_computed = self._allocator.num_shared(request_id) * self._block_size
            self._running[request_id] = self._preempted.pop(request_id)

    def _publish(self, sequence: Sequence) -> None:
        num_full = sequence.num_computed // self._block_size
        self._allocator.publish(sequence.request_id, sequence.block_hashes(num_full))

    def _has_room(self, num_blocks: int, hashes: abc.Sequence[bytes]) -> bool:
        """Whether the watermark stays available: a block for each owner's growth, up to a share of all.

        Without it a newcomer would have to be preempted as soon as the others grow. Nothing is kept back
        where nobody holds a block.
        """
        watermark = min(self._allocator.num_owners, self._total // _WATERMARK_SHARE)
        return self._allocator.num_needed(num_blocks, hashes) + watermark <= self._allocator.num_available

    def _recompute_chunks(self, num_rows: int) -> list[Scheduled]:
        # At least the smallest step, however many rows there are: resumed sequences always get on.
        budget = max(self._limit.tokens - num_rows, MIN_STEP_TOKENS)
        chunks: list[Scheduled] = []
        for sequence in sorted(self._running.values(), key=lambda sequence: sequence.rank):
            num_tokens = min(sequence.remaining, budget)
            if sequence.remaining == 1 or num_tokens == 0:
                continue
            chunks.append(Scheduled(sequence, sequence.num_computed, sequence.num_computed + num_tokens))
            budget -= num_tokens
        self._limit.begin(sum(chunk.end - chunk.start for chunk in chunks))
        return chunks
