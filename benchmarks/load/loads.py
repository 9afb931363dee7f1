"""The loads that systems are compared under. Each gives its runs by name: a name is a row."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from benchmarks.load.arrivals import Arrival, poisson_times_s
from benchmarks.load.driver import Run, Target
from benchmarks.load.goodput import Goodput, Probe, find
from benchmarks.load.outcome import Job, Outcome, Slo
from benchmarks.load.prompts import Prompts

# More than any load here sends; bounds a server that answers everything at once.
MAX_REQUESTS = 5000
WARM_UP_STREAMS = 8
WARM_UP_TOKENS = 16
_PROBE_REQUESTS = 40
_PROBE_S = (8.0, 40.0)
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of a request in tokens, and what its client hopes for."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    slo: Slo

    def jobs(self, prompts: Prompts) -> Iterator[Job]:
        """Requests without end, each with a prompt of its own."""
        while True:
            yield Job(prompts.prompt(self.num_prompt_tokens), self.num_prompt_tokens, self.num_output_tokens)


CHAT = Shape("chat", 128, 128, Slo(ttft_s=1.0, tpot_s=0.05))
LONG_PROMPT = Shape("long prompt", 2048, 16, Slo(ttft_s=4.0, tpot_s=0.1))


class Load(Protocol):
    """Something to put a server under."""

    async def run(self, target: Target, prompts: Prompts) -> dict[str, tuple[Run, Slo]]:
        """Runs it once: by name, what was seen and the targets that it is held against."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """Closed-loop streams of one shape."""

    shape: Shape
    num_streams: int
    duration_s: float

    async def run(self, target: Target, prompts: Prompts) -> dict[str, tuple[Run, Slo]]:
        """See `Load`."""
        jobs = self.shape.jobs(prompts)
        run = await target.run_closed(jobs, self.num_streams, self.duration_s, MAX_REQUESTS)
        plural = "s" if self.num_streams > 1 else ""
        lengths = f"{self.shape.num_prompt_tokens}/{self.shape.num_output_tokens}"
        return {f"{self.num_streams} stream{plural} {lengths}": (run, self.shape.slo)}


@dataclass(frozen=True, slots=True)
class ChatsBesidePrompts:
    """Chats that run while a long prompt arrives every few seconds: what do they feel of it?"""

    duration_s: float
    num_chats: int = 4
    every_s: float = 4.0

    async def run(self, target: Target, prompts: Prompts) -> dict[str, tuple[Run, Slo]]:
        """See `Load`."""
        num_prompts = max(1, int(self.duration_s / self.every_s))
        jobs = LONG_PROMPT.jobs(prompts)
        # Half an interval in, so that chats run before the first and after the last.
        due = [Arrival((i + 0.5) * self.every_s, next(jobs)) for i in range(num_prompts)]
        chats, long_prompts = await asyncio.gather(
            target.run_closed(CHAT.jobs(prompts), self.num_chats, self.duration_s, MAX_REQUESTS),
            target.run_open(due),
        )
        lengths = f"{LONG_PROMPT.num_prompt_tokens}-token prompt every {self.every_s:g} s"
        return {
            f"{self.num_chats} chats, {lengths}": (chats, CHAT.slo),
            f"the {LONG_PROMPT.num_prompt_tokens}-token prompts": (long_prompts, LONG_PROMPT.slo),
        }


async def warm_up(target: Target, prompts: Prompts) -> Run:
    """Requests that do not count: as many at once as any load has, short ones and then long ones."""
    lengths = [CHAT.num_prompt_tokens] * WARM_UP_STREAMS + [LONG_PROMPT.num_prompt_tokens] * 2
    jobs = [Job(prompts.prompt(length), length, WARM_UP_TOKENS) for length in lengths]
    return await target.run_closed(iter(jobs), WARM_UP_STREAMS, float("inf"), len(jobs))


async def find_goodput(
    target: Target, prompts: Prompts, shape: Shape, first_rate: float, *, max_probes: int, max_s: float
) -> Goodput:
    """Bisects the rate of Poisson arrivals of one shape."""

    async def probe(rate: float) -> Probe:
        low_s, high_s = _PROBE_S
        duration_s = min(high_s, max(low_s, _PROBE_REQUESTS / rate))
        times_s = poisson_times_s(rate, duration_s, MAX_REQUESTS) or [0.0]
        jobs = shape.jobs(prompts)
        arrivals = [Arrival(at_s, next(jobs)) for at_s in times_s]
        num_missed = 0

        def is_hopeless(outcome: Outcome) -> bool:
            nonlocal num_missed
            num_missed += not shape.slo.is_met(outcome)
            return num_missed > len(arrivals) / 2

        run = await target.run_open(arrivals, is_hopeless)
        # For a server to drop what it was still working on.
        await asyncio.sleep(_SETTLE_S)
        return Probe(rate, len(arrivals), sum(map(shape.slo.is_met, run.outcomes)))

    return await find(probe, first_rate, max_probes=max_probes, max_s=max_s)
