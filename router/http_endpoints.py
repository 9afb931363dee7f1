"""What the HTTP server offers: OpenAI's API, health and metrics."""

import asyncio
import time
from http import HTTPStatus

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from kvferry.config import RouterConfig
from router.errors import BodyTooLarge, InvalidRequest, UnknownModel
from router.http_errors import BodyTooSlow
from router.http_generation import StreamedGeneration, WholeGeneration
from router.openai_api import ChatBody, CompletionBody
from router.openai_responses import ChatFormat, CompletionFormat
from router.service import Service

# Longest wait for a body of `max_body_bytes`: what a slow line needs for some MB.
_BODY_TIMEOUT_S = 60


class Endpoints:
    """One method an endpoint. `stopping` ends open responses with an error."""

    def __init__(self, service: Service, config: RouterConfig, stopping: asyncio.Event) -> None:
        self._service = service
        self._max_body_bytes = config.max_body_bytes
        self._stopping = stopping
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._generate(request, ChatBody, ChatFormat)

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions of plain prompts."""
        return await self._generate(request, CompletionBody, CompletionFormat)

    async def _generate(
        self,
        request: Request,
        body_class: type[ChatBody | CompletionBody],
        format_class: type[ChatFormat | CompletionFormat],
    ) -> Response:
        body = body_class.parse(await _read_body(request, self._max_body_bytes))
        try:
            accepted = await self._service.validate(body.spec())
        except InvalidRequest as error:
            raise body.in_clients_words(error) from error
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
        """The one model there is."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, model: str) -> Response:
        """The same, by its name."""
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
        """Whether a request sent now could be served, and why not."""
        reason = self._service.why_not_ready()
        if reason:
            return JSONResponse({"status": "not ready", "reason": reason}, HTTPStatus.SERVICE_UNAVAILABLE)
        return JSONResponse({"status": "ready"})

    async def metrics(self) -> Response:
        """For Prometheus."""
        return Response(self._service.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


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
