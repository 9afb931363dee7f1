"""Goodput: the highest request rate at which enough requests meet their targets, found by bisection.

The rate doubles from a first one until a probe fails, or halves until one passes; then the bracket is cut
in half, geometrically, until it is narrow. Each probe is one open loop of bounded length.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.load.statistics import Range, wilson

WANTED_SHARE = 0.9
# Rates that differ by less than this are one: a probe of some dozens of requests tells no finer.
NARROW = 1.12


@dataclass(frozen=True, slots=True)
class Probe:
    """What one rate came to. Of a probe that was given up early the rest counts as missed."""

    rate: float
    num_requests: int
    num_met: int

    @property
    def attainment(self) -> float:
        """The share that met the targets."""
        return self.num_met / self.num_requests if self.num_requests else 0.0

    @property
    def passes(self) -> bool:
        """Whether the share is enough."""
        return self.attainment >= WANTED_SHARE

    @property
    def range(self) -> Range:
        """Where the share lies with 95 % confidence."""
        return wilson(self.num_met, self.num_requests)


@dataclass(frozen=True, slots=True)
class Goodput:
    """requests_per_s: the highest rate that passed, 0 if none did. is_bounded: whether one failed too."""

    requests_per_s: float
    is_bounded: bool
    probes: list[Probe]

    @property
    def range(self) -> tuple[float, float | None]:
        """From the highest rate that passed for sure to the lowest that failed for sure (None: none did)."""
        passed = [p.rate for p in self.probes if p.range[0] >= WANTED_SHARE]
        failed = [p.rate for p in self.probes if p.range[1] < WANTED_SHARE]
        low = max(passed, default=0.0)
        return low, min((rate for rate in failed if rate > low), default=None)


async def find(
    probe: Callable[[float], Awaitable[Probe]], first_rate: float, *, max_probes: int, max_s: float
) -> Goodput:
    """Bisects, at most `max_probes` probes, none begun after `max_s`."""
    deadline_s = time.monotonic() + max_s
    probes: list[Probe] = []
    low, high = 0.0, float("inf")
    rate = first_rate
    while len(probes) < max_probes and time.monotonic() < deadline_s:
        result = await probe(rate)
        probes.append(result)
        if result.passes:
            low = max(low, rate)
        else:
            high = min(high, rate)
        if low > 0 and high < float("inf"):
            if high <= low * NARROW:
                break
            rate = (low * high) ** 0.5
        else:
            rate = rate * 2 if result.passes else rate / 2
    return Goodput(low, high < float("inf"), probes)
