"""The client: a prompt in, tokens out as they are made, over gRPC.

    with Client("127.0.0.1:50051") as client:
        with client.generate("Once upon a time", SamplingParams(max_tokens=32)) as generation:
            for delta in generation:
                print(delta.text, end="")
        print(generation.result.usage)

`AsyncClient` is the same with `async with` and `async for`. Leaving a generation before its end, in
whatever way, cancels the request.
"""

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc

from kvferry.audit import RouterAudit, to_router_audit
from kvferry.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    Overloaded,
    ServerError,
    Unavailable,
    from_rpc,
)
from kvferry.results import (
    ChatMessage,
    Collector,
    Delta,
    Moment,
    Pools,
    Prompt,
    Result,
    TokenLogprobs,
    Usage,
    WorkerInfo,
    to_pools,
    to_request,
)
from kvferry.sampling import SamplingParams
from kvferry.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Cancelled",
    "ChatMessage",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "Generation",
    "InvalidRequest",
    "KvferryError",
    "Moment",
    "Overloaded",
    "Pools",
    "Result",
    "SamplingParams",
    "ServerError",
    "TokenLogprobs",
    "Unavailable",
    "Usage",
    "WorkerInfo",
]


_OPTIONS = [
    # Clients sit beside the cluster: a proxy meant for the web is not asked.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class _Stream:
    """What a sync and an async generation have in common: one call and what came out of it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._collector = Collector()
        self._cancelled = False

    @property
    def request_id(self) -> str:
        """The router's id for the request; "" before the router accepted it."""
        return self._collector.request_id

    @property
    def result(self) -> Result:
        """The whole output. Raises `RuntimeError` before its end."""
        if self._collector.result is None:
            raise RuntimeError("the output is not complete: iterate to its end first")
        return self._collector.result

    def cancel(self) -> None:
        """Ends the request, wherever it is; iterating on raises `Cancelled`. Harmless after the end."""
        self._cancelled = self._cancelled or self._collector.result is None
        self._call.cancel()

    def _cut_short(self) -> KvferryError:
        error = Cancelled("cancelled") if self._cancelled else ServerError("the stream ended half-way")
        error.request_id = self.request_id
        return error


class Generation(_Stream):
    """A running request: iterate over its deltas, then read `result`. Raises `KvferryError`."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._cancelled:
            raise self._cut_short()
        try:
            for event in self._call:
                if (delta := self._collector.take(event)) is not None:
                    return delta
        except grpc.RpcError as error:
            raise from_rpc(error, self.request_id) from None
        if self._collector.result is None:
            raise self._cut_short()
        raise StopIteration

    def wait(self) -> Result:
        """The whole output, once it is there."""
        for _ in self:
            pass
        return self.result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncGeneration(_Stream):
    """A running request: iterate over its deltas, then read `result`. Raises `KvferryError`."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            while (event := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                if (delta := self._collector.take(event)) is not None:
                    return delta
        except grpc.RpcError as error:
            raise from_rpc(error, self.request_id) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled and not (task and task.cancelling()):
                raise self._cut_short() from None
            raise
        if self._collector.result is None:
            raise self._cut_short()
        raise StopAsyncIteration

    async def wait(self) -> Result:
        """The whole output, once it is there."""
        async for _ in self:
            pass
        return self.result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """A connection to a router, `address` being host:port of its gRPC server. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        priority: int = 0,
        label: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> Generation:
        """Starts a request.

        model: the served name; "" takes the one that is served. priority: -100 to 100, higher goes first.
        label: the caller's own name for the request, for logs. cache_salt: KV is reused only among requests
        with the same one. timeout_s: when nobody waits any longer;
        None leaves it to the router. Raises `InvalidRequest` for what cannot even be sent; all else shows
        when the generation is iterated.
        """
        request = _request(
            prompt, sampling, model=model, priority=priority, label=label, cache_salt=cache_salt
        )
        return Generation(self._inference.Generate(request, timeout=timeout_s))

    def list_workers(self, timeout_s: float = 5) -> Pools:
        """The pools as the router sees them. Raises `KvferryError`."""
        try:
            return to_pools(self._admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def audit(self, timeout_s: float = 10) -> RouterAudit:
        """What the router's requests and its workers hold. Raises `KvferryError`."""
        try:
            request = admin_pb2.AuditDeploymentRequest()
            return to_router_audit(self._admin.AuditDeployment(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def close(self) -> None:
        """Cancels what still runs and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio: to be made and used within one running event loop."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        priority: int = 0,
        label: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGeneration:
        """As `Client.generate`."""
        request = _request(
            prompt, sampling, model=model, priority=priority, label=label, cache_salt=cache_salt
        )
        return AsyncGeneration(self._inference.Generate(request, timeout=timeout_s))

    async def list_workers(self, timeout_s: float = 5) -> Pools:
        """As `Client.list_workers`."""
        try:
            request = admin_pb2.ListWorkersRequest()
            return to_pools(await self._admin.ListWorkers(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def audit(self, timeout_s: float = 10) -> RouterAudit:
        """As `Client.audit`."""
        try:
            request = admin_pb2.AuditDeploymentRequest()
            return to_router_audit(await self._admin.AuditDeployment(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def close(self) -> None:
        """Cancels what still runs and closes the connection."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _request(prompt: Prompt, sampling: SamplingParams | None, **rest: Any) -> Any:
    try:
        return to_request(prompt, sampling, **rest)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
