"""One load on one server: a given address, or a kvferry that is started for it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.load import report, summary
from benchmarks.load.api import Api
from benchmarks.load.arrivals import Arrival, Trace, poisson_times_s
from benchmarks.load.connection import HttpClient
from benchmarks.load.driver import Run, Target
from benchmarks.load.loads import Shape, find_goodput
from benchmarks.load.outcome import Job
from benchmarks.load.prompts import Prompts
from benchmarks.peers.environment import Say
from benchmarks.peers.kvferry_system import Kvferry
from benchmarks.peers.process import ServerFailed

Kind = Literal["closed", "poisson", "trace", "goodput"]

_MAX_PROBES = 10
# A bisection has as much time as so many loads of the given duration.
_GOODPUT_DURATIONS = 10


class ServerUnusable(Exception):
    """A server that cannot be put under load; the message says why."""


@dataclass(frozen=True, slots=True)
class OneLoad:
    """What to do; the command line's options say what each field means."""

    kind: Kind
    api: Api
    model_dir: Path
    shape: Shape
    num_streams: int
    rate: float
    trace: Path | None
    length_scale: float
    time_scale: float
    max_tokens: int
    num_shared_tokens: int
    duration_s: float
    max_requests: int
    seed: int

    @property
    def name(self) -> str:
        """What the row is called."""
        lengths = f"{self.shape.name} {self.shape.num_prompt_tokens}/{self.shape.num_output_tokens}"
        if self.kind == "trace":
            assert self.trace is not None
            return f"{self.trace.name}, lengths x {self.length_scale:g}, times x {self.time_scale:g}"
        return (
            f"{self.num_streams} streams, {lengths}"
            if self.kind == "closed"
            else f"{self.rate:g}/s, {lengths}"
        )

    def arrivals(self, prompts: Prompts) -> list[Arrival]:
        """Of an open loop."""
        if self.trace is not None:
            trace = Trace(self.trace, self.length_scale, self.time_scale, self.max_tokens)
            return list(trace.arrivals(prompts, self.duration_s, self.max_requests))
        times_s = poisson_times_s(self.rate, self.duration_s, self.max_requests, self.seed)
        jobs = self.shape.jobs(prompts)
        return [Arrival(at_s, next(jobs)) for at_s in times_s]


async def run_one(
    load: OneLoad, url: str | None, model: str | None, config: Path | None, say: Say
) -> dict[str, Any]:
    """Runs it; `rows` and `goodput`. Without a url kvferry is started, as `config` says.

    Raises `ServerUnusable`, and `ValueError` for a load that cannot be made.
    """
    if url is not None:
        return await _run(load, url, model, url, say)
    server = Kvferry(load.model_dir, config)
    say("starting kvferry")
    try:
        await server.start()
        return await _run(load, server.url, model or server.model, server.name, say)
    except ServerFailed as error:
        raise ServerUnusable(f"kvferry: {error}") from error
    finally:
        server.stop()


async def _run(load: OneLoad, url: str, model: str | None, system: str, say: Say) -> dict[str, Any]:
    client = HttpClient(url)
    # As OpenAI's own client has it, unless the address says otherwise.
    client.prefix = client.prefix or "/v1"
    target = Target(client, load.api, model or await _first_model(client))
    prompts = Prompts(load.model_dir, load.api, load.seed, load.num_shared_tokens)
    say(f"one request to {url} first, which does not count")
    first = await target.run_closed(load.shape.jobs(prompts), 1, float("inf"), 1)
    if first.outcomes[0].error:
        raise ServerUnusable(f"{url}: {first.outcomes[0].error}")
    if load.kind == "goodput":
        say(f"looking for the goodput of {load.shape.name} requests")
        max_s = _GOODPUT_DURATIONS * load.duration_s
        found = await find_goodput(
            target, prompts, load.shape, load.rate, max_probes=_MAX_PROBES, max_s=max_s
        )
        return {"rows": [], "goodput": [report.goodput_row(system, load.shape, found)]}
    say(f"{load.name}, {load.duration_s:g} s")
    run = await _run_load(load, target, prompts)
    return {"rows": [summary.row(system, load.name, [run], load.shape.slo)], "goodput": []}


async def _run_load(load: OneLoad, target: Target, prompts: Prompts) -> Run:
    if load.kind != "closed":
        return await target.run_open(load.arrivals(prompts))
    jobs: Iterator[Job] = load.shape.jobs(prompts)
    return await target.run_closed(jobs, load.num_streams, load.duration_s, load.max_requests)


async def _first_model(client: HttpClient) -> str:
    exchange = await client.get(f"{client.prefix}/models")
    try:
        return str(json.loads(exchange.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        why = exchange.failure or f"HTTP {exchange.status}"
        raise ServerUnusable(f"no model is listed there ({why}); name one with --model") from error
