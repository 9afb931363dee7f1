"""One step after another on the engine's own thread, and whose blocks a running step uses."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.engine import Chunk, Engine, OutOfMemory, SampledToken
from engine.isolation import step_each
from kvferry.sampling import SamplingParams
from scheduling.allocator import BlockAllocator
from scheduling.sequence import Scheduled

logger = logging.getLogger(__name__)

StepResults = list[SampledToken | Exception | None]
"""What a step brought, in the order of its work: a token, nothing yet, or what its sequence failed with."""


class Steps:
    """Runs what was scheduled. Not thread-safe: call it on the worker's event loop, a step at a time."""

    def __init__(self, engine: Engine, allocator: BlockAllocator, counters: Counter[str]) -> None:
        self._engine = engine
        self._allocator = allocator
        self._counters = counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._running: set[str] = set()
        self._free_afterwards: set[str] = set()

    async def run(
        self,
        scheduled: Sequence[Scheduled],
        sampling_of: Callable[[str], SamplingParams],
        shrink: Callable[[], bool],
    ) -> StepResults | None:
        """One step. None where it ran out of memory and `shrink` has made room for smaller chunks.

        A step that fails otherwise is run again a chunk at a time, so that only the request at fault fails.
        """
        self._running = {work.sequence.request_id for work in scheduled}
        try:
            return await self._compute([_chunk(work, sampling_of) for work in scheduled], shrink)
        finally:
            self._running = set()
            for request_id in self._free_afterwards:
                self._allocator.free(request_id)
            self._free_afterwards.clear()

    def free(self, request_id: str) -> None:
        """Gives a request's blocks back: at once, or when the running step that uses them has ended."""
        if request_id in self._running:
            self._free_afterwards.add(request_id)
        else:
            self._allocator.free(request_id)

    def is_freeing(self, request_id: str) -> bool:
        """Whether its blocks wait for the running step to end."""
        return request_id in self._free_afterwards

    def close(self) -> None:
        """Waits for the step that may still run."""
        self._thread.shutdown()

    async def _compute(self, chunks: list[Chunk], shrink: Callable[[], bool]) -> StepResults | None:
        run = asyncio.get_running_loop().run_in_executor
        try:
            return list(await run(self._thread, self._engine.step, chunks))
        except OutOfMemory as error:
            self._counters["steps_out_of_memory"] += 1
            if shrink():
                logger.warning("a step ran out of memory (%s); smaller ones follow", error)
                return None
        except Exception as error:  # noqa: BLE001 - any fault of one sequence must not end the others
            logger.warning("a step of %d sequences failed (%r)", len(chunks), error)
        return await run(self._thread, step_each, self._engine, chunks)


def _chunk(work: Scheduled, sampling_of: Callable[[str], SamplingParams]) -> Chunk:
    sequence = work.sequence
    return Chunk(
        sequence.tokens,
        work.start,
        work.end,
        sequence.block_table,
        sequence.num_prompt_tokens,
        sampling_of(sequence.request_id) if work.is_last else None,
    )
