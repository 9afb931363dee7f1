"""How an exception becomes a gRPC status, once for every server."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A call that a server will not do; `grpc_code` and the message reach the caller."""

    def __init__(self, grpc_code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.grpc_code = grpc_code


class StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns exceptions of handlers into statuses.

    An exception with a `grpc_code` is an answer: its code, its message and, where it has
    `retry_after_s`, that as the trailing metadata `retry-after`. Any other is a fault: it is logged whole
    and the caller is told INTERNAL without its text.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        stream_in, stream_out = handler.request_streaming, handler.response_streaming
        if stream_out:
            behaviour = _guard_stream(handler.stream_stream if stream_in else handler.unary_stream, method)
            make = (
                grpc.stream_stream_rpc_method_handler if stream_in else grpc.unary_stream_rpc_method_handler
            )
        else:
            behaviour = _guard_unary(handler.stream_unary if stream_in else handler.unary_unary, method)
            make = grpc.stream_unary_rpc_method_handler if stream_in else grpc.unary_unary_rpc_method_handler
        return make(behaviour, handler.request_deserializer, handler.response_serializer)


def _guard_unary(behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Any]:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001 - the boundary: every fault becomes a status
            await _abort(context, error, method)

    return guarded


def _guard_stream(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001 - the boundary: every fault becomes a status
            await _abort(context, error, method)

    return guarded


async def _abort(context: Any, error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    code = getattr(error, "grpc_code", None)
    if code is None:
        logger.error("%s failed", method, exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the cause")
    retry_after_s = getattr(error, "retry_after_s", None)
    metadata = () if retry_after_s is None else (("retry-after", str(retry_after_s)),)
    await context.abort(code, str(error), metadata)
    raise AssertionError("abort returned")
