"""The routers under comparison, each with one prefill and one decode worker that answer at once."""

import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path

from benchmarks.peers.environment import Environment, Say
from benchmarks.peers.process import ServerProcess, free_port
from benchmarks.routers.kvferry_process import HOST, MODEL_NAME

VLLM_ROUTER = "vllm-router==0.1.17"
SMG = "smg==1.13.0"
_START_TIMEOUT_S = 60.0
# Where SGLang's prefill servers meet; nobody listens there.
_BOOTSTRAP_PORT = "9000"


class RouterSystem(ABC):
    """One router. After `start`: `url`, and `router`, the process whose CPU time counts."""

    name: str
    model = MODEL_NAME
    requirement = ""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.url = ""
        self.grpc_address = ""
        self.router: ServerProcess
        self._processes: list[ServerProcess] = []
        self._logs = tempfile.TemporaryDirectory(prefix="kvferry-router-")

    @property
    def environment(self) -> Environment | None:
        """Where it is installed; None where it needs nothing."""
        return Environment(self.name) if self.requirement else None

    def why_not(self) -> str:
        """Why it cannot be started; empty when it can."""
        if self.environment is None or self.environment.is_complete:
            return ""
        return f"not set up: run `python -m benchmarks.router --setup {self.name}`"

    def set_up(self, say: Say) -> None:
        """Installs it. Raises `SetupFailed`."""
        if (environment := self.environment) is not None:
            say(f"{self.name}: installing {self.requirement}")
            environment.create()
            environment.pip("install", self.requirement)
            environment.finish()

    @abstractmethod
    async def start(self) -> None:
        """Starts workers and router, and waits until it is ready. Raises `ServerFailed`."""

    def stop(self) -> None:
        """Ends all of it."""
        for process in reversed(self._processes):
            process.stop()
        self._processes.clear()
        self._logs.cleanup()

    def _run(self, name: str, command: list[str]) -> ServerProcess:
        process = ServerProcess(command, Path(self._logs.name) / f"{name}.log")
        self._processes.append(process)
        return process

    def _run_module(self, name: str, module: str, *arguments: object) -> ServerProcess:
        return self._run(name, [sys.executable, "-m", f"benchmarks.routers.{module}", *map(str, arguments)])


class KvferryRouter(RouterSystem):
    """kvferry's, with real workers over the fake engine: they take blocks and leases as ever."""

    name = "kvferry"

    async def start(self) -> None:
        """See `RouterSystem`."""
        grpc_port, http_port = free_port(), free_port()
        arguments = ("router", self.model_dir, grpc_port, http_port)
        self.router = self._run_module("router", "kvferry_process", *arguments)
        workers = self._run_module("workers", "kvferry_process", "workers", self.model_dir, grpc_port)
        self.url = f"http://{HOST}:{http_port}/v1"
        self.grpc_address = f"{HOST}:{grpc_port}"
        await self.router.until_ready(self.url, "/ready", _START_TIMEOUT_S)
        workers.check()


class _OverHttp(RouterSystem):
    """A router of others in front of `mock_worker`."""

    async def start(self) -> None:
        """See `RouterSystem`."""
        prefill, decode, port = free_port(), free_port(), free_port()
        workers = self._run_module("workers", "mock_worker", prefill, decode)
        for worker_port in (prefill, decode):
            await workers.until_ready(f"http://{HOST}:{worker_port}", "/health", _START_TIMEOUT_S)
        command = self.command(f"http://{HOST}:{prefill}", f"http://{HOST}:{decode}")
        listen = ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port())]
        self.router = self._run("router", [*command, *listen])
        self.url = f"http://{HOST}:{port}/v1"
        await self.router.until_ready(self.url, "/health", _START_TIMEOUT_S)

    @abstractmethod
    def command(self, prefill: str, decode: str) -> list[str]:
        """Its command line but for where it listens."""

    def _program(self, name: str) -> str:
        return Environment(self.name).program(name)


class VllmRouter(_OverHttp):
    """`vllm-router`: prefill first, then decode with what prefill returned."""

    name = "vllm-router"
    requirement = VLLM_ROUTER

    def command(self, prefill: str, decode: str) -> list[str]:
        """See `_OverHttp`."""
        command = [self._program("vllm-router"), "--vllm-pd-disaggregation", "--policy", "round_robin"]
        return [*command, "--prefill", prefill, "--decode", decode, "--log-level", "warning"]


class Smg(_OverHttp):
    """`smg`: both at once, as SGLang's workers want it."""

    name = "smg"
    requirement = SMG

    def command(self, prefill: str, decode: str) -> list[str]:
        """See `_OverHttp`."""
        command = [self._program("smg"), "launch", "--pd-disaggregation", "--policy", "round_robin"]
        command += ["--prefill", prefill, _BOOTSTRAP_PORT, "--decode", decode]
        return [*command, "--log-level", "warn"]


class MocksAlone(RouterSystem):
    """No router: what the decode worker and the load generator reach between them."""

    name = "no router"

    async def start(self) -> None:
        """See `RouterSystem`."""
        prefill, decode = free_port(), free_port()
        self.router = self._run_module("workers", "mock_worker", prefill, decode)
        self.url = f"http://{HOST}:{decode}/v1"
        await self.router.until_ready(self.url, "/health", _START_TIMEOUT_S)


SYSTEMS: dict[str, type[RouterSystem]] = {
    system.name: system for system in (KvferryRouter, VllmRouter, Smg, MocksAlone)
}
