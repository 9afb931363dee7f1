"""Blocks over a real gRPC connection, into a real cache: what must arrive, and what must not."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
import torch

from engine.cache import BlockShape, KVCache
from kv_transfer import grpc_transport
from kv_transfer.grpc_transport import SERVICE_NAME, GrpcTransport, KvTransferServicer
from kv_transfer.receiver import Receiver, Refusal, checksum
from kv_transfer.reservation import Lease, Reservation, ReservationState, ReservationTable
from kv_transfer.transport import Target, TransferFailed
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

    def __init__(self) -> None:
        self.cache = random_cache(2)
        self.table = ReservationTable(EPOCH)
        self.completed: list[Reservation] = []
        self.receiver = Receiver(self.cache, self.table, self.completed.append)
        self.address = ""

    def reserve(self, request_id: str = "req-1") -> Reservation:
        return self.table.grant(request_id, list(TARGET_BLOCKS), len(SOURCE_BLOCKS))

    def target(self, lease: Lease) -> Target:
        return Target(self.address, lease)

    @asynccontextmanager
    async def serving(self):
        server = GrpcServer(grpc_transport.max_message_bytes(SHAPE.num_bytes))
        server.add(
            SERVICE_NAME, KvTransferServicer(self.receiver), pb_grpc.add_KvTransferServiceServicer_to_server
        )
        self.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        try:
            yield self
        finally:
            await server.stop(0)


@pytest.fixture
async def side():
    async with Side().serving() as side:
        yield side


@pytest.fixture
async def source():
    return random_cache(1)


@pytest.fixture
async def transport(source):
    transport = GrpcTransport(source)
    yield transport
    await transport.close()


async def send_all(transport: GrpcTransport, target: Target, order=(0, 1, 2)) -> None:
    transfer = transport.open(target, len(SOURCE_BLOCKS))
    try:
        for index in order:
            await transfer.send(index, SOURCE_BLOCKS[index])
        await transfer.finish(first_token_id=42)
    finally:
        await transfer.abort()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
async def test_blocks_arrive_byte_for_byte_in_any_order_and_touch_no_other_block(
    side, source, transport, order
):
    before = side.cache.blocks.clone()
    reservation = side.reserve()
    await send_all(transport, side.target(reservation.lease), order)
    for index, block in enumerate(SOURCE_BLOCKS):
        assert side.cache.read_block(TARGET_BLOCKS[index]) == source.read_block(block)
    untouched = [b for b in range(8) if b not in TARGET_BLOCKS[:3]]
    assert torch.equal(side.cache.blocks[untouched], before[untouched])
    assert side.completed == [reservation]
    assert reservation.state is ReservationState.COMPLETE
    assert reservation.first_token_id == 42


async def test_nothing_is_complete_before_the_first_token_is_known(side, transport):
    reservation = side.reserve()
    transfer = transport.open(side.target(reservation.lease), len(SOURCE_BLOCKS))
    for index, block in enumerate(SOURCE_BLOCKS):
        await transfer.send(index, block)
    async with asyncio.timeout(5):
        while len(reservation.checksums) < len(SOURCE_BLOCKS):
            await asyncio.sleep(0.01)
    assert side.completed == []
    await transfer.finish(42)
    assert side.completed == [reservation]


def tampered(lease: Lease, **changes: object) -> Lease:
    fields = {
        "request_id": lease.request_id,
        "epoch": lease.epoch,
        "generation": lease.generation,
        "secret": lease.secret,
    }
    return Lease(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"secret": b"0" * 16},
        {"secret": b""},
        {"generation": 99},
        {"epoch": EPOCH + 1},
        {"request_id": "req-2"},
    ],
    ids=str,
)
async def test_a_lease_that_is_not_this_one_writes_nothing(side, transport, changes):
    before = side.cache.blocks.clone()
    reservation = side.reserve()
    with pytest.raises(TransferFailed, match="lease"):
        await send_all(transport, side.target(tampered(reservation.lease, **changes)))
    assert torch.equal(side.cache.blocks, before)
    assert reservation.state is ReservationState.RESERVED


async def test_a_late_block_is_refused_after_its_reservation_was_freed(side, transport):
    """The blocks have gone to another request: nothing may be written over it."""
    reservation = side.reserve()
    transfer = transport.open(side.target(reservation.lease), len(SOURCE_BLOCKS))
    await transfer.send(0, SOURCE_BLOCKS[0])
    async with asyncio.timeout(5):
        while not reservation.checksums:
            await asyncio.sleep(0.01)
    side.table.free("req-1")
    other = side.reserve("req-2")
    before = side.cache.blocks.clone()
    with pytest.raises(TransferFailed, match="GENERATION"):
        await transfer.send(1, SOURCE_BLOCKS[1])
        await transfer.finish(42)
    assert torch.equal(side.cache.blocks, before)
    assert not other.checksums
    assert side.completed == []


async def test_a_complete_lease_cannot_be_used_again(side, transport):
    reservation = side.reserve()
    await send_all(transport, side.target(reservation.lease))
    with pytest.raises(TransferFailed, match="COMPLETE"):
        await send_all(transport, side.target(reservation.lease))
    assert side.completed == [reservation]


async def test_two_writers_cannot_fill_one_reservation(side, transport):
    reservation = side.reserve()
    first = transport.open(side.target(reservation.lease), len(SOURCE_BLOCKS))
    await first.send(0, SOURCE_BLOCKS[0])
    async with asyncio.timeout(5):
        while not reservation.checksums:
            await asyncio.sleep(0.01)
    with pytest.raises(TransferFailed, match="FILLING"):
        await send_all(transport, side.target(reservation.lease))
    await first.abort()


async def test_another_writer_takes_over_where_the_first_one_was_lost(side, source, transport):
    reservation = side.reserve()
    first = transport.open(side.target(reservation.lease), len(SOURCE_BLOCKS))
    await first.send(0, SOURCE_BLOCKS[0])
    await first.abort()
    async with asyncio.timeout(5):
        while reservation.state is not ReservationState.RESERVED:
            await asyncio.sleep(0.01)
    await send_all(transport, side.target(reservation.lease))
    assert [side.cache.read_block(b) for b in TARGET_BLOCKS[:3]] == [
        source.read_block(b) for b in SOURCE_BLOCKS
    ]


async def test_a_sender_with_other_geometry_is_refused_with_the_field(side, transport):
    reservation = side.reserve()
    transfer = transport.open(side.target(reservation.lease), 2)
    with pytest.raises(TransferFailed, match="num_blocks: 2, but 3 are reserved"):
        await transfer.finish(42)
    smaller = BlockShape(2, 2, 2, 8, torch.bfloat16)
    other = GrpcTransport(KVCache(smaller, 8, torch.device("cpu")))
    with pytest.raises(TransferFailed, match="block_bytes"):
        await send_all(other, side.target(reservation.lease))
    await other.close()
    assert reservation.state is ReservationState.RESERVED


async def test_nobody_there_is_a_failed_transfer(transport):
    with pytest.raises(TransferFailed):
        await send_all(transport, Target("127.0.0.1:1", Lease("req-1", EPOCH, 1, b"x")))


class Wire:
    """A sender by hand, for what our own never sends."""

    def __init__(self, side: Side) -> None:
        self._channel = grpc.aio.insecure_channel(side.address)
        self.call = pb_grpc.KvTransferServiceStub(self._channel).Push()

    async def open(self, reservation: Reservation) -> None:
        lease = reservation.lease
        header = pb.PushHeader(block_bytes=SHAPE.num_bytes, num_blocks=reservation.num_prompt_blocks)
        header.lease.request_id = lease.request_id
        header.lease.epoch = lease.epoch
        header.lease.generation = lease.generation
        header.lease.secret = lease.secret
        await self.call.write(pb.PushRequest(header=header))
        assert (await self.call.read()).HasField("opened")

    async def block(self, reservation: Reservation, at: int, data: bytes, **changes: object) -> None:
        fields = {
            "index": at,
            "generation": reservation.lease.generation,
            "checksum": checksum(data),
            "layer_end": SHAPE.num_layers,
            "head_end": SHAPE.num_kv_heads,
            "data": data,
        }
        await self.call.write(pb.PushRequest(block=pb.Block(**(fields | changes))))

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


@pytest.fixture
async def wire(side):
    wire = Wire(side)
    yield wire
    await wire.close()


async def test_a_flipped_byte_is_refused_and_the_block_taken_when_it_comes_again(side, source, wire):
    reservation = side.reserve()
    await wire.open(reservation)
    data = source.read_block(SOURCE_BLOCKS[0])
    damaged = bytes([data[0] ^ 1]) + data[1:]
    before = side.cache.read_block(TARGET_BLOCKS[0])
    await wire.block(reservation, 0, damaged, checksum=checksum(data))
    answer = await wire.call.read()
    assert (answer.refused.index, answer.refused.reason) == (0, pb.REFUSAL_REASON_CHECKSUM)
    assert side.cache.read_block(TARGET_BLOCKS[0]) == before
    for index, block in enumerate(SOURCE_BLOCKS):
        await wire.block(reservation, index, source.read_block(block))
    await wire.call.write(pb.PushRequest(end=pb.PushEnd(first_token_id=42)))
    assert (await wire.call.read()).HasField("completed")
    assert side.cache.read_block(TARGET_BLOCKS[0]) == data
    assert side.receiver.refused[Refusal.CHECKSUM] == 1


async def test_a_block_that_comes_twice_is_written_once(side, source, wire):
    reservation = side.reserve()
    await wire.open(reservation)
    data = source.read_block(SOURCE_BLOCKS[0])
    await wire.block(reservation, 0, data)
    other = bytes(len(data))
    await wire.block(reservation, 0, other)
    answer = await wire.call.read()
    assert answer.refused.reason == pb.REFUSAL_REASON_DUPLICATE
    assert side.cache.read_block(TARGET_BLOCKS[0]) == data


@pytest.mark.parametrize(
    "changes",
    [{"index": 3}, {"index": 2**31}, {"layer_end": 1}, {"head_begin": 1}, {"layer_begin": 1, "layer_end": 2}],
    ids=str,
)
async def test_a_block_that_does_not_fit_is_refused(side, source, wire, changes):
    before = side.cache.blocks.clone()
    reservation = side.reserve()
    await wire.open(reservation)
    await wire.block(reservation, 0, source.read_block(SOURCE_BLOCKS[0]), **changes)
    assert (await wire.call.read()).refused.reason == pb.REFUSAL_REASON_SHAPE
    assert torch.equal(side.cache.blocks, before)


async def test_a_short_block_is_refused(side, wire):
    reservation = side.reserve()
    await wire.open(reservation)
    await wire.block(reservation, 0, b"short")
    assert (await wire.call.read()).refused.reason == pb.REFUSAL_REASON_SHAPE


async def test_a_block_of_another_generation_is_refused(side, source, wire):
    before = side.cache.blocks.clone()
    reservation = side.reserve()
    await wire.open(reservation)
    await wire.block(reservation, 0, source.read_block(5), generation=reservation.lease.generation + 1)
    assert (await wire.call.read()).refused.reason == pb.REFUSAL_REASON_GENERATION
    assert torch.equal(side.cache.blocks, before)
    assert side.receiver.refused[Refusal.GENERATION] == 1


@pytest.mark.parametrize(
    "message", [pb.PushRequest(), pb.PushRequest(end=pb.PushEnd())], ids=["empty", "end"]
)
async def test_a_transfer_must_begin_with_its_header(wire, message):
    await wire.call.write(message)
    assert await wire.call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_over_the_limit_is_refused_and_the_server_lives_on(side, transport, wire):
    reservation = side.reserve()
    await wire.open(reservation)
    await wire.block(reservation, 0, bytes(8 * 2**20))
    assert await wire.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with asyncio.timeout(5):
        while reservation.state is not ReservationState.RESERVED:
            await asyncio.sleep(0.01)
    await send_all(transport, side.target(reservation.lease))
    assert side.completed == [reservation]


async def test_damage_on_the_way_is_mended_and_given_up_on_when_it_does_not_end(side, transport, monkeypatch):
    """The sender's half of the same: a faulty wire is imitated by a checksum that is wrong at first."""
    wrong_left = 2

    def flaky(data: bytes) -> int:
        nonlocal wrong_left
        wrong_left -= 1
        return checksum(data) ^ (wrong_left >= 0)

    monkeypatch.setattr(grpc_transport, "checksum", flaky)
    reservation = side.reserve()
    await send_all(transport, side.target(reservation.lease))
    assert side.receiver.refused[Refusal.CHECKSUM] == 2
    assert side.completed == [reservation]
    wrong_left = 1000
    hopeless = side.reserve("req-2")
    with pytest.raises(TransferFailed, match="damaged"):
        await send_all(transport, side.target(hopeless.lease))
    assert side.completed == [reservation]


def test_no_secret_in_a_log_line():
    lease = ReservationTable(EPOCH).grant("req-1", [1], 1).lease
    assert lease.secret.hex() not in repr(lease)
    assert str(lease.secret) not in repr(lease)


def test_one_request_has_one_reservation():
    table = ReservationTable(EPOCH)
    table.grant("req-1", [1], 1)
    with pytest.raises(KeyError):
        table.grant("req-1", [2], 1)
