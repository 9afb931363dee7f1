"""Blocks as bytes: what a sender that is not ours may write, and how the wire is read."""

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import byte_blocks
from kv_transfer.receiver import BlockPart, Refusal, checksum
from kv_transfer.reservation import ReservationState
from kvferry.v1 import kv_transfer_pb2 as pb

uint32 = st.integers(0, 2**32 - 1)
blocks = st.builds(
    pb.Block,
    index=uint32,
    generation=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
    layer_begin=uint32,
    layer_end=uint32,
    head_begin=uint32,
    head_end=uint32,
    data=st.binary(max_size=300),
)


def parts_of(message: pb.PushRequest) -> list[BlockPart]:
    return [
        BlockPart(
            b.index,
            b.generation,
            b.checksum,
            (b.layer_begin, b.layer_end),
            (b.head_begin, b.head_end),
            b.data,
        )
        for b in message.blocks.blocks
    ]


@given(st.lists(blocks, min_size=1, max_size=4))
def test_what_we_write_is_what_protobuf_reads_and_the_reverse(written):
    apart = []
    for block in written:
        fields = pb.Block()
        fields.CopyFrom(block)
        fields.ClearField("data")
        apart.append((fields, memoryview(block.data)))
    wire = byte_blocks.serialize(apart)
    message = pb.PushRequest.FromString(wire)
    assert list(message.blocks.blocks) == written
    for data in (wire, message.SerializeToString()):
        assert byte_blocks.deserialize(data) == parts_of(message)


def test_blocks_lie_in_the_message_without_a_copy():
    data = bytes(range(256)) * 8
    wire = byte_blocks.serialize([(pb.Block(index=1), memoryview(data)), (pb.Block(), memoryview(data))])
    assert all(part.data.obj is wire for part in byte_blocks.deserialize(wire))


def test_another_order_of_fields_and_unknown_ones_are_read_all_the_same():
    block = pb.Block(index=3, generation=5, checksum=7, data=b"abc")
    backwards = (
        pb.Block(data=b"abc").SerializeToString()
        + pb.Block(index=3, generation=5, checksum=7).SerializeToString()
    )
    unknown = bytes([15 << 3 | 2, 2]) + b"??"
    for body in (backwards, unknown + block.SerializeToString(), block.SerializeToString() + unknown):
        inner = bytes([1 << 3 | 2, len(body)]) + body
        wire = bytes([2 << 3 | 2, len(inner)]) + inner
        (part,) = byte_blocks.deserialize(wire)
        assert (part.index, part.generation, part.checksum, bytes(part.data)) == (3, 5, 7, b"abc")


@given(st.binary(max_size=200), st.data())
def test_garbage_is_read_as_protobuf_reads_it_or_refused_as_it_refuses(garbage, draw):
    """Also what was a good message until it was cut or changed."""
    good = pb.PushRequest(blocks=pb.Blocks(blocks=[pb.Block(index=1, checksum=9, data=garbage)]))
    wire = bytearray(good.SerializeToString())
    at = draw.draw(st.integers(0, len(wire) - 1))
    wire[at] = draw.draw(st.integers(0, 255))
    for data in (garbage, bytes(wire), bytes(wire[:at])):
        try:
            expected = pb.PushRequest.FromString(data)
        except DecodeError:
            with pytest.raises(DecodeError):
                byte_blocks.deserialize(data)
            continue
        read = byte_blocks.deserialize(data)
        assert read == (parts_of(expected) if expected.HasField("blocks") else expected)


def test_a_block_that_is_longer_than_its_message_is_refused():
    wire = bytes([2 << 3 | 2, 6]) + bytes([1 << 3 | 2, 9]) + bytes([8 << 3 | 2, 7]) + b"ab"
    with pytest.raises(DecodeError):
        byte_blocks.deserialize(wire)


def test_a_number_without_end_costs_no_time():
    endless = bytes([2 << 3 | 2]) + b"\xff" * 2**21
    with pytest.raises(DecodeError):
        byte_blocks.deserialize(endless)


async def test_a_flipped_byte_is_refused_and_the_block_taken_when_it_comes_again(side, source, wire):
    reservation = side.reserve()
    await wire.open(reservation)
    data = source.read_block(side.source_blocks[0])
    damaged = bytes([data[0] ^ 1]) + data[1:]
    before = side.cache.read_block(side.target_blocks[0])
    await wire.block(reservation, 0, damaged, checksum=checksum(data))
    assert await wire.refusal() == (0, "CHECKSUM")
    assert side.cache.read_block(side.target_blocks[0]) == before
    for index, block in enumerate(side.source_blocks):
        await wire.block(reservation, index, source.read_block(block))
    await wire.end()
    assert (await wire.call.read()).HasField("completed")
    assert side.cache.read_block(side.target_blocks[0]) == data
    assert side.receiver.refused[Refusal.CHECKSUM] == 1


async def test_a_block_that_comes_twice_is_written_once(side, source, wire):
    reservation = side.reserve()
    await wire.open(reservation)
    data = source.read_block(side.source_blocks[0])
    await wire.block(reservation, 0, data)
    other = bytes(len(data))
    await wire.block(reservation, 0, other)
    assert await wire.refusal() == (0, "DUPLICATE")
    assert side.cache.read_block(side.target_blocks[0]) == data


@pytest.mark.parametrize(
    "changes",
    [{"index": 3}, {"index": 2**31}, {"layer_end": 1}, {"head_begin": 1}, {"layer_begin": 1, "layer_end": 2}],
    ids=str,
)
async def test_a_block_that_does_not_fit_is_refused(side, source, wire, changes):
    before = side.cache.blocks.clone()
    reservation = side.reserve()
    await wire.open(reservation)
    await wire.block(reservation, 0, source.read_block(side.source_blocks[0]), **changes)
    assert (await wire.refusal())[1] == "SHAPE"
    assert torch.equal(side.cache.blocks, before)


async def test_a_short_block_is_refused(side, wire):
    reservation = side.reserve()
    await wire.open(reservation)
    await wire.block(reservation, 0, b"short")
    assert await wire.refusal() == (0, "SHAPE")


async def test_a_block_of_another_generation_is_refused(side, source, wire):
    before = side.cache.blocks.clone()
    reservation = side.reserve()
    await wire.open(reservation)
    await wire.block(reservation, 0, source.read_block(5), generation=reservation.lease.generation + 1)
    assert await wire.refusal() == (0, "GENERATION")
    assert torch.equal(side.cache.blocks, before)
    assert side.receiver.refused[Refusal.GENERATION] == 1


@pytest.mark.parametrize(
    "message", [pb.PushRequest(), pb.PushRequest(end=pb.PushEnd())], ids=["empty", "end"]
)
async def test_a_transfer_must_begin_with_its_header(wire, message):
    await wire.call.write(message)
    assert await wire.call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_over_the_limit_is_refused_and_the_server_lives_on(side, transport, wire, until):
    reservation = side.reserve()
    await wire.open(reservation)
    await wire.block(reservation, 0, bytes(8 * 2**20))
    assert await wire.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await until(lambda: reservation.state is ReservationState.RESERVED)
    await side.send_all(transport, reservation)
    assert side.completed == [reservation]
