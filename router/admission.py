"""The queue of requests that wait for room: bounded, in the order of a queue policy.

A request tries to reserve at once. Where there is no room it waits here; whenever there may be room again,
the first in the queue tries, and only when it has succeeded the next one does.
"""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from router.errors import Overloaded
from scheduling.first_come import FirstCome
from scheduling.queue_policy import QueuePolicy, Ticket

# Reports that bring room come every heartbeat; this is for room that no report tells of.
RETRY_S = 0.1
MAX_RETRY_AFTER_S = 60

T = TypeVar("T")


class Admission:
    """Lets requests through as there is room."""

    def __init__(self, max_queued: int, queue_timeout_s: float, policy: QueuePolicy) -> None:
        """policy: the order of those that wait, with nothing in it."""
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._policy = policy
        # Those that were let through before, which go before all others.
        self._accepted = FirstCome()
        self._wakes: dict[str, asyncio.Event] = {}
        self._arrivals = itertools.count()
        # When the last requests were let through: how fast the queue moves.
        self._admitted_s: deque[float] = deque(maxlen=32)

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return len(self._wakes)

    @property
    def is_full(self) -> bool:
        """Whether a request that finds no room is refused at once."""
        return len(self._wakes) >= self._max_queued

    async def admit(
        self,
        priority: int,
        num_tokens: int,
        attempt: Callable[[], Awaitable[T | None]],
        *,
        is_accepted: bool = False,
    ) -> T:
        """Calls `attempt` until it gives something, when it is this request's turn.

        num_tokens: of the prompt. is_accepted: it was let through before and has lost its worker; it goes
        before all that were not, and a full queue is no reason to refuse it. Raises `Overloaded` when the
        queue is full or the wait is too long, and what `attempt` raises.
        """
        if not self._wakes and (result := await attempt()) is not None:
            return self._let_through(result)
        if self.is_full and not is_accepted:
            raise Overloaded(
                f"all workers are busy and {self.num_queued} requests wait", self.retry_after_s()
            )
        wake = asyncio.Event()
        # Ids sort by arrival.
        name = f"{next(self._arrivals):015d}"
        ticket = Ticket(name, num_tokens, asyncio.get_running_loop().time(), priority)
        queue = self._accepted if is_accepted else self._policy
        queue.push(ticket)
        self._wakes[name] = wake
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                while True:
                    if self._first() is wake and (result := await attempt()) is not None:
                        queue.charge(ticket, num_tokens)
                        return self._let_through(result)
                    await self._wait(wake)
        except TimeoutError:
            raise Overloaded(
                f"no worker had room within {self._queue_timeout_s:g} s", self.retry_after_s()
            ) from None
        finally:
            queue.remove(name)
            del self._wakes[name]
            self.wake()

    def wake(self) -> None:
        """Says that there may be room."""
        if (first := self._first()) is not None:
            first.set()

    def _first(self) -> asyncio.Event | None:
        now_s = asyncio.get_running_loop().time()
        turn = self._accepted.first(now_s) or self._policy.first(now_s)
        return None if turn is None else self._wakes[turn.ticket.request_id]

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
