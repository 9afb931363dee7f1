"""What is done to a deployment, and when: a schedule from a seed, and its doing."""

import asyncio
import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from benchmarks.chaos.deployment import LinkedDeployment

Kind = Literal["kill", "stop", "stop_and_kill", "cut", "stall", "slow", "kill_router"]

# With the weight of each. A killed router ends every request, so there are few of them.
_KINDS: dict[Kind, int] = {"kill": 4, "stop": 3, "stop_and_kill": 1, "cut": 5, "stall": 2, "slow": 3}
_NO_VICTIM = "router"
_MIN_GAP_S, _MAX_GAP_S = 0.3, 3.0
_MAX_STOPPED_S = 3.0
_MAX_SLOW_S = 4.0
# From a tenth of a token's message in a millisecond to what a bad line between sites gives.
_PACES_BYTES_PER_S = (5e4, 5e5, 5e6)


@dataclass(frozen=True, slots=True)
class Fault:
    """One harm. victim: a worker, or what a link joins. seconds: how long it lasts, if not at once."""

    at_s: float
    kind: Kind
    victim: str
    seconds: float = 0.0
    bytes_per_s: float = 0.0


def make_faults(
    seed: int, begin_s: float, end_s: float, workers: Sequence[str], links: Sequence[str]
) -> list[Fault]:
    """The schedule between two moments of a run; one death of the router in its last quarter."""
    rng = random.Random(f"faults {seed}")
    found = [Fault(rng.uniform((begin_s + 3 * end_s) / 4, end_s), "kill_router", _NO_VICTIM)]
    at_s = begin_s
    while at_s < end_s:
        kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        victim = rng.choice(workers if kind in ("kill", "stop", "stop_and_kill") else links)
        seconds = rng.uniform(0.3, _MAX_SLOW_S if kind == "slow" else _MAX_STOPPED_S)
        found.append(Fault(at_s, kind, victim, seconds, rng.choice(_PACES_BYTES_PER_S)))
        at_s += rng.uniform(_MIN_GAP_S, _MAX_GAP_S)
    return sorted(found, key=lambda fault: fault.at_s)


async def inject(fault: Fault, deployment: LinkedDeployment) -> bool:
    """Does it, and undoes it after its time; returns whether there was anything to harm."""
    if fault.kind in ("cut", "stall", "slow"):
        link = deployment.links[fault.victim]
        if fault.kind == "cut":
            link.cut()
            return True
        if fault.kind == "stall":
            link.stall()
        else:
            link.slow(fault.bytes_per_s)
        await asyncio.sleep(fault.seconds)
        link.heal()
        return True
    process = (await asyncio.to_thread(deployment.processes)).get(fault.victim)
    if process is None:
        return False
    with suppress(psutil.NoSuchProcess):
        await _harm(process, fault)
        return True
    return False


async def _harm(process: psutil.Process, fault: Fault) -> None:
    if fault.kind in ("kill", "kill_router"):
        process.send_signal(signal.SIGKILL)
        return
    process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        process.send_signal(signal.SIGKILL if fault.kind == "stop_and_kill" else signal.SIGCONT)
