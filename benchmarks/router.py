"""One router process alone: workers that answer at once, kvferry's router beside others from PyPI.

python -m benchmarks.router --setup all
python -m benchmarks.router --json
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.load import statistics
from benchmarks.load.api import CompletionsApi
from benchmarks.load.connection import HttpClient
from benchmarks.load.driver import Run, Target
from benchmarks.load.outcome import Job
from benchmarks.load.prompts import Prompts
from benchmarks.peers.environment import SetupFailed
from benchmarks.peers.process import ServerFailed
from benchmarks.routers.grpc_target import GrpcTarget
from benchmarks.routers.systems import SYSTEMS, RouterSystem
from kvferry import models
from kvferry.config import DEMO_MODEL

_EXAMPLES = """Examples:

  python -m benchmarks.router --setup all

  python -m benchmarks.router --systems kvferry,smg --json
"""
NUM_STREAMS = 16
PROMPT_TOKENS = 16
STREAM_TOKENS = 128
# The least that reaches the decode worker: the first token comes from prefill.
REQUEST_TOKENS = 2
# What the client keeps until a load is over bounds it: about 300 bytes a token.
_MAX_REQUESTS = 4000
_NUM_PROMPTS = 512
_WARM_UP_REQUESTS = 64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


class _Target(Protocol):
    async def run_closed(
        self, jobs: Iterator[Job], num_streams: int, duration_s: float, max_requests: int
    ) -> Run: ...


@dataclass(frozen=True, slots=True)
class _Measured:
    """One closed loop and the CPU seconds that the router took for all of it."""

    run: Run
    cpu_s: float

    @property
    def seconds(self) -> float:
        """Time in which requests were started."""
        return self.run.end_s - self.run.begin_s

    @property
    def num_tokens(self) -> int:
        """All output tokens, those after `seconds` too, as CPU time is."""
        return sum(outcome.num_output_tokens for outcome in self.run.outcomes)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens that arrived, a second."""
        begin_s, end_s = self.run.begin_s, self.run.end_s
        return sum(o.num_tokens_between(begin_s, end_s) for o in self.run.outcomes) / self.seconds

    @property
    def requests_per_s(self) -> float:
        """Requests that ended, a second."""
        return sum(o.ended_s <= self.run.end_s for o in self.run.outcomes) / self.seconds

    @property
    def num_errors(self) -> int:
        """Requests that were not served."""
        return sum(bool(o.error) for o in self.run.outcomes)


