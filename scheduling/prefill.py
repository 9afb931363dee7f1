"""Which prompts are computed in the next step, and how much of each.

    add -> waiting --first chunk, all blocks--> running --last chunk--> gone; the blocks stay held
              |                                    |                    until the loop frees them
              +------------- remove ---------------+

A step has a budget of tokens, which goes to the prompts in the order of a queue policy; that may give one
a part of it only, so that nobody waits for ever (`queue_policy.py`).

A prompt gets the blocks for all its tokens when it starts, so two half-computed prompts never wait for
each other's. Its leading full blocks are shared where they are here already, and are not computed again;
its own are published as they fill.

While the best candidate lacks blocks, smaller ones behind it may start, but only MAX_PASSED_OVER of them:
then nobody behind it starts until it has, the running ones drain, and their blocks are enough for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduling.allocator import BlockAllocator, BlockState
from scheduling.fair_shares import FairShares
from scheduling.queue_policy import QueuePolicy, Ticket
from scheduling.sequence import Scheduled, Sequence, blocks_for
from scheduling.shortest_first import ShortestFirst
from scheduling.step_limit import StepLimit

# How many prompts may start before a better one that lacks blocks. Enough to keep the device busy
# while memory drains; few enough that the wait they add is that of a handful of prompts.
MAX_PASSED_OVER = 8


@dataclass(slots=True, eq=False)
class _Prompt:
    sequence: Sequence
    # Fixed on arrival: a token sampled after the last chunk is not the prefill's to compute.
    num_tokens: int
    # While it waits: what it would not have to compute if it started now.
    num_cached: int = 0
    num_passed_over: int = 0

    @property
    def remaining(self) -> int:
        return self.num_tokens - max(self.sequence.num_computed, self.num_cached)

    def ticket(self, num_tokens: int) -> Ticket:
        """Its place in the queue while so many tokens are left."""
        sequence = self.sequence
        return Ticket(
            sequence.request_id,
            num_tokens,
            sequence.arrived_s,
            sequence.priority,
            sequence.weight,
            sequence.due_s,
        )


@dataclass(slots=True)
class _Step:
    """A step while it is planned. `lacking` is the best candidate that found too few free blocks."""

    budget: int
    shares: dict[_Prompt, int] = field(default_factory=dict)
    lacking: _Prompt | None = None


class PrefillScheduler:
    """Shares each step's budget among prompts, and the blocks among those that start.

    Not thread-safe. The loop: `schedule`, run the step, then `advance`, or `shrink` where the step ran
    out of memory (nothing has advanced then; the next `schedule` plans the same work smaller).
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        max_step_tokens: int,
        max_waiting: int,
        policy: QueuePolicy | None = None,
    ) -> None:
        """max_step_tokens: a step's budget. max_waiting: prompts that may wait to be started. policy: the
        order of the prompts, with nothing in it; by default classes of priority, the shortest first in each.

        The wait is bounded because a prompt that would wait long is better off on another worker, which
        the router can only try if it hears at once.
        """
        self._allocator = allocator
        self._block_size = block_size
        self._limit = StepLimit(max_step_tokens)
        self._max_waiting = max_waiting
        self._policy = FairShares(ShortestFirst) if policy is None else policy
        self._waiting: dict[str, _Prompt] = {}
        self._running: dict[str, _Prompt] = {}
        # Those that the last plan looked at: what remains of them is known when its step has ended.
        self._looked_at: dict[str, _Prompt] = {}
        self._num_pending_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Prompts that have not started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts that have started and still have tokens to compute."""
        return len(self._running)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens still to compute, over all prompts. Of those that wait, what was cached when they came is
        left out."""
        return self._num_pending_tokens

    def add(self, sequence: Sequence) -> bool:
        """Queues a sequence; False where `max_waiting` wait already.

        Raises KeyError where the request is here or holds blocks, ValueError where it has nothing to
        compute or needs more blocks than there are: it would wait for ever.
        """
        request_id = sequence.request_id
        if request_id in self._waiting or self._allocator.holds(request_id):
            raise KeyError(f"{request_id} is here already")
        prompt = _Prompt(sequence, len(sequence.tokens))
        if prompt.remaining < 1:
            raise ValueError(f"{request_id} has no tokens to compute")
        num_blocks = blocks_for(prompt.num_tokens, self._block_size)
        total = self._allocator.counts.total
        if num_blocks > total:
            raise ValueError(f"{request_id} needs {num_blocks} blocks, and there are {total}")
        if len(self._waiting) >= self._max_waiting:
            return False
        prompt.num_cached = len(self._allocator.cache.match(self._hashes(prompt))) * self._block_size
        self._waiting[request_id] = prompt
        self._policy.push(prompt.ticket(prompt.remaining))
        self._num_pending_tokens += prompt.remaining
        return True

    def schedule(self, now_s: float) -> list[Scheduled]:
        """The next step's chunks, at most one of a sequence; empty where nothing can run now.

        Allocates the blocks of the sequences that start and fills in their block tables. now_s: on the
        clock of the sequences' times.
        """
        for prompt in self._looked_at.values():
            self._policy.push(prompt.ticket(prompt.remaining))
        self._looked_at.clear()
        step = _Step(self._limit.tokens)
        while step.budget and (turn := self._policy.first(now_s)) is not None:
            request_id = turn.ticket.request_id
            prompt = self._running.get(request_id) or self._waiting[request_id]
            self._looked_at[request_id] = prompt
            num_tokens = self._grant(step, prompt, min(turn.max_tokens, step.budget))
            if num_tokens:
                self._policy.charge(turn.ticket, num_tokens)
            num_left = prompt.remaining - step.shares.get(prompt, 0)
            if num_tokens and num_left:
                self._policy.push(prompt.ticket(num_left))
            else:
                self._policy.set_aside(request_id)
        self._limit.begin(sum(step.shares.values()))
        return [
            Scheduled(prompt.sequence, prompt.sequence.num_computed, prompt.sequence.num_computed + share)
            for prompt, share in step.shares.items()
        ]

    def advance(self, scheduled: Iterable[Scheduled]) -> None:
        """The step has run: its tokens are computed.

        A sequence with no more to compute leaves the scheduler and keeps its blocks, which the loop
        frees once the decode worker has acknowledged them. One removed meanwhile is passed by.
        """
        for chunk in scheduled:
            sequence = chunk.sequence
            prompt = self._running.get(sequence.request_id)
            if prompt is None or prompt.sequence is not sequence:
                continue
            self._num_pending_tokens -= chunk.end - sequence.num_computed
            sequence.num_computed = chunk.end
            if chunk.fills_block(self._block_size):
                num_full = chunk.end // self._block_size
                self._allocator.publish(sequence.request_id, sequence.block_hashes(num_full))
            if prompt.remaining == 0:
                del self._running[sequence.request_id]
                self._leave(sequence.request_id)

    def remove(self, request_id: str) -> Sequence | None:
        """Forgets a sequence, waiting or running; None where it is not here (any more).

        Frees no blocks: a running step may still write them. The loop frees them after that step.
        """
        prompt = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        if prompt is None:
            return None
        self._num_pending_tokens -= prompt.remaining
        self._leave(request_id)
        return prompt.sequence

    def shrink(self) -> bool:
        """The last step ran out of memory: the next is at most half as large. False at the floor.

        The limit doubles again after a run of good steps; `step_limit.py` has the numbers. On False the
        loop fails the step's sequences: memory is short of something that chunks do not govern.
        """
        return self._limit.shrink()

    def _leave(self, request_id: str) -> None:
        self._looked_at.pop(request_id, None)
        self._policy.remove(request_id)

    def _grant(self, step: _Step, prompt: _Prompt, max_tokens: int) -> int:
        """Gives a prompt at most so many tokens of the step, and its blocks where it starts with them."""
        if prompt.sequence.request_id in self._waiting and not self._start(prompt, step):
            return 0
        share = step.shares.get(prompt, 0)
        num_tokens = min(max_tokens, prompt.remaining - share)
        step.shares[prompt] = share + num_tokens
        step.budget -= num_tokens
        return num_tokens

    def _start(self, prompt: _Prompt, step: _Step) -> bool:
        better = step.lacking
        if better is not None and better.num_passed_over >= MAX_PASSED_OVER:
            return False
        request_id = prompt.sequence.request_id
        num_blocks = blocks_for(prompt.num_tokens, self._block_size)
        hashes = self._hashes(prompt)
        table = self._allocator.allocate(request_id, num_blocks, BlockState.RUNNING, hashes)
        if table is None:
            step.lacking = better or prompt
            return False
        if better is not None:
            better.num_passed_over += 1
        prompt.sequence.block_table = table
        # What was cached may have changed while it waited.
        self._num_pending_tokens -= prompt.remaining
        prompt.num_cached = 0
        prompt.sequence.num_computed = self._allocator.num_shared(request_id) * self._block_size
        self._num_pending_tokens += prompt.remaining
        self._running[request_id] = self._waiting.pop(request_id)
        return True

    def _hashes(self, prompt: _Prompt) -> list[bytes]:
        # At least the last token is computed: the first output token is sampled from its logits.
        return prompt.sequence.block_hashes((prompt.num_tokens - 1) // self._block_size)
