"""One generation as an HTTP response: in one piece, or as a stream of server-sent events.

One task reads the service and writes to the client from beginning to end; two others wait beside it, for
the client to leave and for the server to stop. Whoever is first cancels it, and the request with it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from router.errors import RequestError, Unavailable
from router.events import Delta, Finished, Request
from router.http_errors import error_body, error_response, internal_error
from router.openai_responses import ResponseFormat, event
from router.service import Service

logger = logging.getLogger(__name__)

# A client that takes nothing for so long is given up: its output must not fill memory for ever.
_SEND_TIMEOUT_S = 60
_STALL_POLL_S = 5


class _ClientStalled(Exception):
    """The client keeps its connection but takes nothing from it."""


class Generation(Response):
    """Serves one request when it is called. Subclasses write the events that come."""

    def __init__(
        self, service: Service, request: Request, response_format: ResponseFormat, stopping: asyncio.Event
    ) -> None:
        super().__init__()
        self._service = service
        self._request = request
        self._format = response_format
        self._stopping = stopping
        self._started = False
        # When the send began that has not ended yet.
        self._sending_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application, as every response."""
        request_id = self._request.request_id
        try:
            await self._while_wanted(self._serve(send), receive)
        except _ClientStalled:
            logger.warning("request %s: the client took no data for %d s", request_id, _SEND_TIMEOUT_S)
        except RequestError as error:
            await self._send_error(error, scope, receive, send)
        # Whatever else goes wrong must reach the client as an error, and the log as it is.
        except Exception:
            logger.exception("request %s failed", request_id)
            await self._send_error(internal_error(request_id), scope, receive, send)

    async def _serve(self, send: Send) -> None:
        async with aclosing(self._service.run(self._request)) as events:
            await self._write(events, send)

    async def _write(self, events: AsyncIterator[Delta | Finished], send: Send) -> None:
        """Writes everything. The first byte is sent only when an event has come: until then the status
        can still be an error's."""
        raise NotImplementedError

    async def _send_error(self, error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error)(scope, receive, send)

    async def _while_wanted(self, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Runs `work` to its end, or cancels it when the client leaves or the server stops.

        Raises what `work` raises, and `Unavailable` when the server stops.
        """
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(receive))
        stopped = asyncio.create_task(self._stopping.wait())
        tasks = (task, gone, stopped)
        try:
            while not any(each.done() for each in tasks) and not self._is_stalled():
                await asyncio.wait(tasks, timeout=_STALL_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            is_done = task.done()
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if is_done or not task.cancelled():
            task.result()
        elif self._is_stalled():
            raise _ClientStalled
        elif gone.cancelled():
            raise Unavailable("the router is shutting down")

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        # Seen by `_is_stalled` now and then: a timer of its own for each token would cost more than the send.
        self._sending_since_s = asyncio.get_running_loop().time()
        await send(message)
        self._sending_since_s = None

    def _is_stalled(self) -> bool:
        since_s = self._sending_since_s
        return since_s is not None and asyncio.get_running_loop().time() - since_s > _SEND_TIMEOUT_S


class WholeGeneration(Generation):
    """A response in one piece."""

    async def _write(self, events: AsyncIterator[Delta | Finished], send: Send) -> None:
        whole = Delta("", [])
        texts: list[str] = []
        async for each in events:
            if isinstance(each, Finished):
                whole = Delta("".join(texts), whole.token_ids, whole.logprobs)
                response = JSONResponse(self._format.whole(whole, each))
                for message in _messages(response):
                    await self._send(send, message)
                return
            texts.append(each.text)
            whole.token_ids.extend(each.token_ids)
            whole.logprobs.extend(each.logprobs)
        raise RuntimeError("the service ended without a result")


class StreamedGeneration(Generation):
    """A stream of server-sent events. After the first of them an error is an event too."""

    def __init__(
        self,
        service: Service,
        request: Request,
        response_format: ResponseFormat,
        stopping: asyncio.Event,
        include_usage: bool,
    ) -> None:
        super().__init__(service, request, response_format, stopping)
        self._include_usage = include_usage

    async def _write(self, events: AsyncIterator[Delta | Finished], send: Send) -> None:
        async for each in events:
            data = b"" if self._started else await self._start(send)
            if isinstance(each, Finished):
                data += self._format.closing(each, self._include_usage)
                await self._send(send, {"type": "http.response.body", "body": data})
                return
            data += self._format.chunk(each)
            if data:
                await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
        raise RuntimeError("the service ended without a result")

    async def _start(self, send: Send) -> bytes:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # Proxies such as nginx would hold the stream back.
            (b"x-accel-buffering", b"no"),
        ]
        self._started = True
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        return self._format.opening()

    async def _send_error(self, error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started:
            await self._send(send, {"type": "http.response.body", "body": event(error_body(error))})
        else:
            await super()._send_error(error, scope, receive, send)


def _messages(response: Response) -> list[dict[str, Any]]:
    return [
        {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers},
        {"type": "http.response.body", "body": response.body},
    ]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
