"""The router as a Ray actor."""

import ray

from kvferry import models
from kvferry.config import DeploymentConfig
from router.http import HttpServer, build_app
from router.router import Router
from router.server import build_server
from rpc.logs import log_to_stderr

STOP_GRACE_S = 0.5


class RouterActor:
    """Serves gRPC and HTTP. `start` is called once in each incarnation."""

    def __init__(self, config: DeploymentConfig) -> None:
        log_to_stderr()
        self._config = config
        self._addresses: tuple[str, str] | None = None

    async def start(self) -> tuple[str, str]:
        """Serves; returns the gRPC and the HTTP address. Raises what keeps it from serving."""
        settings = self._config.router
        host = ray.util.get_node_ip_address() if settings.host == "auto" else settings.host
        self._router = Router(settings, models.resolve(self._config.model), self._config.model_name)
        self._grpc = build_server(self._router, settings.max_body_bytes)
        grpc_port = await self._grpc.start(host, settings.grpc_port)
        self._http = HttpServer(build_app(self._router, settings), host, settings.http_port)
        http_port = await self._http.start()
        self._addresses = f"{host}:{grpc_port}", f"{host}:{http_port}"
        return self._addresses

    async def address(self) -> tuple[str, str] | None:
        """Where it serves; None before `start`, so also after Ray has restarted it."""
        return self._addresses

    async def why_not_ready(self) -> str:
        """Empty when it can take a request now, else the reason."""
        return self._router.why_not_ready()

    async def stop(self) -> None:
        """Ends all requests and both servers."""
        await self._http.stop()
        await self._grpc.stop(STOP_GRACE_S)
        await self._router.close()
