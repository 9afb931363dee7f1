"""What must arrive and what must not, whichever way blocks travel."""

import asyncio

import pytest
import torch

from engine.cache import BlockShape, KVCache
from kv_transfer import byte_blocks, shared_blocks
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.receiver import Refusal, checksum
from kv_transfer.reservation import Lease, ReservationState, ReservationTable
from kv_transfer.transport import Target, TransferFailed

EPOCH = 7


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
async def test_blocks_arrive_byte_for_byte_in_any_order_and_touch_no_other_block(
    side, source, transport, order
):
    before = side.cache.blocks.clone()
    reservation = side.reserve()
    await side.send_all(transport, reservation, order)
    assert side.has_all_of(source)
    untouched = [b for b in range(8) if b not in side.target_blocks[:3]]
    assert torch.equal(side.cache.blocks[untouched], before[untouched])
    assert side.completed == [reservation]
    assert reservation.state is ReservationState.COMPLETE
    assert reservation.first_token_id == 42


async def test_both_ways_carry_the_same_and_say_how_much(side, source, byte_transport, shared_transport):
    for number, transport in enumerate((byte_transport, shared_transport)):
        side.cache.blocks.zero_()
        reservation = side.reserve(f"req-{number}")
        transfer = transport.open(side.target(reservation.lease), 3)
        await transfer.send(list(enumerate(side.source_blocks)))
        await transfer.finish(42)
        assert side.has_all_of(source)
        assert transfer.num_bytes == 3 * side.shape.num_bytes
    assert len(side.servicer.peers) == 1


async def test_blocks_are_copied_from_shared_memory_where_they_can_be_and_sent_where_not(
    side, byte_transport, shared_transport, monkeypatch
):
    used = []
    for carrier in (byte_blocks.ByteCarrier, shared_blocks.SharedCarrier):
        real_message = carrier.message

        def message(self, blocks, carrier=carrier, real_message=real_message):
            used.append(carrier.__name__)
            return real_message(self, blocks)

        monkeypatch.setattr(carrier, "message", message)
    await side.send_all(shared_transport, side.reserve("req-1"))
    await side.send_all(byte_transport, side.reserve("req-2"))
    assert used == ["SharedCarrier", "ByteCarrier"]


async def test_blocks_may_be_sent_while_others_are_on_their_way(side, source, transport):
    """As a damaged one is, when the word of it comes."""
    reservation = side.reserve()
    transfer = transport.open(side.target(reservation.lease), 3)
    await asyncio.gather(*(transfer.send([(i, b)]) for i, b in enumerate(side.source_blocks)))
    await transfer.finish(42)
    assert side.has_all_of(source)


async def test_blocks_that_are_held_already_are_not_sent_and_not_taken(side, source, transport):
    reservation = side.reserve(num_held_blocks=1)
    held = side.cache.read_block(side.target_blocks[0])
    await side.send_all(transport, reservation, order=(1, 2))
    assert side.cache.read_block(side.target_blocks[0]) == held
    assert reservation.state is ReservationState.COMPLETE

    other = side.reserve("req-2", num_held_blocks=2)
    transfer = transport.open(side.target(other.lease), 1)
    await transfer.send([(0, side.source_blocks[0]), (2, side.source_blocks[2])])
    await transfer.finish(42)
    assert side.receiver.refused[Refusal.DUPLICATE] == 1
    assert side.cache.read_block(side.target_blocks[0]) == held


async def test_a_full_hit_sends_nothing_and_completes(side, transport):
    reservation = side.reserve(num_held_blocks=3)
    before = side.cache.blocks.clone()
    await side.send_all(transport, reservation, order=())
    assert side.completed == [reservation]
    assert torch.equal(side.cache.blocks, before)


async def test_nothing_is_complete_before_the_first_token_is_known(side, transport, until):
    reservation = side.reserve()
    transfer = transport.open(side.target(reservation.lease), 3)
    for index, block in enumerate(side.source_blocks):
        await transfer.send([(index, block)])
    await until(lambda: len(reservation.checksums) == 3)
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
    transfer = transport.open(side.target(tampered(reservation.lease, **changes)), 3)
    with pytest.raises(TransferFailed, match="lease"):
        await transfer.send([(0, side.source_blocks[0])])
    await transfer.abort()
    assert torch.equal(side.cache.blocks, before)
    assert reservation.state is ReservationState.RESERVED
    assert len(side.servicer.peers) == 0


async def test_a_late_block_is_refused_after_its_reservation_was_freed(side, transport, until):
    """The blocks have gone to another request: nothing may be written over it."""
    reservation = side.reserve()
    transfer = transport.open(side.target(reservation.lease), 3)
    await transfer.send([(0, side.source_blocks[0])])
    await until(lambda: reservation.checksums)
    side.table.free("req-1")
    other = side.reserve("req-2")
    before = side.cache.blocks.clone()
    with pytest.raises(TransferFailed, match="GENERATION"):
        await transfer.send([(1, side.source_blocks[1])])
        await transfer.finish(42)
    assert torch.equal(side.cache.blocks, before)
    assert not other.checksums
    assert side.completed == []


