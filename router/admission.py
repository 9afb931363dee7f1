"""The queue of requests that wait for room: bounded, higher priority first, then in order of arrival.

A request tries to reserve at once. Where there is no room it waits here; whenever there may be room again,
the first in the queue tries, and only when it has succeeded the next one does.
"""

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from router.errors import Overloaded

# Reports that bring room come every heartbeat; this is for room that no report tells of.
RETRY_S = 0.1
MAX_RETRY_AFTER_S = 60

T = TypeVar("T")


class Admission:
    """Lets requests through as there is room."""

    def __init__(self, max_queued: int, queue_timeout_s: float) -> None:
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._heap: list[tuple[bool, int, int, asyncio.Event]] = []
        self._arrivals = itertools.count()
        # When the last requests were let through: how fast the queue moves.
        self._admitted_s: deque[float] = deque(maxlen=32)

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return len(self._heap)

    @property
    def is_full(self) -> bool:
        """Whether a request that finds no room is refused at once."""
        return len(self._heap) >= self._max_queued

    async def admit(
        self, priority: int, attempt: Callable[[], Awaitable[T | None]], *, is_accepted: bool = False
    ) -> T:
        """Calls `attempt` until it gives something, when it is this request's turn.

        is_accepted: it was let through before and has lost its worker; it goes before all that were not, and
        a full queue is no reason to refuse it. Raises `Overloaded` when the queue is full or the wait is too
        long, and what `attempt` raises.
        """
        if not self._heap and (result := await attempt()) is not None:
            return self._let_through(result)
        if self.is_full and not is_accepted:
            raise Overloaded(
                f"all workers are busy and {self.num_queued} requests wait", self.retry_after_s()
            )
        wake = asyncio.Event()
        entry = (not is_accepted, -priority, next(self._arrivals), wake)
        heapq.heappush(self._heap, entry)
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                while True:
                    if self._heap[0] is entry and (result := await attempt()) is not None:
                        return self._let_through(result)
                    await self._wait(wake)
        except TimeoutError:
            raise Overloaded(
                f"no worker had room within {self._queue_timeout_s:g} s", self.retry_after_s()
            ) from None
        finally:
            self._heap.remove(entry)
            heapq.heapify(self._heap)
            self.wake()

    def wake(self) -> None:
        """Says that there may be room."""
        if self._heap:
            self._heap[0][-1].set()

    def retry_after_s(self) -> int:
        """When the queue of now will have been worked off, at the speed of late."""
        if len(self._admitted_s) < 2:
            return 1
        interval_s = (self._admitted_s[-1] - self._admitted_s[0]) / (len(self._admitted_s) - 1)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(interval_s * self.num_queued)))

    def _let_through(self, result: T) -> T:
        self._admitted_s.append(asyncio.get_running_loop().time())
        return result

    @staticmethod
    async def _wait(wake: asyncio.Event) -> None:
        try:
            await asyncio.wait_for(wake.wait(), RETRY_S)
        except TimeoutError:
            return
        finally:
            wake.clear()
