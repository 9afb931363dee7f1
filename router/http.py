"""The router's HTTP server: the application, and how it runs inside an event loop that is there already."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from http import HTTPStatus

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.config import RouterConfig
from router.errors import RequestError
from router.http_endpoints import Endpoints
from router.http_errors import UnknownPath, error_response, internal_error
from router.service import Service
from router.validation import new_request_id

logger = logging.getLogger(__name__)

# For open responses to end after they were told to. Then their connections are cut.
_STOP_TIMEOUT_S = 1


def build_app(service: Service, config: RouterConfig) -> FastAPI:
    """The application. Open requests end with an error once the event `app.state.stopping` is set."""
    app = FastAPI(title="kvferry", openapi_url=None, redirect_slashes=False)
    app.state.stopping = asyncio.Event()
    endpoints = Endpoints(service, config, app.state.stopping)
    app.add_api_route("/v1/models", endpoints.models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", endpoints.model, methods=["GET"])
    app.add_api_route("/health", endpoints.health, methods=["GET"])
    app.add_api_route("/ready", endpoints.ready, methods=["GET"])
    app.add_api_route("/metrics", endpoints.metrics, methods=["GET"])
    app.add_api_route("/v1/chat/completions", endpoints.chat, methods=["POST"])
    app.add_api_route("/v1/completions", endpoints.completions, methods=["POST"])
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(_RequestIds)
    return app


class HttpServer:
    """One application on one address.

    app: as `router.http.build_app` makes it. port: 0 takes a free one.
    """

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self.app = app
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
        # asyncio sets it only on sockets made with a protocol number. Without it an event waits up to 40 ms
        # for the client's acknowledgement of the one before. Connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self._server.is_up.wait()
        return port

    async def stop(self) -> None:
        """Takes no more connections, ends open responses with an error, and returns within about a second."""
        if self._task is None:
            return
        self.app.state.stopping.set()
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


class _RequestIds:
    """Gives every response its X-Request-Id, and every fault of ours a log entry under that id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = new_request_id()
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                header = (b"x-request-id", state["request_id"].encode())
                message["headers"] = [*message.get("headers", []), header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            logger.debug("request %s: the client left before its body was here", state["request_id"])
        # The client hears of it in OpenAI's shape; the log has the rest.
        except Exception:
            if is_started:
                raise
            logger.exception("request %s failed", state["request_id"])
            await error_response(internal_error(state["request_id"]))(scope, receive, send_with_id)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    path = f"{request.method} {request.url.path}"
    response = error_response(UnknownPath(status, f"{path}: {status.phrase.lower()}"))
    response.headers.update(error.headers or {})
    return response
