"""Errors in OpenAI's shape."""

from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from router.errors import InvalidRequest, Overloaded, RequestError, UnknownModel


class UnknownPath(RequestError):
    """There is nothing at this path, or not with this method."""

    kind = "invalid_request_error"

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.http_status = status


class BodyTooSlow(RequestError):
    """The body did not arrive in time."""

    http_status = HTTPStatus.REQUEST_TIMEOUT
    kind = "invalid_request_error"


def internal_error(request_id: str) -> RequestError:
    """What a client is told of a fault of ours: where to find it in the log."""
    return RequestError(f"internal error in request {request_id}")


def error_body(error: RequestError) -> dict[str, Any]:
    """The object that says what went wrong, in a response or as an event of a stream."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": error.field if isinstance(error, InvalidRequest) else None,
            "code": "model_not_found" if isinstance(error, UnknownModel) else None,
        }
    }


def error_response(error: RequestError) -> JSONResponse:
    """The whole response to a request that failed before its first token."""
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else None
    return JSONResponse(error_body(error), error.http_status, headers)
