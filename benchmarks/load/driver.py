"""Runs a load: in a closed loop, where each stream sends its next request when the last has ended, or in
an open one, where requests come when they are due, whatever has become of those before."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load import api as apis
from benchmarks.load.api import Api
from benchmarks.load.arrivals import Arrival
from benchmarks.load.connection import Exchange, HttpClient
from benchmarks.load.outcome import Job, Outcome

# Requests of an open loop that overloads its server pile up; more than this count as failed at once.
MAX_OPEN = 1024
# A server that refuses everything must not be asked thousands of times a second.
_PAUSE_AFTER_ERROR_S = 0.1


@dataclass(slots=True)
class Run:
    """All requests of a load, and the seconds [begin_s, end_s) in which it was at full strength."""

    outcomes: list[Outcome]
    begin_s: float
    end_s: float


@dataclass(slots=True)
class _Sent:
    job: Job
    started_s: float
    exchange: Exchange


@dataclass(slots=True)
class Target:
    """A server under load. extra: fields of a body that it wants besides."""

    client: HttpClient
    api: Api
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    async def run_closed(
        self, jobs: Iterator[Job], num_streams: int, duration_s: float, max_requests: int
    ) -> Run:
        """Starts requests for `duration_s`, at most `max_requests`, and waits for those that run then."""
        sent: list[_Sent] = []

        async def send(job: Job) -> None:
            each = await self._send(job, time.monotonic())
            sent.append(each)
            if each.exchange.status != 200:
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

        begin_s, end_s = await closed_loop(send, jobs, num_streams, duration_s, max_requests)
        return Run(self._read(sent), begin_s, end_s)

    async def run_open(
        self, arrivals: Sequence[Arrival], is_hopeless: Callable[[Outcome], bool] | None = None
    ) -> Run:
        """Sends each request when it is due and waits for all. Latencies count from when it was due.

        is_hopeless: is told each outcome as it comes; once it says so, what runs is dropped and no more is
        sent: those requests are missing in the result.
        """
        sent: list[_Sent] = []
        gave_up = asyncio.Event()
        began_s = time.monotonic()

        async def one(arrival: Arrival) -> None:
            each = await self._send(arrival.job, began_s + arrival.at_s)
            sent.append(each)
            if is_hopeless is not None and is_hopeless(self._outcome(each)):
                gave_up.set()

        tasks: set[asyncio.Task[None]] = set()
        for arrival in arrivals:
            await _sleep_until(began_s + arrival.at_s, gave_up)
            if gave_up.is_set():
                break
            if sum(not task.done() for task in tasks) >= MAX_OPEN:
                now_s = time.monotonic()
                failure = Exchange(now_s, ended_s=now_s, failure=f"{MAX_OPEN} requests were open already")
                sent.append(_Sent(arrival.job, began_s + arrival.at_s, failure))
                continue
            tasks.add(asyncio.create_task(one(arrival)))
        end_s = time.monotonic()
        await _until_done(tasks, gave_up)
        return Run(self._read(sent), began_s, end_s)

    async def _send(self, job: Job, started_s: float) -> _Sent:
        body = apis.body(self.api, self.model, job, self.extra)
        exchange = await self.client.post(self.client.prefix + self.api.path, body)
        return _Sent(job, started_s, exchange)

    def _outcome(self, sent: _Sent) -> Outcome:
        return apis.read(self.api, sent.exchange, sent.job, sent.started_s)

    def _read(self, sent: Sequence[_Sent]) -> list[Outcome]:
        return [self._outcome(each) for each in sent]


async def closed_loop(
    send: Callable[[Job], Awaitable[None]],
    jobs: Iterator[Job],
    num_streams: int,
    duration_s: float,
    max_requests: int,
) -> tuple[float, float]:
    """Streams that each send one job after another; returns when it began, and when the last could start."""
    began_s = time.monotonic()
    stop_s = began_s + duration_s
    num_left = max_requests

    async def stream() -> None:
        nonlocal num_left
        while num_left > 0 and time.monotonic() < stop_s:
            num_left -= 1
            await send(next(jobs))

    await asyncio.gather(*(stream() for _ in range(num_streams)))
    return began_s, min(stop_s, time.monotonic())


async def _sleep_until(at_s: float, gave_up: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(max(0.0, at_s - time.monotonic())):
            await gave_up.wait()
    except TimeoutError:
        return


async def _until_done(tasks: set[asyncio.Task[None]], gave_up: asyncio.Event) -> None:
    """Waits for all, or cancels them when there is no more need."""
    if not tasks:
        return
    waiting = asyncio.create_task(gave_up.wait())
    everything = asyncio.create_task(_wait_for(tasks))
    await asyncio.wait((waiting, everything), return_when=asyncio.FIRST_COMPLETED)
    for task in (waiting, everything, *tasks):
        task.cancel()
    for result in await asyncio.gather(waiting, everything, *tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _wait_for(tasks: set[asyncio.Task[None]]) -> bool:
    await asyncio.wait(tasks)
    return True
