"""Clients that do not have our files: health and reflection on a server of ours."""

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvferry.v1 import decode_pb2, decode_pb2_grpc
from rpc.server import GrpcServer

NAME = "kvferry.v1.DecodeService"


class Servicer(decode_pb2_grpc.DecodeServiceServicer):
    async def Release(self, request, context):
        return decode_pb2.ReleaseResponse()


@pytest.fixture
async def server():
    server = GrpcServer(max_message_bytes=1024)
    server.add(NAME, Servicer(), decode_pb2_grpc.add_DecodeServiceServicer_to_server)
    server.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    yield server
    await server.stop(0)


async def test_health_follows_what_the_server_says_of_itself(server):
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", NAME):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await server.set_serving(False)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=NAME))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_client_without_our_files_finds_and_calls_a_method(server):
    import asyncio

    def by_reflection() -> set[str]:
        with grpc.insecure_channel(server.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            method = pool.FindServiceByName(NAME).FindMethodByName("Release")
            request = GetMessageClass(method.input_type)(request_ids=["a"])
            call = channel.unary_unary(
                f"/{NAME}/Release",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            assert call(request, timeout=5).DESCRIPTOR.name == "ReleaseResponse"
            return set(database.get_services())

    assert {NAME, "grpc.health.v1.Health"} <= await asyncio.to_thread(by_reflection)


async def test_a_message_over_the_limit_is_refused_and_the_server_lives_on(server):
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Release(decode_pb2.ReleaseRequest(request_ids=["x" * 2000]))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.Release(decode_pb2.ReleaseRequest(request_ids=["x"]))
