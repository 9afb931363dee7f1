"""No request lost, doubled, corrupted or leaked: faults by a seed over a live deployment.

python -m benchmarks.chaos --seed 1 --requests 300 --json
"""

import asyncio
import json
import sys
from collections import Counter
from contextlib import redirect_stdout
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from benchmarks.peers.process import free_port
from deploy import environment
from kvferry import models
from kvferry.config import DEMO_MODEL, DeploymentConfig, parse

_EXAMPLES = """Examples:

  python -m benchmarks.chaos --seed 1 --requests 300 --json

  python -m benchmarks.chaos --seed 1 --minutes 10 --requests 3000 --engine fake
"""
Engine = Literal["fake", "transformers"]

_REQUESTS_PER_S: dict[Engine, float] = {"fake": 8.0, "transformers": 1.5}
_MAX_TOKENS: dict[Engine, int] = {"fake": 800, "transformers": 48}
# The demo model answers this share of the requests: the fake engine makes the volume.
_REAL_SHARE = 0.1
_QUICK_REQUESTS = 120
_QUICK_SECONDS = 14.0
_MIN_SECONDS = 20.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def _configuration(engine: Engine) -> DeploymentConfig:
    """Two workers of each role, on ports that a restarted router takes again."""
    settings = {"kind": engine, "dtype": "float32", "num_blocks": 2048, "num_threads": 1}
    pool = {"count": 2, "engine": settings}
    router = {"grpc_port": free_port(), "http_port": free_port()}
    return parse({"model": DEMO_MODEL, "router": router, "prefill": pool, "decode": pool})


def _run(engine: Engine, seed: int, num_jobs: int, seconds: float, console: Console) -> dict[str, Any]:
    environment.prepare()
    # Ray reads its environment when it is imported.
    from benchmarks.chaos.clients import Clients
    from benchmarks.chaos.deployment import LinkedDeployment
    from benchmarks.chaos.oracle import FakeOracle
    from benchmarks.chaos.trial import Trial
    from deploy.cluster import Cluster, request_of
    from router.tokenizer import Tokenizer

    config = _configuration(engine)
    model_dir = models.resolve(config.model)
    tokenizer = Tokenizer.load(model_dir)
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    oracle = FakeOracle(tokenizer, vocab_size) if engine == "fake" else None
    requests = [request_of(p.resources) for p in (config.prefill, config.decode) for _ in range(p.count)]

    async def trial(cluster: Cluster) -> dict[str, Any]:
        deployment = LinkedDeployment(cluster, config, console.print)
        addresses = await deployment.start()
        supervision = asyncio.create_task(deployment.supervise())
        clients = Clients(addresses.grpc, addresses.http, config.model_name, tokenizer)
        try:
            run = Trial(
                deployment,
                clients,
                oracle,
                seed=seed,
                num_jobs=num_jobs,
                max_tokens=_MAX_TOKENS[engine],
                seconds=seconds,
            )
            return (await run.run()).to_json()
        finally:
            supervision.cancel()
            await clients.close()
            await deployment.stop()

    # Ray writes of dead workers to the standard output, where the JSON goes.
    with redirect_stdout(sys.stderr), Cluster(requests, show_logs=False) as cluster:
        return asyncio.run(trial(cluster))


def _sum(seed: int, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    injected: Counter[str] = Counter()
    for part in parts.values():
        injected.update(part["injected"])
    total = {
        name: sum(part[name] for part in parts.values())
        for name in ("requests", "recovered", "failed_honestly", "held_after")
    }
    return {
        "seed": seed,
        **total,
        "injected": dict(injected),
        "violations": [f"{name}: {text}" for name, part in parts.items() for text in part["violations"]],
        "seconds_to_full_rate": max(part["seconds_to_full_rate"] for part in parts.values()),
        "by_engine": parts,
    }


@app.command(help=__doc__, epilog=_EXAMPLES)
def main(
    seed: Annotated[int, typer.Option(help="All that is asked and harmed follows from it.")] = 1,
    requests: Annotated[int, typer.Option(min=10, help="Requests in all.")] = 300,
    minutes: Annotated[
        float | None, typer.Option(min=0.2, help="How long; by default what the requests take.")
    ] = None,
    engine: Annotated[
        Engine | None, typer.Option(help="One engine; by default the fake, then the demo model.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute, with the fake engine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Runs it; exit status 1 where anything was violated."""
    console = Console(stderr=True)
    shares: dict[Engine, int] = {}
    if quick:
        shares = {"fake": _QUICK_REQUESTS}
    elif engine is not None:
        shares = {engine: requests}
    else:
        real = max(1, round(_REAL_SHARE * requests))
        shares = {"fake": requests - real, "transformers": real}
    parts: dict[str, dict[str, Any]] = {}
    for name, num in shares.items():
        seconds = max(_MIN_SECONDS, num / _REQUESTS_PER_S[name])
        if minutes is not None:
            seconds = 60 * minutes
        parts[name] = _run(name, seed, num, _QUICK_SECONDS if quick else seconds, console)
    found = _sum(seed, parts)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        Console().print({key: value for key, value in found.items() if key != "by_engine"})
    if found["violations"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
