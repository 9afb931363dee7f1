"""Serving as clients see it: a load on any OpenAI-compatible server, or kvferry beside its peers.

python -m benchmarks.serving --url http://127.0.0.1:8000/v1 --streams 8
python -m benchmarks.serving --peers
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.load import report, statistics
from benchmarks.load.api import Api, ChatApi, CompletionsApi
from benchmarks.load.loads import Shape
from benchmarks.load.outcome import Slo
from benchmarks.peers import catalogue
from benchmarks.peers.environment import SetupFailed
from benchmarks.serving_one import Kind, OneLoad, ServerUnusable, run_one
from benchmarks.serving_peers import Comparison, full_plan, quick_plan
from kvferry import models
from kvferry.config import DEMO_MODEL, ConfigError

_EXAMPLES = """Examples:

  python -m benchmarks.serving --url http://127.0.0.1:8000/v1 --streams 8

  python -m benchmarks.serving --url http://127.0.0.1:8000/v1 --rate 2 --api chat --slo-ttft-ms 500

  python -m benchmarks.serving --trace conversation.jsonl --length-scale 0.02 --time-scale 0.5

  python -m benchmarks.serving --setup llama.cpp && python -m benchmarks.serving --peers
"""
_QUICK_S = 8.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
_APIS: dict[str, type[CompletionsApi | ChatApi]] = {"completions": CompletionsApi, "chat": ChatApi}


@app.command(epilog=_EXAMPLES)
def main(
    url: Annotated[str | None, typer.Option(help="A server; without it kvferry is started.")] = None,
    model: Annotated[str | None, typer.Option(help="Its name there; by default the first listed.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Model directory; by default the demo's.")] = None,
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    streams: Annotated[int, typer.Option(min=1, help="Closed loop: so many requests at all times.")] = 8,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop: Poisson, requests/s.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Open loop: a Mooncake trace in JSONL.")] = None,
    length_scale: Annotated[float, typer.Option(help="Factor on the trace's lengths.")] = 1.0,
    time_scale: Annotated[float, typer.Option(help="Factor on the times between its requests.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=4, help="Trace: of prompt and output, at most.")] = 8192,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Tokens in each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option("--output", min=1, help="Tokens to generate.")] = 128,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Leading tokens that all prompts share.")] = 0,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds in which requests start.")] = 30.0,
    requests: Annotated[int, typer.Option(min=1, help="At most so many requests.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    slo_ttft_ms: Annotated[float, typer.Option(min=1, help="Target of a request's TTFT.")] = 1000,
    slo_tpot_ms: Annotated[float, typer.Option(min=0.1, help="Target of its TPOT.")] = 50,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Find the highest rate at which 90 % meet both targets.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="kvferry's deployment in YAML.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="kvferry beside its peers.")] = False,
    systems: Annotated[
        str, typer.Option(help=f"Which, by commas. There are: kvferry, {', '.join(catalogue.OTHERS)}.")
    ] = ",".join(catalogue.DEFAULT),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of --peers.")] = 3,
    setup: Annotated[str | None, typer.Option(help="Install a peer, or `all`, and end.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute, fewer points.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Loads an OpenAI-compatible server and reports what its clients see, or compares kvferry with peers."""
    with _errors():
        if setup is not None:
            _set_up(setup)
            return
        if peers:
            _print(_compare(systems.split(","), rounds, quick, config), as_json)
            return
        if api not in _APIS:
            raise typer.BadParameter(f"{api!r} is neither completions nor chat")
        kind = _kind(rate, trace, goodput)
        one = OneLoad(
            kind=kind,
            api=_make_api(api),
            model_dir=tokenizer or models.resolve(DEMO_MODEL),
            shape=Shape(api, input_tokens, output_tokens, Slo(slo_ttft_ms / 1000, slo_tpot_ms / 1000)),
            num_streams=streams,
            rate=rate or 1.0,
            trace=trace,
            length_scale=length_scale,
            time_scale=time_scale,
            max_tokens=max_tokens,
            num_shared_tokens=shared_prefix,
            duration_s=min(duration, _QUICK_S) if quick else duration,
            max_requests=requests,
            seed=seed,
        )
        _print(asyncio.run(run_one(one, url, model, config, _say)), as_json)


def _kind(rate: float | None, trace: Path | None, goodput: bool) -> Kind:
    if trace is not None:
        if rate is not None or goodput:
            raise typer.BadParameter("--trace brings its own rate")
        return "trace"
    if goodput:
        return "goodput"
    return "closed" if rate is None else "poisson"


def _make_api(name: str) -> Api:
    return _APIS[name]()


def _set_up(name: str) -> None:
    names = list(catalogue.OTHERS) if name == "all" else [name]
    for each in names:
        if each not in catalogue.OTHERS:
            raise typer.BadParameter(f"{each!r} is none of {', '.join(catalogue.OTHERS)}")
        peer = catalogue.OTHERS[each](models.resolve(DEMO_MODEL))
        if peer.why_not():
            peer.set_up(_say)
        _say(f"{each} is set up")


def _compare(names: list[str], num_rounds: int, quick: bool, config: Path | None) -> dict[str, Any]:
    unknown = sorted(set(names) - {"kvferry", *catalogue.OTHERS})
    if unknown:
        raise typer.BadParameter(f"no such system: {', '.join(unknown)}")
    model_dir = models.resolve(DEMO_MODEL)
    peers = [catalogue.make(name, model_dir, config) for name in names]
    slow = [peer.name for peer in peers if quick and peer.starts_slowly]
    peers = [peer for peer in peers if peer.name not in slow]
    plan = quick_plan() if quick else full_plan(num_rounds)
    result = asyncio.run(Comparison(peers, model_dir, plan, _say).run())
    result["skipped"] |= dict.fromkeys(slow, "starts too slowly for a quick run")
    return result


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(statistics.rounded(result), indent=2) + "\n")
        return
    console = Console(width=None if sys.stdout.isatty() else 180)
    if result["rows"]:
        console.print(report.rows_table(result["rows"]))
    if result["goodput"]:
        console.print(report.goodput_table(result["goodput"]))
    for name, reason in result.get("skipped", {}).items():
        console.print(f"{name} was left out: {reason}", markup=False)


def _say(line: str) -> None:
    # Standard output is for the result.
    sys.stderr.write(f"{line}\n")


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (ConfigError, ServerUnusable, SetupFailed, models.ModelNotFound, ValueError, OSError) as error:
        _say(f"benchmarks.serving: {error}")
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
