"""Exceptions become statuses, once for every kind of call."""

from types import SimpleNamespace

import grpc
import pytest

from kvferry.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from rpc.errors import Refused
from rpc.server import GrpcServer


class Busy(Exception):
    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retry_after_s = 7


FAULTS = [
    (Refused(grpc.StatusCode.NOT_FOUND, "no such thing"), grpc.StatusCode.NOT_FOUND, "no such thing"),
    (Busy("come again"), grpc.StatusCode.RESOURCE_EXHAUSTED, "come again"),
    (
        ValueError("a secret of ours"),
        grpc.StatusCode.INTERNAL,
        "internal error; the server's log has the cause",
    ),
]


class Servicer(decode_pb2_grpc.DecodeServiceServicer, prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.closed = False

    async def Reserve(self, request, context):
        raise self.error

    async def Prefill(self, request, context):
        try:
            yield prefill_pb2.PrefillResponse()
            if self.error:
                raise self.error
        finally:
            self.closed = True


@pytest.fixture
async def served():
    server, servicer = GrpcServer(), Servicer()
    server.add("kvferry.v1.DecodeService", servicer, decode_pb2_grpc.add_DecodeServiceServicer_to_server)
    server.add("kvferry.v1.PrefillService", servicer, prefill_pb2_grpc.add_PrefillServiceServicer_to_server)
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield SimpleNamespace(servicer=servicer, channel=channel, server=server)
    await server.stop(0)


@pytest.mark.parametrize(("error", "code", "message"), FAULTS, ids=["answer", "scarcity", "fault"])
async def test_an_exception_in_a_unary_call_is_its_status(served, error, code, message):
    served.servicer.error = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decode_pb2_grpc.DecodeServiceStub(served.channel).Reserve(decode_pb2.ReserveRequest())
    assert (caught.value.code(), caught.value.details()) == (code, message)
    retry_after = dict(caught.value.trailing_metadata()).get("retry-after")
    assert retry_after == ("7" if isinstance(error, Busy) else None)


@pytest.mark.parametrize(("error", "code", "message"), FAULTS, ids=["answer", "scarcity", "fault"])
async def test_an_exception_in_a_stream_ends_it_with_the_status(served, error, code, message):
    served.servicer.error = error
    call = prefill_pb2_grpc.PrefillServiceStub(served.channel).Prefill(prefill_pb2.PrefillRequest())
    assert isinstance(await call.read(), prefill_pb2.PrefillResponse)
    assert (await call.code(), await call.details()) == (code, message)
    assert served.servicer.closed
