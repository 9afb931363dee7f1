"""Both ends of transfers over a real gRPC connection, into a real cache."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
import torch

from engine.cache import BlockShape, KVCache
from kv_transfer import byte_blocks
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.receiver import Receiver, checksum
from kv_transfer.reservation import Lease, Reservation, ReservationTable
from kv_transfer.server import SERVICE_NAME, KvTransferServicer, add_to_server
from kv_transfer.transport import Target
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1 import kv_transfer_pb2_grpc as pb_grpc
from rpc.server import GrpcServer

SHAPE = BlockShape(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
EPOCH = 7
SOURCE_BLOCKS = [5, 1, 3]
TARGET_BLOCKS = [2, 7, 4, 0]  # The last one is room for growth.


def random_cache(seed: int) -> KVCache:
    cache = KVCache(SHAPE, 8, torch.device("cpu"))
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


class Side:
    """A receiving worker, as far as transfers go."""

    shape = SHAPE
    source_blocks = tuple(SOURCE_BLOCKS)
    target_blocks = tuple(TARGET_BLOCKS)

    def __init__(self) -> None:
        self.cache = random_cache(2)
        self.table = ReservationTable(EPOCH)
        self.completed: list[Reservation] = []
        self.receiver = Receiver(self.cache, self.table, self.completed.append)
        self.servicer = KvTransferServicer(self.receiver)
        self.address = ""

    def reserve(self, request_id: str = "req-1", num_held_blocks: int = 0) -> Reservation:
        return self.table.grant(request_id, list(TARGET_BLOCKS), len(SOURCE_BLOCKS), num_held_blocks)

    def target(self, lease: Lease, writer: int = 0) -> Target:
        return Target(self.address, lease, writer)

    async def send_all(self, transport: GrpcTransport, reservation: Reservation, order=(0, 1, 2)) -> None:
        """One whole transfer of the source blocks."""
        transfer = transport.open(self.target(reservation.lease), len(order))
        try:
            await transfer.send([(index, SOURCE_BLOCKS[index]) for index in order])
            await transfer.finish(first_token_id=42)
        finally:
            await transfer.abort()

    def has_all_of(self, source: KVCache) -> bool:
        """Whether the source blocks are here, byte for byte."""
        return all(
            self.cache.read_block(target) == source.read_block(block)
            for target, block in zip(TARGET_BLOCKS, SOURCE_BLOCKS, strict=False)
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Side"]:
        server = GrpcServer(byte_blocks.max_message_bytes(SHAPE.num_bytes))
        server.add(SERVICE_NAME, self.servicer, add_to_server)
        self.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        try:
            yield self
        finally:
            await server.stop(0)


class Wire:
    """A sender by hand, with the generated stub, for what our own never sends."""

    def __init__(self, side: Side) -> None:
        self._channel = grpc.aio.insecure_channel(side.address)
        self.call = pb_grpc.KvTransferServiceStub(self._channel).Push()

    async def open(self, reservation: Reservation, **header: object) -> pb.PushOpened:
        lease = reservation.lease
        fields = {"block_bytes": SHAPE.num_bytes, "num_blocks": reservation.num_blocks_to_fill}
        message = pb.PushHeader(**(fields | header))
        message.lease.request_id = lease.request_id
        message.lease.epoch = lease.epoch
        message.lease.generation = lease.generation
        message.lease.secret = lease.secret
        await self.call.write(pb.PushRequest(header=message))
        answer = await self.call.read()
        assert answer.HasField("opened")
        return answer.opened

    async def block(self, reservation: Reservation, at: int, data: bytes, **changes: object) -> None:
        fields = {
            "index": at,
            "generation": reservation.lease.generation,
            "checksum": checksum(data),
            "layer_end": SHAPE.num_layers,
            "head_end": SHAPE.num_kv_heads,
            "data": data,
        }
        block = pb.Block(**(fields | changes))
        await self.call.write(pb.PushRequest(blocks=pb.Blocks(blocks=[block])))

    async def shared(self, reservation: Reservation, indices, sources, checksums, **changes) -> None:
        fields = {"generation": reservation.lease.generation}
        message = pb.SharedBlocks(
            indices=indices, source_blocks=sources, checksums=checksums, **(fields | changes)
        )
        await self.call.write(pb.PushRequest(shared_blocks=message))

    async def end(self) -> None:
        await self.call.write(pb.PushRequest(end=pb.PushEnd(first_token_id=42)))

    async def refusal(self) -> tuple[int, str]:
        """The next answer, which must be a refusal: of which block, and why."""
        refused = (await self.call.read()).refused
        return refused.index, pb.RefusalReason.Name(refused.reason).removeprefix("REFUSAL_REASON_")

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(name="until")
def until_fixture():
    """Waits for a condition, and fails where it does not come true."""
    return until


@pytest.fixture
async def side():
    async with Side().serving() as side:
        yield side


@pytest.fixture
async def source():
    return random_cache(1)


@pytest.fixture
async def shared_transport(source):
    """Offers the memory of `source`."""
    transport = GrpcTransport(source)
    yield transport
    await transport.close()


@pytest.fixture
async def byte_transport(source):
    """Has no memory to offer."""
    segment, source.segment = source.segment, None
    transport = GrpcTransport(source)
    source.segment = segment
    yield transport
    await transport.close()


@pytest.fixture(params=["bytes", "shared"])
def transport(request, byte_transport, shared_transport):
    """Either way for blocks to travel."""
    return byte_transport if request.param == "bytes" else shared_transport


@pytest.fixture
async def wire(side):
    wire = Wire(side)
    yield wire
    await wire.close()