async def test_a_complete_lease_cannot_be_used_again(side, transport):
    reservation = side.reserve()
    await side.send_all(transport, reservation)
    with pytest.raises(TransferFailed, match="COMPLETE"):
        await side.send_all(transport, reservation)
    assert side.completed == [reservation]


async def test_two_writers_cannot_fill_one_reservation(side, transport, until):
    reservation = side.reserve()
    first = transport.open(side.target(reservation.lease), 3)
    await first.send([(0, side.source_blocks[0])])
    await until(lambda: reservation.checksums)
    with pytest.raises(TransferFailed, match="FILLING"):
        await side.send_all(transport, reservation)
    await first.abort()


async def test_another_writer_takes_over_where_the_first_one_was_lost(side, source, transport, until):
    """What has landed is not sent again."""
    reservation = side.reserve()
    first = transport.open(side.target(reservation.lease), 3)
    await first.send([(0, side.source_blocks[0])])
    await until(lambda: reservation.checksums)
    await first.abort()
    await until(lambda: reservation.state is ReservationState.RESERVED)
    second = transport.open(side.target(reservation.lease, writer=1), 3)
    await second.send(list(enumerate(side.source_blocks)))
    await second.finish(42)
    assert side.has_all_of(source)
    assert second.num_bytes == 2 * side.shape.num_bytes
    assert side.receiver.num_blocks_received == 3
    assert not side.receiver.refused


async def test_a_writer_that_was_only_slow_is_refused_once_another_has_taken_over(
    side, source, transport, until
):
    reservation = side.reserve()
    slow = transport.open(side.target(reservation.lease), 3)
    await slow.send([(0, side.source_blocks[0])])
    await until(lambda: reservation.checksums)
    second = transport.open(side.target(reservation.lease, writer=1), 3)
    await second.send([(1, side.source_blocks[1])])
    await until(lambda: len(reservation.checksums) == 2)
    with pytest.raises(TransferFailed):
        await slow.send([(2, side.source_blocks[0])])
        await slow.finish(41)
    # Its end did not end the second one's right, and it cannot come back.
    late = transport.open(side.target(reservation.lease), 3)
    with pytest.raises(TransferFailed, match="another writer has taken over"):
        await late.finish(41)
    await late.abort()
    await second.send([(2, side.source_blocks[2])])
    await second.finish(42)
    assert side.completed == [reservation]
    assert reservation.first_token_id == 42
    assert side.has_all_of(source)


async def test_a_sender_with_other_geometry_is_refused_with_the_field(side, transport):
    reservation = side.reserve()
    transfer = transport.open(side.target(reservation.lease), 2)
    with pytest.raises(TransferFailed, match="num_blocks: 2, but 3 are reserved"):
        await transfer.finish(42)
    smaller = BlockShape(2, 2, 2, 8, torch.bfloat16)
    other = GrpcTransport(KVCache(smaller, 8, torch.device("cpu")))
    with pytest.raises(TransferFailed, match="block_bytes"):
        await side.send_all(other, reservation)
    await other.close()
    assert reservation.state is ReservationState.RESERVED


async def test_nobody_there_is_a_failed_transfer(transport):
    transfer = transport.open(Target("127.0.0.1:1", Lease("req-1", EPOCH, 1, b"x")), 1)
    with pytest.raises(TransferFailed):
        await transfer.finish(42)
    await transfer.abort()


async def test_damage_is_mended_and_given_up_on_when_it_does_not_end(side, source, transport, monkeypatch):
    """A faulty wire or memory is imitated by checksums of the sender's that are wrong at first."""
    wrong_left = 2

    def flaky(data: bytes) -> int:
        nonlocal wrong_left
        wrong_left -= 1
        return checksum(data) ^ (wrong_left >= 0)

    for carrier in (byte_blocks, shared_blocks):
        monkeypatch.setattr(carrier, "checksum", flaky)
    reservation = side.reserve()
    await side.send_all(transport, reservation)
    assert side.receiver.refused[Refusal.CHECKSUM] == 2
    assert side.completed == [reservation]
    assert side.has_all_of(source)
    wrong_left = 1000
    hopeless = side.reserve("req-2")
    with pytest.raises(TransferFailed, match="damaged"):
        await side.send_all(transport, hopeless)
    assert side.completed == [reservation]


async def test_transfers_of_several_messages_at_once_arrive_whole(side, source, transport, monkeypatch):
    monkeypatch.setattr(byte_blocks, "MAX_BATCH_BLOCKS", 1)
    monkeypatch.setattr(shared_blocks, "MAX_BATCH_BYTES", 1)
    reservations = [side.reserve(f"req-{number}") for number in range(20)]
    await asyncio.gather(*(side.send_all(transport, reservation) for reservation in reservations))
    assert side.has_all_of(source)
    assert {r.lease.request_id for r in side.completed} == {r.lease.request_id for r in reservations}
    assert side.receiver.num_blocks_received == 60


def test_no_secret_in_a_log_line():
    lease = ReservationTable(EPOCH).grant("req-1", [1], 1).lease
    assert lease.secret.hex() not in repr(lease)
    assert str(lease.secret) not in repr(lease)


def test_one_request_has_one_reservation():
    table = ReservationTable(EPOCH)
    table.grant("req-1", [1], 1)
    with pytest.raises(KeyError):
        table.grant("req-1", [2], 1)
