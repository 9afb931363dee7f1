"""A gRPC server as all of ours are: health, reflection, statuses, bounded messages."""

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection

from rpc.channel import DEFAULT_MAX_MESSAGE_BYTES, options
from rpc.errors import StatusInterceptor

# A call beyond this many waits for another to end; with streams open for whole requests it bounds memory.
MAX_CONCURRENT_CALLS = 8192


class GrpcServer:
    """Collects servicers, then serves them on one port until stopped."""

    def __init__(self, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        self._server = grpc.aio.server(
            interceptors=[StatusInterceptor()],
            options=[*options(max_message_bytes), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
        )
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = []

    def add(self, name: str, servicer: Any, register: Callable[[Any, grpc.aio.Server], None]) -> None:
        """Adds a service by its full name, such as kvferry.v1.DecodeService."""
        register(servicer, self._server)
        self._names.append(name)

    async def start(self, host: str, port: int) -> int:
        """Starts to serve; returns the port, which the system chooses where `port` is 0."""
        names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        bound = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        await self.set_serving(True)
        return bound

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers, for the server as a whole and for each service."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ["", *self._names]:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives running ones `grace_s` seconds, then ends them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
