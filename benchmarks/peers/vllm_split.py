"""vLLM split in two: a prefill and a decode server of one core each, NIXL between them, a router in front.

On a CPU it ships with two faults: the connector pins both engines' main threads to the last core, and
NIXL's progress thread spins. `VllmSplit` mends both from outside; `VllmSplitAsShipped` does not.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.peers.environment import Environment, Say
from benchmarks.peers.peer import HOST, Peer
from benchmarks.peers.process import ServerProcess, free_port
from benchmarks.peers.vllm import START_TIMEOUT_S, install_vllm, serve

NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
ROUTER = "vllm-router==0.1.17"
_ROLES = {"kv_producer": "0", "kv_consumer": "1"}
_LOWEST_PRIORITY = 19
# A thread that takes more of a core than this while the server is idle spins; it may have to share the core.
_SPINNING_SHARE = 0.15
_IDLE_LOOK_S = 2.0


class VllmSplitAsShipped(Peer):
    """As the packages have it."""

    name = "vllm-split-as-shipped"
    starts_slowly = True

    @property
    def environment(self) -> Environment:
        """See `Peer`."""
        return Environment("vllm-split")

    def set_up(self, say: Say) -> None:
        """See `Peer`."""
        environment = self.environment
        environment.create()
        install_vllm(environment, say)
        say("vllm-split: installing nixl and the router")
        environment.pip("install", "--no-deps", *NIXL)
        environment.pip("install", ROUTER)
        environment.finish()

    async def start(self) -> None:
        """See `Peer`."""
        ports = {role: free_port() for role in _ROLES}
        for role, core in _ROLES.items():
            transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
            process = serve(
                self.environment,
                self._model_dir,
                ports[role],
                cores=core,
                arguments=["--kv-transfer-config", json.dumps(transfer)],
                variables={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
            )
            self._processes.append(process)
        for process, port in zip(self._processes, ports.values(), strict=True):
            await process.until_ready(f"http://{HOST}:{port}", "/health", START_TIMEOUT_S)
        self.mend(self._processes)
        await self._start_router(*(f"http://{HOST}:{port}" for port in ports.values()))

    async def _start_router(self, prefill: str, decode: str) -> None:
        port = free_port()
        command = [self.environment.program("vllm-router"), "--vllm-pd-disaggregation"]
        command += ["--prefill", prefill, "--decode", decode, "--policy", "round_robin"]
        command += ["--kv-connector", "nixl", "--host", HOST, "--port", str(port)]
        command += ["--prometheus-port", str(free_port())]
        router = ServerProcess(command, self.environment.path("router.log"))
        self._processes.append(router)
        self.url = f"http://{HOST}:{port}/v1"
        await router.until_ready(f"http://{HOST}:{port}", "/health", START_TIMEOUT_S)

    def mend(self, servers: list[ServerProcess]) -> None:
        """What is done to the two servers once they are up: nothing here."""


class VllmSplit(VllmSplitAsShipped):
    """Each server on its own core, spinning threads at the lowest priority."""

    name = "vllm-split"

    def mend(self, servers: list[ServerProcess]) -> None:
        """See `VllmSplitAsShipped`."""
        for server, core in zip(servers, _ROLES.values(), strict=True):
            threads = _threads(server)
            for thread in threads:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, {int(core)})
            before = {thread: _cpu_s(thread) for thread in threads}
            time.sleep(_IDLE_LOOK_S)
            for thread in threads:
                if _cpu_s(thread) - before[thread] > _SPINNING_SHARE * _IDLE_LOOK_S:
                    with suppress(ProcessLookupError):
                        os.setpriority(os.PRIO_PROCESS, thread, _LOWEST_PRIORITY)


def _threads(server: ServerProcess) -> list[int]:
    return [int(path.name) for pid in server.pids() for path in Path(f"/proc/{pid}/task").iterdir()]


def _cpu_s(thread: int) -> float:
    """CPU seconds of a thread; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
