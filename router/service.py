"""The router's face to its two servers: a request in, a stream of events out."""

from collections.abc import AsyncGenerator
from typing import Protocol

from router.events import Delta, Finished, Request, RequestSpec
from router.tokenizer import Tokenizer


class Service(Protocol):
    """What the gRPC and the HTTP server call."""

    model_name: str
    tokenizer: Tokenizer

    async def validate(self, spec: RequestSpec) -> Request:
        """Everything that can be refused is refused here. Raises `router.errors.InvalidRequest`."""
        ...

    def run(self, request: Request) -> AsyncGenerator[Delta | Finished, None]:
        """Serves the request: deltas, then `Finished`. Raises `router.errors.RequestError`.

        Closing the iterator (`aclose`), or cancelling the task that reads it, cancels the request.
        """
        ...

    def why_not_ready(self) -> str:
        """Empty when at least one compatible pair of workers can take a request now, else the reason."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text."""
        ...
