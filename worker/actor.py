"""A worker as a Ray actor."""

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

import ray

from engine.engine import Engine
from engine.loading import default_num_threads, load_engine
from kvferry import models
from kvferry.config import DeploymentConfig
from rpc.logs import log_to_stderr

logger = logging.getLogger(__name__)


class Worker(Protocol):
    """What a prefill and a decode worker offer to who hosts them."""

    async def start(self, host: str, routers: Sequence[str]) -> str:
        """Works, serves on a free port of `host` and joins the routers; returns the address."""
        ...

    def set_routers(self, routers: Sequence[str]) -> None:
        """Joins exactly these routers."""
        ...

    def publish(self, address: str) -> None:
        """Peers reach the worker at this address, such as a proxy's, once it joins a router anew."""
        ...

    async def wait(self) -> None:
        """Returns when the worker was stopped; raises what ended its loop otherwise."""
        ...

    async def stop(self) -> None:
        """Leaves the routers, ends all calls, lets the running step end."""
        ...


class WorkerActor(ABC):
    """Hosts one worker. `start` is called once in each incarnation."""

    role: ClassVar[Literal["prefill", "decode"]]

    def __init__(self, config: DeploymentConfig, worker_id: str) -> None:
        log_to_stderr()
        self._config = config
        self._worker_id = worker_id
        self._address: str | None = None

    @abstractmethod
    def make(self, config: DeploymentConfig, engine: Engine, worker_id: str) -> Worker:
        """The worker of this role."""

    async def start(self) -> str:
        """Loads the model and serves; returns the address. Raises what keeps it from serving."""
        pool = self._config.prefill if self.role == "prefill" else self._config.decode
        settings = pool.engine.with_threads(default_num_threads(pool.resources.num_cpus))
        model_dir = models.resolve(self._config.model)
        engine = await asyncio.to_thread(load_engine, settings, model_dir, self.role)
        self._worker = self.make(self._config, engine, self._worker_id)
        host = ray.util.get_node_ip_address() if pool.host == "auto" else pool.host
        self._address = await self._worker.start(host, [])
        self._watch = asyncio.create_task(self._end_with_the_loop())
        return self._address

    async def address(self) -> str | None:
        """Where it serves; None before `start`, so also after Ray has restarted it."""
        return self._address

    async def set_routers(self, routers: Sequence[str]) -> None:
        """Joins exactly these routers."""
        self._worker.set_routers(routers)

    async def publish(self, address: str) -> None:
        """Peers reach the worker at this address, such as a proxy's, once it joins a router anew."""
        self._worker.publish(address)

    async def stop(self) -> None:
        """Leaves the routers and ends all requests."""
        await self._worker.stop()

    async def _end_with_the_loop(self) -> None:
        try:
            await self._worker.wait()
        except Exception:
            # A worker without its loop would look alive and serve nobody; Ray starts another.
            logger.critical("the loop of %s has failed; the process ends", self._worker_id, exc_info=True)
            logging.shutdown()
            os._exit(1)
