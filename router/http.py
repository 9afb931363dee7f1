"""The router's HTTP server: OpenAI's API, health and metrics."""

import asyncio
import logging
import time
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.config import RouterConfig
from router import events
from router.errors import BodyTooLarge, InvalidRequest, RequestError, UnknownModel
from router.http_errors import BodyTooSlow, UnknownPath, error_response, internal_error
from router.http_generation import StreamedGeneration, WholeGeneration
from router.openai_api import ChatBody, CompletionBody
from router.openai_responses import ChatFormat, CompletionFormat
from router.service import Service
from router.validation import new_request_id

logger = logging.getLogger(__name__)

# Longest wait for a body of `max_body_bytes`: what a slow line needs for some MB.
_BODY_TIMEOUT_S = 60
# A longer body is parsed and tokenised in a thread; a shorter one takes a few ms at most.
_SHORT_BODY_BYTES = 2**14


def build_app(service: Service, config: RouterConfig) -> FastAPI:
    """The application. Open requests end with an error once the event `app.state.stopping` is set."""
    app = FastAPI(title="kvferry", openapi_url=None, redirect_slashes=False)
    app.state.stopping = asyncio.Event()
    edge = _Edge(service, config, app.state.stopping)
    app.add_api_route("/v1/models", edge.models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", edge.model, methods=["GET"])
    app.add_api_route("/health", edge.health, methods=["GET"])
    app.add_api_route("/ready", edge.ready, methods=["GET"])
    app.add_api_route("/metrics", edge.metrics, methods=["GET"])
    app.add_api_route("/v1/chat/completions", edge.chat, methods=["POST"])
    app.add_api_route("/v1/completions", edge.completions, methods=["POST"])
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(_RequestIds)
    return app


class _Edge:
    """The endpoints."""

    def __init__(self, service: Service, config: RouterConfig, stopping: asyncio.Event) -> None:
        self._service = service
        self._max_body_bytes = config.max_body_bytes
        self._stopping = stopping
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatBody, ChatFormat)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionBody, CompletionFormat)

    async def _generate(
        self,
        request: Request,
        body_class: type[ChatBody | CompletionBody],
        format_class: type[ChatFormat | CompletionFormat],
    ) -> Response:
        data = await _read_body(request, self._max_body_bytes)

        def accept() -> tuple[ChatBody | CompletionBody, events.Request]:
            body = body_class.parse(data)
            try:
                return body, self._service.validate(body.spec())
            except InvalidRequest as error:
                raise body.in_clients_words(error) from error

        body, accepted = await asyncio.to_thread(accept) if len(data) > _SHORT_BODY_BYTES else accept()
        request.state.request_id = accepted.request_id
        response_format = format_class(
            accepted.request_id,
            self._service.model_name,
            int(time.time()),
            self._service.tokenizer,
            body.include_usage,
        )
        if body.stream:
            return StreamedGeneration(
                self._service, accepted, response_format, self._stopping, body.include_usage
            )
        return WholeGeneration(self._service, accepted, response_format, self._stopping)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, model: str) -> Response:
        name = self._service.model_name
        if model != name:
            raise UnknownModel("model", f"{model!r} is not served here; {name!r} is")
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvferry",
        }

    async def health(self) -> Response:
        """The process is up; whether it can serve is `ready`'s matter."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        reason = self._service.why_not_ready()
        if reason:
            return JSONResponse({"status": "not ready", "reason": reason}, HTTPStatus.SERVICE_UNAVAILABLE)
        return JSONResponse({"status": "ready"})

    async def metrics(self) -> Response:
        return Response(self._service.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


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
        # The client hears of it in OpenAI's shape; the log has the rest.
        except Exception:
            if is_started:
                raise
            logger.exception("request %s failed", state["request_id"])
            await error_response(internal_error(state["request_id"]))(scope, receive, send_with_id)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The body; what is too long is refused by its header already, else as soon as it shows."""
    too_large = BodyTooLarge(f"the body has more than {max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not arrive within {_BODY_TIMEOUT_S} s") from error
    return bytes(body)


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
