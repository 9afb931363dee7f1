"""The Ray cluster that a deployment runs on: joined where `RAY_ADDRESS` says so, else started here."""

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import psutil
import ray

from deploy.environment import on_a_cluster
from deploy.signals import held
from kvferry.config import Resources

# Nothing of ours goes through Ray's object store; this is about the least that Ray takes.
_OBJECT_STORE_BYTES = 100 * 2**20
_MAX_KILL_ROUNDS = 5
_KILL_TIMEOUT_S = 1.0
_MARK = "KVFERRY_CLUSTER_FOLDER"
# Resources that Ray adds by itself and nobody asks for.
_OWN_RESOURCES = ("node:", "memory", "object_store_memory", "accelerator_type:", "bundle")


class ClusterUnavailable(Exception):
    """Ray could not be started or joined."""


def request_of(resources: Resources) -> dict[str, float]:
    """A worker's resources by Ray's names, without those that are zero."""
    named = {"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom}
    return {name: amount for name, amount in named.items() if amount > 0}


def describe(resources: Mapping[str, float]) -> str:
    """Such as "CPU 4, GPU 1, prefill_node 1"."""
    shown = {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith(_OWN_RESOURCES) and "_group_" not in name
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in shown.items()) or "nothing"


class Cluster:
    """A connection to Ray. On leaving it, a cluster that was started here is gone, and its files too."""

    def __init__(self, requests: Sequence[Mapping[str, float]], *, show_logs: bool = True) -> None:
        """requests: what the deployment will ask for; a cluster started here has CPUs for all of it.
        show_logs: whether what the actors log is shown here too."""
        self._show_logs = show_logs
        self.is_local = not on_a_cluster()
        # Ray starts a process for each CPU in advance: as many as there are workers, and the router's.
        self._num_cpus = math.ceil(sum(request.get("CPU", 0) for request in requests)) + 1
        self._folder: str | None = None

    def __enter__(self) -> Self:
        try:
            if self.is_local:
                self._start()
            else:
                ray.init(address="auto", log_to_driver=self._show_logs, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            self._close()
            where = "a local Ray cluster" if self.is_local else f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
            raise ClusterUnavailable(f"cannot use {where}: {error}") from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def nodes(self) -> dict[str, Mapping[str, float]]:
        """What each living node has in all, by its address."""
        return {
            f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}": node["Resources"]
            for node in ray.nodes()
            if node["Alive"]
        }

    def can_hold(self, request: Mapping[str, float]) -> bool:
        """Whether some node has enough for a request, were it idle."""
        return any(
            all(node.get(name, 0) >= amount for name, amount in request.items())
            for node in self.nodes().values()
        )

    def describe_nodes(self) -> str:
        """What the nodes have and what of it is free."""
        nodes = "; ".join(f"{address} has {describe(has)}" for address, has in self.nodes().items())
        free = ray.available_resources()
        return f"{nodes}; free in all: {describe(free)}"

    def _start(self) -> None:
        # A folder of its own, with a short name: sockets lie in it, whose paths are limited.
        self._folder = tempfile.mkdtemp(prefix="kvferry-", dir="/tmp")
        # All that Ray starts now, and what that starts, inherits this and can be told by it.
        os.environ[_MARK] = self._folder
        try:
            ray.init(
                address="local",
                num_cpus=self._num_cpus,
                include_dashboard=False,
                log_to_driver=self._show_logs,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                _temp_dir=self._folder,
            )
        finally:
            del os.environ[_MARK]

    def _close(self) -> None:
        with held():
            ray.shutdown()
            if self._folder:
                # Ray forgets its agents, and what it was starting when a signal broke that off.
                # Some may be starting others while they are being killed, so once is not enough.
                for _ in range(_MAX_KILL_ROUNDS):
                    if not (processes := _marked(self._folder)):
                        break
                    for process in processes:
                        with suppress(psutil.NoSuchProcess):
                            process.kill()
                    psutil.wait_procs(processes, timeout=_KILL_TIMEOUT_S)
                shutil.rmtree(self._folder, ignore_errors=True)


def _marked(folder: str) -> list[Any]:
    """The living processes of the cluster in a folder."""
    found = []
    for process in psutil.process_iter():
        # Other people's processes do not tell, and dead ones have nothing to tell.
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == folder:
                found.append(process)
    return found
