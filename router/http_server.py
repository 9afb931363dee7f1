"""Runs an HTTP application inside an event loop that is there already."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

# For open responses to end after they were told to. Then their connections are cut.
_STOP_TIMEOUT_S = 1


class HttpServer:
    """One application on one address.

    app: as `router.http.build_app` makes it. port: 0 takes a free one.
    """

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self._app = app
        self._address = (host, port)
        self._server = _Server(
            uvicorn.Config(
                app,
                # The process that hosts the server sets up logging.
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Serves from now on; returns the port. Raises `OSError` when the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listener = socket.create_server(self._address, family=family)
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self._server.is_up.wait()
        return port

    async def stop(self) -> None:
        """Takes no more connections, ends open responses with an error, and returns within about a second."""
        if self._task is None:
            return
        self._app.state.stopping.set()
        self._server.should_exit = True
        await self._task
        self._task = None


class _Server(uvicorn.Server):
    """uvicorn's server, but signals stay with the process that hosts it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
