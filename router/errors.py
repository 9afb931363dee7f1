"""What can go wrong with a request, and what each client is told: one table for gRPC and HTTP."""

from http import HTTPStatus

import grpc


class RequestError(Exception):
    """A request that ends without a result. `str()` is the message for the client."""

    grpc_code = grpc.StatusCode.INTERNAL
    http_status = HTTPStatus.INTERNAL_SERVER_ERROR
    # OpenAI's word for the kind.
    kind = "server_error"


class InvalidRequest(RequestError):
    """Refused at the door; `field` is the one at fault."""

    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = HTTPStatus.BAD_REQUEST
    kind = "invalid_request_error"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnknownModel(InvalidRequest):
    """The model asked for is not the one that is served."""

    grpc_code = grpc.StatusCode.NOT_FOUND
    http_status = HTTPStatus.NOT_FOUND


class BodyTooLarge(RequestError):
    """More bytes than the router reads."""

    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    kind = "invalid_request_error"


class Overloaded(RequestError):
    """No room now; worth trying again in `retry_after_s` seconds."""

    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = HTTPStatus.TOO_MANY_REQUESTS
    kind = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(f"{message}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Unavailable(RequestError):
    """No worker can serve it now, or the one that did was lost."""

    grpc_code = grpc.StatusCode.UNAVAILABLE
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class WorkerLost(Unavailable):
    """A worker, or the way to it, was lost with what it did for a request. Another may carry on."""


class DeadlineExceeded(RequestError):
    """Its time ran out; the message names the stage it was in."""

    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = HTTPStatus.GATEWAY_TIMEOUT


class WorkerFailed(RequestError):
    """A worker answered with an error of its own."""
