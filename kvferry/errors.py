"""How a request can end without a result, as clients see it."""

from typing import Any

import grpc


class KvferryError(Exception):
    """A request that ended without a result. request_id: the router's id, "" where it gave none yet."""

    request_id: str = ""


class InvalidRequest(KvferryError):
    """The request can never be served as it is; the message names the field at fault."""


class Overloaded(KvferryError):
    """There is no room now; it is worth trying again in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(KvferryError):
    """The router cannot be reached, has no worker that can serve the request, or lost the one that did."""


class DeadlineExceeded(KvferryError):
    """The request's time ran out."""


class Cancelled(KvferryError):
    """The request was cancelled, here or by the router."""


class ServerError(KvferryError):
    """A fault on the other side."""


_ERRORS: dict[grpc.StatusCode, type[KvferryError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    # Without a `retry-after`: a message over the size limit.
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def from_rpc(error: Any, request_id: str = "") -> KvferryError:
    """The exception for a grpc.RpcError, which is a call too."""
    code, details = error.code(), error.details() or "no details"
    mapped: KvferryError
    retry_after = dict(error.trailing_metadata() or ()).get("retry-after")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_after is not None:
        mapped = Overloaded(details, float(retry_after))
    else:
        kind = _ERRORS.get(code, ServerError)
        mapped = kind(f"{code.name}: {details}" if kind is ServerError else details)
    mapped.request_id = request_id
    return mapped
