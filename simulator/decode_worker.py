"""A decode worker in simulated time: the real scheduler and blocks; a step takes what its cost says.

Steps of one batch after another are alike until a sequence joins, ends or lacks a block. So many of them are
one event (`DecodeScheduler.repeat`): of n rows with C tokens of context, step i takes a + b n + c (C + i n),
which adds up in closed form. Whoever asks meanwhile finds what the steps that have ended by then have left.
"""

import math
from collections.abc import Callable

from kvferry.config import DecodeConfig
from scheduling.allocator import BlockAllocator
from scheduling.decode import DecodeScheduler
from scheduling.placement import DecodeSnapshot
from scheduling.sequence import Scheduled, Sequence, blocks_for
from simulator.costs import Costs
from simulator.events import Events
from simulator.request import SimulatedRequest

# A live worker tells its load so often.
REPORT_S = 0.2


class SimulatedDecodeWorker:
    """num_requests: as the router counts them, from their reservation on."""

    def __init__(
        self,
        worker_id: str,
        config: DecodeConfig,
        num_blocks: int,
        costs: Costs,
        events: Events,
        on_finished: Callable[[SimulatedRequest], None],
        *,
        max_steps_at_once: int = 2**31,
    ) -> None:
        """max_steps_at_once: 1 makes every step an event of its own."""
        self.worker_id = worker_id
        self.busy_s = 0.0
        self.num_requests = 0
        self.num_preempted = 0
        self.num_blocks = num_blocks
        self.allocator = BlockAllocator(num_blocks)
        self._block_size = config.engine.block_size
        self.scheduler = DecodeScheduler(
            self.allocator,
            self._block_size,
            config.max_batch_size,
            config.max_step_tokens,
            config.step_target_s,
        )
        self._costs = costs.decode
        self._events = events
        self._on_finished = on_finished
        self._max_steps = max_steps_at_once
        self._tables: dict[str, list[int]] = {}
        self._requests: dict[str, SimulatedRequest] = {}
        # The step that runs, when it began, and how many end with the event that is set, this one included.
        self._step: list[Scheduled] = []
        self._began_s = 0.0
        self._num_steps = 0
        self._first_step_s = 0.0
        self._growth_s = 0.0
        self._number = 0

    def snapshot(self, num_held_blocks: int) -> DecodeSnapshot:
        """Its load for placement. Its free blocks are as old as a live worker's last report."""
        if self._events.now_s - self._began_s > REPORT_S:
            self._catch_up()
        return DecodeSnapshot(
            self.worker_id,
            None,
            self.num_requests,
            self.allocator.num_available,
            self.num_blocks,
            num_held_blocks,
        )

    def reserve(self, request: SimulatedRequest, hashes: list[bytes]) -> bool:
        """Takes the blocks for a request. False: no room now."""
        self._catch_up()
        table = self.scheduler.reserve(request.request_id, request.trace.num_prompt_tokens, hashes)
        if table is None:
            return False
        self._tables[request.request_id] = table
        if self.scheduler.num_repeats(self._num_steps - 1) < self._num_steps - 1:
            self._set_end()
        return True

    def release(self, request: SimulatedRequest) -> None:
        """Gives up a reservation."""
        self._catch_up()
        if self._tables.pop(request.request_id, None) is not None:
            self.allocator.free(request.request_id)

    def complete(self, request: SimulatedRequest) -> None:
        """All blocks have landed: it decodes from the next step on."""
        self._catch_up()
        num_tokens = request.trace.num_prompt_tokens
        self.scheduler.admit(
            Sequence(
                request.request_id,
                [0] * (num_tokens + 1),
                num_tokens,
                0,
                request.reserved_s,
                self._tables.pop(request.request_id),
                num_tokens,
                request.hashes,
            )
        )
        self._requests[request.request_id] = request
        if self._step:
            self._set_end()
        else:
            self._begin()

    def _begin(self) -> None:
        plan = self.scheduler.schedule()
        self.num_preempted += len(plan.preempted)
        assert not plan.outgrown, "requests that outgrow a cache are refused at the door"
        self._step = plan.scheduled
        if not self._step:
            return
        self._began_s = self._events.now_s
        for row in self._step:
            request = self._requests[row.sequence.request_id]
            request.decode_started_s = min(request.decode_started_s, self._began_s)
        self._measure()
        self._set_end()

    def _measure(self) -> None:
        """What the running step takes, and by how much more each like it that follows."""
        rows = [row for row in self._step if row.end - row.start == 1]
        context = sum(row.end for row in self._step)
        self._first_step_s = self._costs.decode_s(len(rows), context)
        for chunk in self._step:
            if chunk.end - chunk.start > 1:  # Recomputed, at a prefill's price where that is known.
                self._first_step_s += self._costs.prefill_s(chunk.end, chunk.start)
        self._growth_s = self._costs.decode_s(len(rows), context + len(rows)) - self._first_step_s

    def _set_end(self) -> None:
        """Sets the event of the last step that is certain to be like the one that runs."""
        if not self._step:
            return
        num_left = min(
            self._requests[row.sequence.request_id].trace.num_output_tokens - row.sequence.num_output_tokens
            for row in self._step
        )
        num_more = self.scheduler.num_repeats(min(num_left, self._max_steps) - 1)
        self._num_steps = 1 + num_more
        self._number += 1
        number = self._number
        self._events.at(
            self._began_s + self._seconds(self._num_steps),
            lambda: self._end() if number == self._number else None,
        )

    def _seconds(self, num_steps: int) -> float:
        return num_steps * self._first_step_s + self._growth_s * num_steps * (num_steps - 1) / 2

    def _catch_up(self) -> None:
        """Runs the steps that have ended by now and are not the last before the event."""
        if not self._step or self._num_steps == 1:
            return
        passed_s = self._events.now_s - self._began_s
        num_ended = min(self._num_steps - 1, self._num_in(passed_s))
        if num_ended > 0:
            self._repeat(num_ended)

    def _num_in(self, seconds: float) -> int:
        """Whole steps that end within so many seconds: the root of `_seconds`."""
        half, linear = self._growth_s / 2, self._first_step_s - self._growth_s / 2
        if half > 0:
            root = (math.sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half)
        else:
            root = seconds / self._first_step_s if self._first_step_s else 0.0
        num_steps = int(root) + 1
        while num_steps and self._seconds(num_steps) > seconds:
            num_steps -= 1
        return num_steps

    def _repeat(self, num_steps: int) -> None:
        seconds = self._seconds(num_steps)
        self._step = self.scheduler.repeat(num_steps, token_id=0)
        self.busy_s += seconds
        self._began_s += seconds
        self._first_step_s += num_steps * self._growth_s
        self._num_steps -= num_steps

    def _end(self) -> None:
        if self._num_steps > 1:
            self._repeat(self._num_steps - 1)
        self.busy_s += self._first_step_s
        step, self._step, self._num_steps = self._step, [], 0
        finished = []
        for row in step:
            self.scheduler.advance(row, 0 if row.is_last else None)
            request = self._requests[row.sequence.request_id]
            if row.sequence.num_output_tokens == request.trace.num_output_tokens:
                self.scheduler.remove(request.request_id)
                self.allocator.free(request.request_id)
                finished.append(self._requests.pop(request.request_id))
        if self.scheduler.has_work:
            self._begin()
        for request in finished:
            self._on_finished(request)

    def holds_ever(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens fits its whole cache."""
        return blocks_for(num_tokens, self._block_size) <= self.num_blocks
