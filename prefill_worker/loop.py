"""Chunked prefill: schedule chunks, run them, hand full blocks to the handoff, over and over.

Everything here runs on the worker's event loop but `engine.step`, which runs in a thread of its own. So no
lock is needed: between two awaits nothing changes. A prompt's blocks are given back when nothing reads or
writes them any more: after the running step, and after its handoff has ended.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.engine import Engine, SampledToken
from engine.finish import FinishReason, finish_reason
from kv_transfer.transport import Target, TransferFailed, Transport
from kvferry.sampling import SamplingParams
from prefill_worker.handoff import Handoff
from scheduling.allocator import BlockAllocator
from scheduling.prefill import PrefillScheduler
from scheduling.sequence import Scheduled, blocks_for
from scheduling.sequence import Sequence as TokenSequence
from worker.steps import Steps

logger = logging.getLogger(__name__)


class PrefillFailed(Exception):
    """The prompt could not be computed; the message says why."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What a prefill ends with; `finish_reason` is set when the output ends with it too."""

    token: SampledToken
    finish_reason: FinishReason | None


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prompt on this worker. Times are the event loop's.

    num_held_blocks: the prompt's leading blocks that the target has already.
    num_cached_tokens: of the prompt, which were here when it started.
    first_token: set by the loop; `PrefillFailed` or `TransferFailed` where it comes to nothing.
    handoff: from the first chunk on.
    """

    sequence: TokenSequence
    sampling: SamplingParams
    target: Target
    router_id: str = ""
    num_held_blocks: int = 0
    num_cached_tokens: int = 0
    started_s: float | None = None
    handoff: Handoff | None = None
    first_token: asyncio.Future[FirstToken] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def request_id(self) -> str:
        """The router's id."""
        return self.sequence.request_id

    def fail(self, error: Exception) -> None:
        """Ends the job with an error, unless it has its first token."""
        if not self.first_token.done():
            self.first_token.set_exception(error)


class PrefillLoop:
    """Owns what one prefill worker holds. Not thread-safe: call it on its event loop."""

    def __init__(
        self, engine: Engine, allocator: BlockAllocator, scheduler: PrefillScheduler, transport: Transport
    ) -> None:
        self.scheduler = scheduler
        self.counters: Counter[str] = Counter()
        self.jobs: dict[str, PrefillJob] = {}
        self._engine = engine
        self._allocator = allocator
        self._transport = transport
        self._block_size = engine.cache.shape.block_size
        self._wake = asyncio.Event()
        self._steps = Steps(engine, allocator, self.counters)
        self._releasing: dict[str, asyncio.Task[None]] = {}

    def submit(self, job: PrefillJob) -> bool:
        """Queues a prompt. False: the queue is full. KeyError: the id is taken."""
        if job.request_id in self.jobs or job.request_id in self._releasing:
            raise KeyError(job.request_id)
        if not self.scheduler.add(job.sequence):
            self.counters["prefills_refused"] += 1
            return False
        self.jobs[job.request_id] = job
        self._wake.set()
        return True

    def release(self, job: PrefillJob) -> None:
        """Ends a job in whatever state it is; its blocks come back as soon as nothing uses them."""
        if self.jobs.pop(job.request_id, None) is None:
            return
        job.first_token.cancel()
        self.scheduler.remove(job.request_id)
        task = asyncio.create_task(self._give_back(job))
        self._releasing[job.request_id] = task
        task.add_done_callback(lambda _: self._releasing.pop(job.request_id))

    async def run(self) -> None:
        """Steps while there is work. Ends only when cancelled, or by a fault of ours."""
        while True:
            scheduled = self.scheduler.schedule(asyncio.get_running_loop().time())
            if scheduled:
                await self._step(scheduled)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def close(self) -> None:
        """Ends all jobs and waits for the step that may still run."""
        for job in list(self.jobs.values()):
            job.fail(PrefillFailed("the worker is stopping"))
            self.release(job)
        await asyncio.gather(*self._releasing.values())
        self._steps.close()

    async def _give_back(self, job: PrefillJob) -> None:
        if job.handoff is not None:
            await job.handoff.abort()
        self._steps.free(job.request_id)
        self._wake.set()

    async def _step(self, scheduled: Sequence[Scheduled]) -> None:
        for work in scheduled:
            self._start(self.jobs[work.sequence.request_id])
        results = await self._steps.run(
            scheduled, lambda request_id: self.jobs[request_id].sampling, self.scheduler.shrink
        )
        if results is None:
            return
        self.counters["steps"] += 1
        self.counters["tokens"] += sum(s.end - s.start for s in scheduled)
        for work, result in zip(scheduled, results, strict=True):
            if isinstance(result, Exception):  # Its blocks must not be published.
                self.scheduler.remove(work.sequence.request_id)
        self.scheduler.advance(scheduled)
        for work, result in zip(scheduled, results, strict=True):
            self._advance(work, result)

    def _start(self, job: PrefillJob) -> None:
        if job.handoff is not None:
            return
        job.started_s = asyncio.get_running_loop().time()
        sequence = job.sequence
        job.num_cached_tokens = sequence.num_computed
        self.counters["prefix_query_tokens"] += len(sequence.tokens)
        self.counters["prefix_hit_tokens"] += job.num_cached_tokens

        def on_failed(error: TransferFailed) -> None:
            self.counters["transfers_failed"] += 1
            job.fail(error)

        blocks = range(job.num_held_blocks, blocks_for(len(sequence.tokens), self._block_size))
        job.handoff = Handoff(self._transport, job.target, blocks, on_failed)
        job.handoff.blocks_ready(sequence.block_table, job.num_cached_tokens // self._block_size)

    def _advance(self, work: Scheduled, result: SampledToken | Exception | None) -> None:
        job = self.jobs.get(work.sequence.request_id)
        if job is None:  # Released while the step ran.
            return
        if isinstance(result, Exception):
            logger.error("%s failed in a prefill step", job.request_id, exc_info=result)
            job.fail(PrefillFailed(f"prefill step failed: {type(result).__name__}"))
            return
        assert job.handoff is not None
        num_full = work.end // self._block_size
        if result is None:
            job.handoff.blocks_ready(work.sequence.block_table, num_full)
            return
        # The last block is final though it may not be full.
        job.handoff.blocks_ready(
            work.sequence.block_table, blocks_for(len(work.sequence.tokens), self._block_size)
        )
        if not job.first_token.done():
            job.first_token.set_result(FirstToken(result, self._finish_reason(job, result)))

    def _finish_reason(self, job: PrefillJob, token: SampledToken) -> FinishReason | None:
        info = self._engine.info
        return finish_reason(
            job.sampling,
            info.eos_token_ids,
            token_id=token.token_id,
            num_output_tokens=job.sequence.num_output_tokens + 1,
            num_tokens=len(job.sequence.tokens) + 1,
            max_context_tokens=info.max_context_tokens,
        )
