"""What every worker is on the network: a loop, a server, an epoch, and a membership in its routers."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import grpc

from engine.heap import keep_freed_memory
from kvferry.v1 import admin_pb2, admin_pb2_grpc, registry_pb2
from rpc.membership import Membership
from rpc.server import GrpcServer

# Calls that still run when a worker stops get so long to end; the router is told at once.
STOP_GRACE_S = 0.5


def new_epoch() -> int:
    """Names one incarnation of a worker: 63 random bits, never 0."""
    return secrets.randbits(63) | 1


class WorkerHost:
    """Runs a worker's loop, serves its calls and keeps it joined to its routers."""

    def __init__(
        self,
        registration: registry_pb2.Registration,
        server: GrpcServer,
        run: Callable[[], Coroutine[Any, Any, None]],
        load: Callable[[str], registry_pb2.LoadReport],
        audit: Callable[[], admin_pb2.AuditResponse],
        take_step: Callable[[str], registry_pb2.StepUpdate | None],
        on_resend: Callable[[str], None],
        on_router_lost: Callable[[str], None],
    ) -> None:
        """`registration` lacks only the address; `run` is the loop. The other arguments: see `Membership`."""
        self._registration = registration
        self._server = server
        self._run = run
        self._running: asyncio.Task[None] | None = None
        self.membership = Membership(registration, load, take_step, on_resend, on_router_lost)
        servicer = _WorkerServicer(audit)
        server.add("kvferry.v1.WorkerService", servicer, admin_pb2_grpc.add_WorkerServiceServicer_to_server)

    async def start(self, host: str, routers: Iterable[str]) -> str:
        """Works, serves on a free port of `host` and joins the routers; returns the address."""
        keep_freed_memory()
        self._running = asyncio.create_task(self._run())
        port = await self._server.start(host, 0)
        self._registration.address = f"{host}:{port}"
        self.membership.set_routers(routers)
        return self._registration.address

    def publish(self, address: str) -> None:
        """Peers reach the worker at this address, once it joins a router anew."""
        self._registration.address = address

    async def wait(self) -> None:
        """Returns when the worker was stopped; raises what ended its loop otherwise."""
        assert self._running is not None
        await asyncio.wait([self._running])
        if not self._running.cancelled():
            self._running.result()

    async def stop(self) -> None:
        """Leaves the routers, ends all calls, and the loop."""
        await self.membership.stop()
        await self._server.stop(STOP_GRACE_S)
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])


class _WorkerServicer(admin_pb2_grpc.WorkerServiceServicer):
    def __init__(self, audit: Callable[[], admin_pb2.AuditResponse]) -> None:
        self._audit = audit

    async def Audit(  # noqa: N802
        self, request: admin_pb2.AuditRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.AuditResponse:
        return self._audit()