@app.command(epilog=_EXAMPLES)
def main(
    systems: Annotated[str, typer.Option(help="Which routers, by commas.")] = ",".join(SYSTEMS),
    model_dir: Annotated[Path | None, typer.Option(help="For its tokenizer; by default the demo's.")] = None,
    duration: Annotated[float, typer.Option(min=0.5, help="Seconds of each load.")] = 6.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, one router after another in each.")] = 3,
    setup: Annotated[str | None, typer.Option(help="Install a router, or `all`, and end.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute: one short round.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Requests and streamed tokens a second through one router, and the CPU time that it takes for them."""
    names = list(SYSTEMS) if setup == "all" else (setup or systems).split(",")
    if unknown := sorted(set(names) - SYSTEMS.keys()):
        raise typer.BadParameter(f"no such router: {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    with _errors():
        folder = model_dir or models.resolve(DEMO_MODEL)
        if setup is not None:
            for name in names:
                SYSTEMS[name](folder).set_up(_say)
            return
        if quick:
            duration, rounds = 2.0, 1
        result = asyncio.run(_compare(names, folder, duration, rounds))
    if as_json:
        sys.stdout.write(json.dumps(statistics.rounded(result), indent=2) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(_table(result))
        for name, reason in result["skipped"].items():
            _say(f"{name} was left out: {reason}")


async def _compare(names: list[str], model_dir: Path, duration_s: float, num_rounds: int) -> dict[str, Any]:
    """Rows: the median of the rounds for each number."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    skipped: dict[str, str] = {}
    for number in range(num_rounds):
        for name in names if number % 2 == 0 else reversed(names):
            if name in skipped:
                continue
            system = SYSTEMS[name](model_dir)
            if reason := system.why_not():
                skipped[name] = reason
                continue
            _say(f"round {number + 1} of {num_rounds}: {name}")
            try:
                await system.start()
                for api, numbers in (await _measure(system, duration_s)).items():
                    found.setdefault((name, api), []).append(numbers)
            except ServerFailed as error:
                skipped[name] = str(error)
            finally:
                system.stop()
    rows = [
        {"system": name, "api": api}
        | {key: statistics.percentile([each[key] for each in rounds], 50) for key in rounds[0]}
        for (name, api), rounds in found.items()
    ]
    return {"rows": rows, "skipped": skipped, "num_streams": NUM_STREAMS, "num_rounds": num_rounds}


async def _measure(system: RouterSystem, duration_s: float) -> dict[str, dict[str, float]]:
    """By API: the numbers of a row."""
    api = CompletionsApi()
    prompts = Prompts(system.model_dir, api)
    texts = [prompts.prompt(PROMPT_TOKENS) for _ in range(_NUM_PROMPTS)]
    client = HttpClient(system.url, keep_alive=True)
    results = {}
    try:
        results["http"] = await _loads(system, Target(client, api, system.model), texts, duration_s)
        if system.grpc_address:
            grpc_target = GrpcTarget(system.grpc_address)
            results["grpc"] = await _loads(system, grpc_target, texts, duration_s)
            await grpc_target.close()
    finally:
        client.close()
    return results


async def _loads(
    system: RouterSystem, target: _Target, texts: list[str], duration_s: float
) -> dict[str, float]:
    def jobs(num_tokens: int) -> Iterator[Job]:
        return cycle([Job(text, PROMPT_TOKENS, num_tokens) for text in texts])

    async def load(num_tokens: int, num_streams: int) -> _Measured:
        before_s = system.router.cpu_s()
        run = await target.run_closed(jobs(num_tokens), num_streams, duration_s, _MAX_REQUESTS)
        return _Measured(run, system.router.cpu_s() - before_s)

    warm = await target.run_closed(jobs(STREAM_TOKENS), NUM_STREAMS, duration_s, _WARM_UP_REQUESTS)
    if failed := [outcome.error for outcome in warm.outcomes if outcome.error]:
        raise ServerFailed(f"{system.name} did not serve the warm-up: {failed[0]}")
    one, requests, streams, stream = (
        await load(REQUEST_TOKENS, 1),
        await load(REQUEST_TOKENS, NUM_STREAMS),
        await load(STREAM_TOKENS, NUM_STREAMS),
        await load(STREAM_TOKENS, 1),
    )
    return {
        "requests_per_s": requests.requests_per_s,
        "tokens_per_s": streams.tokens_per_s,
        "cpu_s_per_million_tokens": streams.cpu_s / streams.num_tokens * 1e6,
        "cpu_ms_per_request": requests.cpu_s / len(requests.run.outcomes) * 1000,
        "tokens_per_s_one_stream": stream.tokens_per_s,
        "round_trip_ms": statistics.percentile([o.e2e_s for o in one.run.outcomes if not o.error], 50) * 1000,
        "num_errors": float(sum(each.num_errors for each in (one, requests, streams, stream))),
    }


def _table(result: dict[str, Any]) -> Table:
    table = Table("router", "API")
    for heading in (
        "round trip ms",
        f"requests/s, c={NUM_STREAMS}",
        "CPU ms a request",
        f"tokens/s, c={NUM_STREAMS}",
        "c=1",
        "CPU s a million tokens",
        "errors",
    ):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["system"],
            row["api"],
            f"{row['round_trip_ms']:.2f}",
            f"{row['requests_per_s']:.0f}",
            f"{row['cpu_ms_per_request']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['tokens_per_s_one_stream']:.0f}",
            f"{row['cpu_s_per_million_tokens']:.1f}",
            f"{row['num_errors']:.0f}",
        )
    return table


def _say(line: str) -> None:
    # Standard output is for the result.
    sys.stderr.write(f"{line}\n")


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (SetupFailed, models.ModelNotFound, ValueError, OSError) as error:
        _say(f"benchmarks.router: {error}")
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
