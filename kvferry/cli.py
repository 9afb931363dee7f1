"""The `kvferry` command."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

# Everything else is imported where it is needed, so that --help comes at once.
if TYPE_CHECKING:
    from deploy.deployment import Addresses
    from kvferry.results import Prompt

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEMO_PROMPT = "What is the capital of France?"

app = typer.Typer(
    help="Large language models served by separate prefill and decode pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Fetches models.", no_args_is_help=True, epilog="Example:  kvferry model pull")
app.add_typer(model_app, name="model")

_Address = Annotated[
    str, typer.Option(envvar="KVFERRY_ADDRESS", help="host:port of the router's gRPC server.")
]

_Addresses = Annotated[
    list[str],
    typer.Option(envvar="KVFERRY_ADDRESS", help="host:port of a router's gRPC server; may be repeated."),
]


@app.callback()
def _end_cleanly() -> None:
    # As Ctrl-C would, so that what runs is cleaned up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@app.command(epilog="Example:  kvferry serve --model ./my-model --prefill 2 --decode 1")
def serve(
    config: Annotated[Path | None, typer.Argument(help="A deployment in YAML.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="The demo model's name, a directory or a hub id.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode workers.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="0 takes a free port.")] = None,
    http_port: Annotated[int | None, typer.Option(help="0 takes a free port.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32.")] = None,
) -> None:
    """Serve a model until Ctrl-C. Options go before what the file says.

    Joins the Ray cluster that RAY_ADDRESS names; without it, runs on this machine alone.
    """
    from deploy import launch
    from kvferry import config as settings

    overrides = {
        ("model",): model,
        ("prefill", "count"): prefill,
        ("decode", "count"): decode,
        ("router", "grpc_port"): grpc_port,
        ("router", "http_port"): http_port,
        ("prefill", "engine", "dtype"): dtype,
        ("decode", "engine", "dtype"): dtype,
    }
    with _errors():
        values = settings.load(config).model_dump(exclude_unset=True) if config else {}
        for path, value in overrides.items():
            if value is not None:
                _put(values, path, value)
        launch.run(settings.parse(values, source="options"), launch.say_with_time())


@app.command(epilog='Example:  kvferry generate "What is the capital of France?" --max-tokens 32 --moments')
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    address: _Address = DEFAULT_ADDRESS,
    stream: Annotated[bool, typer.Option(help="Show tokens as they come, or the whole at the end.")] = True,
    max_tokens: Annotated[int | None, typer.Option(help="The most tokens to generate.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes the output repeatable.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to go before the prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, not a chat.")
    ] = False,
    moments: Annotated[bool, typer.Option("--moments", help="Show what happened when and where.")] = False,
) -> None:
    """Generate text with a running deployment."""
    from pydantic import ValidationError

    from kvferry.client import ChatMessage, Client, SamplingParams

    if raw and system is not None:
        _fail("--system is part of a chat: leave out --raw", status=2)
    given: Prompt = prompt
    if not raw:
        given = [ChatMessage("system", system)] if system is not None else []
        given.append(ChatMessage("user", prompt))
    try:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    except ValidationError as error:
        _fail("; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors()), status=2)
    with _errors(), Client(address) as client, client.generate(given, sampling) as generation:
        for delta in generation:
            if stream:
                _write(delta.text)
        _write("\n" if stream else generation.result.text + "\n")
        if moments:
            _show_moments(generation.result.moments)


@app.command(epilog="Example:  kvferry status --address 127.0.0.1:50051")
def status(address: _Address = DEFAULT_ADDRESS) -> None:
    """Show the pools of a running deployment: each worker's state, load and blocks."""
    from rich.console import Console

    from kvferry.client import Client
    from kvferry.tables import pools_table

    with _errors(), Client(address) as client:
        Console().print(pools_table(client.list_workers()))


