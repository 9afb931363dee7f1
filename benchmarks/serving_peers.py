"""kvferry and its peers under the same loads, in rounds: round after round each system is started, loaded
and stopped in turn, so that a drift of the machine hits all alike."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load import report, summary
from benchmarks.load.api import CompletionsApi
from benchmarks.load.connection import HttpClient
from benchmarks.load.driver import Run, Target
from benchmarks.load.loads import (
    CHAT,
    LONG_PROMPT,
    ChatsBesidePrompts,
    Load,
    Shape,
    Streams,
    find_goodput,
    warm_up,
)
from benchmarks.load.outcome import Slo
from benchmarks.load.prompts import Prompts
from benchmarks.peers.environment import Say
from benchmarks.peers.peer import Peer
from benchmarks.peers.process import ServerFailed

OURS = "kvferry"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a comparison runs.

    first_rates: where the bisection of each shape begins, requests a second. request_timeout_s: a request
    that takes longer fails: none here takes more than seconds on a sound server.
    """

    num_rounds: int
    loads: Sequence[Load]
    first_rates: Sequence[tuple[Shape, float]]
    max_probes: int = 8
    max_goodput_s: float = 240.0
    request_timeout_s: float = 60.0


def full_plan(num_rounds: int) -> Plan:
    """What the README's figures come from."""
    loads = (Streams(CHAT, 8, 24.0), Streams(CHAT, 1, 16.0), ChatsBesidePrompts(40.0))
    return Plan(num_rounds, loads, ((CHAT, 2.0), (LONG_PROMPT, 0.5)))


def quick_plan() -> Plan:
    """A look within a minute: one round, short loads, no goodput."""
    loads = (Streams(CHAT, 8, 5.0), Streams(CHAT, 1, 3.0), ChatsBesidePrompts(8.0))
    return Plan(1, loads, (), request_timeout_s=10.0)


@dataclass(slots=True)
class Comparison:
    """Runs a plan. say: gets lines about what is done now."""

    peers: Sequence[Peer]
    model_dir: Path
    plan: Plan
    say: Say
    _runs: dict[str, dict[str, list[tuple[Run, Slo]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    _goodput: list[dict[str, Any]] = field(default_factory=list)
    _skipped: dict[str, str] = field(default_factory=dict)

    async def run(self) -> dict[str, Any]:
        """All rounds; `rows`, `goodput`, and `skipped`: systems that did not run, and why."""
        for number in range(self.plan.num_rounds):
            # Every other round backwards, so that none is always the last on a machine that warms up.
            for peer in self.peers if number % 2 == 0 else reversed(self.peers):
                if peer.name not in self._skipped:
                    await self._visit(peer, number)
        rows = [
            summary.row(system, load, [run for run, _ in runs[system]], runs[system][0][1])
            for load, runs in self._runs.items()
            for system in runs
        ]
        _add_ratios(rows, "load", _row_ratios)
        goodput = sorted(self._goodput, key=lambda row: str(row["shape"]))
        _add_ratios(goodput, "shape", _goodput_ratio)
        return {"rows": rows, "goodput": goodput, "skipped": self._skipped}

    async def _visit(self, peer: Peer, number: int) -> None:
        if reason := peer.why_not():
            self._skip(peer, reason)
            return
        self.say(f"round {number + 1} of {self.plan.num_rounds}: {peer.name}: starting")
        try:
            await peer.start()
            await self._load(peer, number)
        except (ServerFailed, OSError) as error:
            self._skip(peer, f"failed in round {number + 1}: {error}")
        finally:
            peer.stop()

    def _skip(self, peer: Peer, reason: str) -> None:
        self.say(f"{peer.name} is left out: {reason}")
        self._skipped[peer.name] = reason

    async def _load(self, peer: Peer, number: int) -> None:
        api = CompletionsApi()
        # The same prompts for all in one round, new ones in the next.
        prompts = Prompts(self.model_dir, api, seed=number)
        client = HttpClient(peer.url, timeout_s=self.plan.request_timeout_s)
        target = Target(client, api, peer.model, peer.extra)
        failed = [o.error for o in (await warm_up(target, prompts)).outcomes if o.error]
        if failed:
            raise ServerFailed(f"it did not serve the warm-up: {failed[0]}")
        for load in self.plan.loads:
            for name, result in (await load.run(target, prompts)).items():
                self.say(f"round {number + 1}: {peer.name}: {name}: done")
                self._runs[name][peer.name].append(result)
        if number > 0:
            return
        for shape, rate in self.plan.first_rates:
            self.say(f"{peer.name}: looking for its goodput of {shape.name} requests")
            max_probes, max_s = self.plan.max_probes, self.plan.max_goodput_s
            goodput = await find_goodput(target, prompts, shape, rate, max_probes=max_probes, max_s=max_s)
            self._goodput.append(report.goodput_row(peer.name, shape, goodput))


def _add_ratios(rows: list[dict[str, Any]], key: str, ratios: Any) -> None:
    """Gives each row of another system how kvferry does beside it; above 1 kvferry is ahead."""
    ours = {row[key]: row for row in rows if row["system"] == OURS}
    for row in rows:
        if row["system"] != OURS and row[key] in ours:
            row["kvferry_ratio"] = ratios(ours[row[key]], row)


def _row_ratios(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {
        "tokens/s": _divide(ours["output_tokens_per_s"], other["output_tokens_per_s"]),
        "ITL p99": _divide(other["itl_ms"]["p99"], ours["itl_ms"]["p99"]),
        "TTFT p50": _divide(other["ttft_ms"]["p50"], ours["ttft_ms"]["p50"]),
    }


def _goodput_ratio(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {"requests/s": _divide(ours["requests_per_s"], other["requests_per_s"])}


def _divide(value: float, by: float) -> float:
    return value / by if by else float("nan")
