"""Continuous batching: schedule, run, sample, publish, over and over.

Everything here runs on the worker's event loop but `engine.step`, which runs in a thread of its own. So no
lock is needed: between two awaits nothing changes. Blocks of a sequence that is in the running step are
given back only when the step has ended.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.streams import End, TokenStreams
from engine.engine import Engine, SampledToken
from engine.finish import finish_reason
from kv_transfer.reservation import Reservation, ReservationState, ReservationTable
from kvferry.sampling import SamplingParams
from scheduling.allocator import BlockAllocator
from scheduling.block_hash import BlockHashes
from scheduling.decode import DecodeScheduler
from scheduling.sequence import Scheduled, blocks_for
from scheduling.sequence import Sequence as TokenSequence
from worker.steps import Steps

logger = logging.getLogger(__name__)

# How often deadlines are looked at, and memory is asked for again when every sequence waits for it.
TICK_S = 0.1


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request on this worker, from its reservation to its end. Times are the event loop's.

    tokens: the prompt, then the output that workers that were lost have generated. hashes: name their full
    blocks, then those of the output to come.
    """

    request_id: str
    router_id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int
    arrived_s: float
    deadline_s: float
    hashes: BlockHashes


class DecodeLoop:
    """Owns what one decode worker holds. Not thread-safe: call it on its event loop."""

    def __init__(
        self,
        engine: Engine,
        allocator: BlockAllocator,
        scheduler: DecodeScheduler,
        reservations: ReservationTable,
        streams: TokenStreams,
    ) -> None:
        self.scheduler = scheduler
        self.reservations = reservations
        self.counters: Counter[str] = Counter()
        self.requests: dict[str, DecodeRequest] = {}
        self._engine = engine
        self._allocator = allocator
        self._streams = streams
        self._wake = asyncio.Event()
        self._steps = Steps(engine, allocator, self.counters)

    def reserve(self, request: DecodeRequest) -> Reservation | None:
        """Takes blocks for a request. None: no room now. KeyError: the id is taken."""
        if request.request_id in self.requests or self._steps.is_freeing(request.request_id):
            raise KeyError(request.request_id)
        num_tokens = len(request.tokens)
        hashes = request.hashes.of(request.tokens)
        block_table = self.scheduler.reserve(request.request_id, num_tokens, hashes)
        if block_table is None:
            self.counters["reservations_refused"] += 1
            return None
        self.requests[request.request_id] = request
        block_size = self._engine.cache.shape.block_size
        num_held = self._allocator.num_shared(request.request_id)
        self.counters["prefix_query_tokens"] += num_tokens
        self.counters["prefix_hit_tokens"] += num_held * block_size
        num_blocks = blocks_for(num_tokens, block_size)
        return self.reservations.grant(request.request_id, block_table, num_blocks, num_held)

    def complete(self, reservation: Reservation) -> None:
        """Takes over a reservation whose last block has landed: it decodes from the next step on."""
        request = self.requests[reservation.lease.request_id]
        assert reservation.first_token_id is not None
        self.scheduler.admit(
            TokenSequence(
                request_id=request.request_id,
                tokens=[*request.tokens, reservation.first_token_id],
                num_prompt_tokens=request.num_prompt_tokens,
                priority=request.priority,
                arrived_s=request.arrived_s,
                block_table=reservation.block_table,
                num_computed=len(request.tokens),
                hashes=request.hashes,
            )
        )
        self._wake.set()

    def release(self, request_id: str) -> None:
        """Ends a request in whatever state it is and gives its blocks back; unknown ones hold nothing."""
        if self.requests.pop(request_id, None) is None:
            return
        self.reservations.free(request_id)
        self.scheduler.remove(request_id)
        self._steps.free(request_id)
        self._wake.set()

    def release_router(self, router_id: str) -> None:
        """Ends all requests of a router that can no longer hear their tokens."""
        lost = [r.request_id for r in self.requests.values() if r.router_id == router_id]
        for request_id in lost:
            self.release(request_id)
        self._streams.take(router_id)
        if lost:
            logger.warning("router %s is lost; released its %d requests", router_id, len(lost))

    async def run(self) -> None:
        """Steps while there is work. Ends only when cancelled, or by a fault of ours."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_deadlines())
            group.create_task(self._step_forever())

    def close(self) -> None:
        """Waits for the step that may still run."""
        self._steps.close()

    async def _step_forever(self) -> None:
        while True:
            plan = self.scheduler.schedule()
            if plan.preempted:
                self.counters["preemptions"] += len(plan.preempted)
            for sequence in plan.outgrown:
                self._fail(self.requests[sequence.request_id], "it outgrew the KV cache")
                self._streams.flush()
            if plan.scheduled:
                await self._step(plan.scheduled)
            else:
                self._wake.clear()
                # With work but nothing to schedule, all sequences wait for memory.
                timeout_s = TICK_S if self.scheduler.has_work else None
                try:
                    await asyncio.wait_for(self._wake.wait(), timeout_s)
                except TimeoutError:
                    continue

    async def _step(self, scheduled: Sequence[Scheduled]) -> None:
        for work in scheduled:
            reservation = self.reservations.get(work.sequence.request_id)
            if reservation is not None and reservation.state is ReservationState.COMPLETE:
                reservation.state = ReservationState.RUNNING
        now = asyncio.get_running_loop().time
        began_s = now()
        results = await self._steps.run(
            scheduled, lambda request_id: self.requests[request_id].sampling, self.scheduler.shrink
        )
        if results is None:
            return
        self.scheduler.observe(now() - began_s)
        self.counters["steps"] += 1
        for work, result in zip(scheduled, results, strict=True):
            self._advance(work, result)
        self._streams.flush()

    def _advance(self, work: Scheduled, result: SampledToken | Exception | None) -> None:
        sequence = work.sequence
        request = self.requests.get(sequence.request_id)
        if request is None:  # Released while the step ran.
            return
        if isinstance(result, Exception):
            logger.error("%s failed in a decode step", request.request_id, exc_info=result)
            self._fail(request, f"decode step failed: {type(result).__name__}")
            return
        self.scheduler.advance(work, None if result is None else result.token_id)
        if result is None:
            return
        info = self._engine.info
        self.counters["tokens"] += 1
        generation = self._generation(request)
        self._streams.add(request.router_id, generation, sequence.num_output_tokens - 1, result)
        reason = finish_reason(
            request.sampling,
            info.eos_token_ids,
            token_id=result.token_id,
            num_output_tokens=sequence.num_output_tokens,
            num_tokens=len(sequence.tokens),
            max_context_tokens=info.max_context_tokens,
        )
        if reason is not None:
            self._end(request, End(generation, reason, sequence.num_output_tokens))

    def _fail(self, request: DecodeRequest, error: str) -> None:
        self._end(request, End(self._generation(request), error=error))

    def _end(self, request: DecodeRequest, end: End) -> None:
        self._streams.end(request.router_id, end)
        self.release(request.request_id)

    def _generation(self, request: DecodeRequest) -> int:
        reservation = self.reservations.get(request.request_id)
        assert reservation is not None
        return reservation.lease.generation

    async def _watch_deadlines(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(TICK_S)
            expired = [r for r in self.requests.values() if r.deadline_s <= now()]
            for request in expired:
                reservation = self.reservations.get(request.request_id)
                assert reservation is not None
                self.counters["deadlines_exceeded"] += 1
                self._fail(request, f"deadline exceeded while {reservation.state.name}")
            if expired:
                self._streams.flush()