@app.command(epilog="Example:  kvferry audit --address 127.0.0.1:50051 --json")
def audit(
    address: _Addresses = [DEFAULT_ADDRESS],  # noqa: B006 - typer's way to give a default
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what is held on every worker and router, by whom and since when, and check it.

    Exits with 1 and names the culprits where anything is held by no live request for longer than a second.
    With several routers over the same workers, name each: what belongs to others is shown, not checked.
    """
    from contextlib import ExitStack
    from dataclasses import asdict

    from rich.console import Console

    from kvferry.audit import SETTLE_S, settled
    from kvferry.client import Client
    from kvferry.tables import audit_table

    with _errors(), ExitStack() as stack:
        clients = [stack.enter_context(Client(one)) for one in address]
        audits, culprits = settled(lambda: [client.audit() for client in clients], SETTLE_S)
    if as_json:
        found = {"routers": [asdict(a) for a in audits], "culprits": [asdict(c) for c in culprits]}
        _write(json.dumps(found, indent=2) + "\n")
    else:
        Console().print(audit_table(audits))
    for culprit in culprits:
        name = f" {culprit.name}:" if culprit.name else ""
        sys.stderr.write(f"kvferry: {culprit.where}:{name} {culprit.what}\n")
    if culprits:
        raise typer.Exit(1)
    if not as_json:
        _write("Nothing is held but by live requests.\n")


@app.command(epilog="Example:  kvferry simulate deployment.yaml --costs costs.json --rate 4 --requests 1000")
def simulate(
    config: Annotated[Path, typer.Argument(help="A deployment in YAML, with the sizes of the KV caches.")],
    costs: Annotated[
        Path, typer.Option(help="What workers cost: cost models, or a published profile (JSON).")
    ],
    trace: Annotated[
        Path | None, typer.Option(help=".jsonl as Mooncake's, or .csv: arrival,prompt,output.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Without a trace: how many are drawn.")] = 1000,
    prompt: Annotated[int, typer.Option(min=1, help="Without a trace: mean tokens of a prompt.")] = 512,
    output: Annotated[int, typer.Option(min=1, help="Without a trace: mean tokens of an output.")] = 128,
    rate: Annotated[
        float | None, typer.Option(min=1e-9, help="Requests a second; by default the trace's, else 1.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode workers.")] = None,
    ttft: Annotated[float, typer.Option(help="Target of the time to the first token, in seconds.")] = 1.0,
    tpot: Annotated[float, typer.Option(help="Target of the time a token after it, in seconds.")] = 0.1,
    profile: Annotated[
        str | None, typer.Option(help="The model's name where --costs is a profile as DistServe's.")
    ] = None,
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel degree in the profile.")] = 1,
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel degree in the profile.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run a load through a deployment in simulated time: its latencies, goodput, use and waits.

    Schedulers, placement and queues are the ones that serve; steps and transfers take what --costs says.
    """
    from rich.console import Console

    from kvferry import config as settings
    from kvferry.progress import ProgressBar
    from simulator import costs as cost_files
    from simulator import report, traces
    from simulator.simulation import Simulation

    with _errors():
        values = settings.load(config).model_dump(exclude_unset=True)
        for path, value in {("prefill", "count"): prefill, ("decode", "count"): decode}.items():
            if value is not None:
                _put(values, path, value)
        known = cost_files.load(costs, profile, prefill_tp, decode_tp)
        if trace is None:
            load = list(traces.poisson(rate or 1.0, requests, prompt, output))
        else:
            load = traces.at_rate(traces.load(trace), rate) if rate else traces.load(trace)
        with ProgressBar(Console(stderr=True)) as progress:
            simulation = Simulation(settings.parse(values, source="options"), known, progress=progress)
            result = report.summary(simulation.run(load), ttft, tpot)
    if as_json:
        _write(json.dumps(result, indent=2) + "\n")
    else:
        Console().print(report.table(result))


@app.command(epilog="Example:  kvferry plan deployment.yaml --costs costs.json --max-devices 4 --ttft 0.5")
def plan(
    config: Annotated[Path, typer.Argument(help="A deployment in YAML, with the sizes of the KV caches.")],
    costs: Annotated[Path, typer.Option(help="As in `kvferry simulate`.")],
    max_devices: Annotated[int, typer.Option(min=2, help="Devices of both pools together, at most.")] = 4,
    trace: Annotated[Path | None, typer.Option(help="As in `kvferry simulate`; its rate is varied.")] = None,
    requests: Annotated[int, typer.Option(min=2, help="Without a trace: how many are drawn.")] = 1000,
    prompt: Annotated[int, typer.Option(min=1, help="Without a trace: mean tokens of a prompt.")] = 512,
    output: Annotated[int, typer.Option(min=1, help="Without a trace: mean tokens of an output.")] = 128,
    ttft: Annotated[float, typer.Option(help="Target of the time to the first token, in seconds.")] = 1.0,
    tpot: Annotated[float, typer.Option(help="Target of the time a token after it, in seconds.")] = 0.1,
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Of the requests that must meet both.")
    ] = 0.9,
    tp: Annotated[list[int], typer.Option(help="Tensor-parallel degrees to try; may be repeated.")] = [1],  # noqa: B006 - typer's way to give a default
    chunk: Annotated[list[int], typer.Option(help="Prefill chunks to try; may be repeated.")] = [],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="Decode batches to try; may be repeated.")] = [],  # noqa: B006
    profile: Annotated[str | None, typer.Option(help="As in `kvferry simulate`; --tp is of it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Search the pools with the highest rate for each device at which a share of requests meets its targets.

    Each candidate's rate is found by bisection over simulations of the load. Prints the best candidate for
    each number of devices. The sizes of the caches are the file's at every degree.
    """
    from dataclasses import asdict

    from rich.console import Console

    from kvferry import config as settings
    from kvferry.progress import ProgressBar
    from simulator import costs as cost_files
    from simulator import plan as planning
    from simulator import traces

    candidates = list(planning.settings(max_devices, tp, chunk or [None], batch or [None]))
    if not candidates:
        _fail(f"--max-devices: {max_devices} hold no prefill and decode worker of TP {min(tp)}", status=2)
    with _errors():
        deployment = settings.load(config)
        drawn = list(traces.poisson(1.0, requests, prompt, output)) if trace is None else traces.load(trace)
        with ProgressBar(Console(stderr=True)) as progress:
            planned = planning.plan(
                deployment,
                lambda prefill_tp, decode_tp: cost_files.load(costs, profile, prefill_tp, decode_tp),
                drawn,
                planning.Targets(ttft, tpot, share),
                candidates,
                progress,
            )
    points = planning.frontier(planned)
    if as_json:
        rows = {
            name: [
                {**asdict(p.setting), "num_devices": p.setting.num_devices, "rate": p.rate} for p in listed
            ]
            for name, listed in (("frontier", points), ("all", planned))
        }
        _write(json.dumps(rows, indent=2) + "\n")
    else:
        Console().print(planning.table(points))


@model_app.command(epilog="Example:  KVFERRY_CACHE=/data/kvferry kvferry model pull")
def pull() -> None:
    """Fetch the demo model (SmolLM2-135M-Instruct, 93 MB) and convert it, once."""
    with _errors():
        sys.stdout.write(f"{_pull_demo_model()}\n")


@app.command(epilog="Example:  kvferry demo")
def demo() -> None:
    """Bring a prefill and a decode worker up on this machine, ask one question, and end them."""
    from deploy import launch
    from kvferry import config as settings

    with _errors():
        _pull_demo_model()
        # Free ports, so that it runs beside a deployment.
        config = settings.parse({"router": {"grpc_port": 0, "http_port": 0}})
        if not launch.run(config, launch.say_with_time(), _ask_demo_question, show_logs=False):
            raise typer.Exit(128 + signal.SIGINT)


async def _ask_demo_question(addresses: "Addresses") -> None:
    from kvferry.client import AsyncClient, ChatMessage, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=64)
    _write(f"\n> {DEMO_PROMPT}\n")
    async with (
        AsyncClient(addresses.grpc) as client,
        client.generate([ChatMessage("user", DEMO_PROMPT)], sampling) as generation,
    ):
        async for delta in generation:
            _write(delta.text)
    _write("\n\n")
    _show_moments(generation.result.moments)


def _pull_demo_model() -> Path:
    from rich.console import Console

    from engine import demo_model
    from kvferry import models
    from kvferry.progress import ProgressBar

    target = models.demo_model_dir()
    with ProgressBar(Console(stderr=True)) as progress:
        demo_model.pull(target, progress)
    return target


def _show_moments(moments: Any) -> None:
    from rich.console import Console

    from kvferry.tables import moments_table

    Console().print(moments_table(moments))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _put(values: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
    values[path[-1]] = value


@contextmanager
def _errors() -> Iterator[None]:
    """Shows what can go wrong for a user's reasons as one line; all else is a bug and keeps its traceback."""
    from deploy.launch import LaunchFailed
    from engine.demo_model import PullFailed
    from kvferry.config import ConfigError
    from kvferry.errors import KvferryError
    from kvferry.models import ModelNotFound
    from simulator.costs import CostsError
    from simulator.traces import TraceError

    try:
        yield
    except (ConfigError, CostsError, TraceError) as error:
        _fail(str(error), status=2)
    except (KvferryError, LaunchFailed, ModelNotFound, PullFailed) as error:
        _fail(str(error), status=1)


def _fail(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"kvferry: {message}\n")
    raise typer.Exit(status)
