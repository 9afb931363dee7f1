"""Blocks in shared memory: which memory is trusted, what a sender may do to it, and that nothing is left."""

import asyncio
import fcntl
import gc
import os
import signal
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import torch

from engine.cache import KVCache
from engine.segment import NAME_PREFIX, SEALS
from kv_transfer import shared_blocks
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.receiver import checksum
from kv_transfer.reservation import ReservationState

ROOT = Path(__file__).parents[2]


def offer_of(cache: KVCache, **changes: object):
    offer = shared_blocks.offer(cache)
    for name, value in changes.items():
        setattr(offer, name, value)
    return offer


def mappings() -> Counter[str]:
    """Our shared memory as this process has it mapped, and its open files, by name."""
    gc.collect()
    maps = [
        line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if NAME_PREFIX in line
    ]
    links = Counter(maps)
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        if NAME_PREFIX in target:
            links[f"fd of {target}"] += 1
    return links


@contextmanager
def memory_file(num_bytes: int, *, name: str = NAME_PREFIX + "test", seals: int = 0):
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    try:
        yield fd
    finally:
        os.close(fd)


async def test_places_travel_instead_of_bytes(side, source, wire):
    """By hand: descriptors alone fill the reservation."""
    reservation = side.reserve()
    opened = await wire.open(reservation, shared_memory=offer_of(source))
    assert opened.takes_shared_memory
    digests = [checksum(source.read_block(block)) for block in side.source_blocks]
    await wire.shared(reservation, [0, 1, 2], side.source_blocks, digests)
    await wire.end()
    assert (await wire.call.read()).HasField("completed")
    assert side.has_all_of(source)


async def test_memory_that_changed_since_its_checksum_is_refused_and_taken_when_it_comes_again(
    side, source, wire
):
    reservation = side.reserve()
    await wire.open(reservation, shared_memory=offer_of(source))
    digests = [checksum(source.read_block(block)) for block in side.source_blocks]
    source.blocks[side.source_blocks[1]] += 1
    await wire.shared(reservation, [0, 1, 2], side.source_blocks, digests)
    assert await wire.refusal() == (1, "CHECKSUM")
    assert sorted(reservation.checksums) == [0, 2]
    digest = checksum(source.read_block(side.source_blocks[1]))
    await wire.shared(reservation, [1], [side.source_blocks[1]], [digest])
    await wire.end()
    assert (await wire.call.read()).HasField("completed")
    assert side.has_all_of(source)


async def test_what_is_kept_is_what_was_checked(side, source, wire, monkeypatch):
    """The sender's memory changes in the moment before it is copied."""
    reservation = side.reserve()
    await wire.open(reservation, shared_memory=offer_of(source))
    digest = checksum(source.read_block(5))
    real_write = side.cache.write_block

    def late_write(block, data):
        source.blocks[5] += 1
        real_write(block, data)

    monkeypatch.setattr(side.cache, "write_block", late_write)
    await wire.shared(reservation, [0], [5], [digest])
    assert await wire.refusal() == (0, "CHECKSUM")
    assert not reservation.checksums


async def test_what_landed_stays_whatever_the_sender_writes_later(side, source, wire, until):
    reservation = side.reserve()
    await wire.open(reservation, shared_memory=offer_of(source))
    data = source.read_block(5)
    await wire.shared(reservation, [0], [5], [checksum(data)])
    await until(lambda: reservation.checksums)
    source.blocks.zero_()
    # The same place again, and a place that is not the reservation's.
    await wire.shared(reservation, [0, 3], [5, 5], [checksum(source.read_block(5))] * 2)
    assert await wire.refusal() == (0, "DUPLICATE")
    assert await wire.refusal() == (3, "SHAPE")
    assert side.cache.read_block(side.target_blocks[0]) == data


@pytest.mark.parametrize("place", [8, 2**31, 2**32 - 1])
async def test_a_place_outside_the_memory_is_refused(side, source, wire, place):
    before = side.cache.blocks.clone()
    reservation = side.reserve()
    await wire.open(reservation, shared_memory=offer_of(source))
    await wire.shared(reservation, [0], [place], [0])
    assert await wire.refusal() == (0, "SHAPE")
    assert torch.equal(side.cache.blocks, before)


async def test_a_late_place_writes_nothing_after_its_reservation_was_freed(side, source, wire, until):
    reservation = side.reserve()
    await wire.open(reservation, shared_memory=offer_of(source))
    side.table.free("req-1")
    side.reserve("req-2")
    before = side.cache.blocks.clone()
    digests = [checksum(source.read_block(block)) for block in side.source_blocks]
    await wire.shared(reservation, [0, 1, 2], side.source_blocks, digests)
    for index in range(3):
        assert await wire.refusal() == (index, "GENERATION")
    assert torch.equal(side.cache.blocks, before)


async def test_places_of_another_generation_are_refused(side, source, wire):
    reservation = side.reserve()
    await wire.open(reservation, shared_memory=offer_of(source))
    await wire.shared(reservation, [0], [5], [checksum(source.read_block(5))], generation=99)
    assert await wire.refusal() == (0, "GENERATION")


@pytest.mark.parametrize(
    ("offered", "columns"), [(False, ([0], [5], [0])), (True, ([0, 1], [5], [0]))], ids=["unasked", "ragged"]
)
async def test_places_that_make_no_sense_end_the_transfer(side, source, wire, until, offered, columns):
    reservation = side.reserve()
    await wire.open(reservation, **({"shared_memory": offer_of(source)} if offered else {}))
    await wire.shared(reservation, *columns)
    assert await wire.call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: reservation.state is ReservationState.RESERVED)


@pytest.mark.parametrize(
    "changes",
    [
        {"boot_id": "00000000-0000-0000-0000-000000000000"},
        {"boot_id": ""},
        {"pid": 1},
        {"pid": 2**32 - 1},
        {"fd": 0},
        {"fd": 2**32 - 1},
        {"name": NAME_PREFIX + "0" * 32},
        {"name": ""},
        {"num_bytes": 0},
        {"num_bytes": 2048},
        {"num_bytes": 8192},
        {"num_bytes": 2**63},
    ],
    ids=str,
)
async def test_an_offer_that_is_not_true_falls_back_to_bytes(side, source, wire, until, changes):
    reservation = side.reserve()
    assert not (await wire.open(reservation, shared_memory=offer_of(source, **changes))).takes_shared_memory
    await wire.close()
    await until(lambda: reservation.state is ReservationState.RESERVED)
    assert len(side.servicer.peers) == 0
    transport = GrpcTransport(source)
    transport._offer = offer_of(source, **changes)
    await side.send_all(transport, reservation)
    await transport.close()
    assert side.has_all_of(source)
    assert len(side.servicer.peers) == 0


@pytest.mark.parametrize(
    ("num_blocks", "seals", "name"),
    [
        (8, 0, NAME_PREFIX + "test"),
        (8, fcntl.F_SEAL_GROW, NAME_PREFIX + "test"),
        (8, SEALS, "other"),
        (7.5, SEALS, NAME_PREFIX + "test"),
    ],
    ids=["unsealed", "can shrink", "another's name", "half a block"],
)
async def test_memory_that_could_kill_its_reader_is_not_mapped(side, source, wire, num_blocks, seals, name):
    num_bytes = int(num_blocks * side.shape.num_bytes)
    with memory_file(num_bytes, seals=seals, name=name) as fd:
        offer = offer_of(source, fd=fd, name=name, num_bytes=num_bytes)
        assert not (await wire.open(side.reserve(), shared_memory=offer)).takes_shared_memory


async def test_the_same_memory_whole_and_sealed_is_mapped(side, source, wire):
    """So that the refusals above are for the reasons that they name."""
    num_bytes = 8 * side.shape.num_bytes
    with memory_file(num_bytes, seals=SEALS) as fd:
        offer = offer_of(source, fd=fd, name=NAME_PREFIX + "test", num_bytes=num_bytes)
        assert (await wire.open(side.reserve(), shared_memory=offer)).takes_shared_memory


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_memory_of_another_user_is_not_mapped(side, source, wire):
    num_bytes = 8 * side.shape.num_bytes
    with memory_file(num_bytes, seals=SEALS) as fd:
        os.fchown(fd, 12345, -1)
        offer = offer_of(source, fd=fd, name=NAME_PREFIX + "test", num_bytes=num_bytes)
        assert not (await wire.open(side.reserve(), shared_memory=offer)).takes_shared_memory


async def test_a_file_that_is_no_memory_is_not_even_opened(side, source, wire, monkeypatch):
    """To open a device or a pipe can have effects."""
    opened = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *args: opened.append(path) or real_open(path, *args))
    reader, writer = os.pipe()
    assert not (
        await wire.open(side.reserve(), shared_memory=offer_of(source, fd=reader))
    ).takes_shared_memory
    os.close(reader)
    os.close(writer)
    assert not [path for path in opened if str(path).startswith("/proc")]


async def test_a_receiver_cannot_write_the_senders_memory(side, source):
    peer = side.servicer.peers.open(offer_of(source))
    message = shared_blocks.pb.SharedBlocks(generation=1, indices=[0], source_blocks=[5], checksums=[0])
    (part,) = peer.parts(message)
    assert part.data == source.view_block(5)
    with pytest.raises(TypeError, match="read-only"):
        part.data[0] = 0


async def test_no_more_senders_are_mapped_than_the_bound(side, source, until, monkeypatch):
    monkeypatch.setattr(shared_blocks, "MAX_PEERS", 1)
    first, second = GrpcTransport(source), GrpcTransport(KVCache(side.shape, 8, torch.device("cpu")))
    transfer = first.open(side.target(side.reserve("req-1").lease), 3)
    await transfer.send([(0, 5)])
    reservation = side.reserve("req-2")
    await side.send_all(second, reservation)
    assert reservation.state is ReservationState.COMPLETE
    assert len(side.servicer.peers) == 1
    await transfer.send([(1, 1), (2, 3)])
    await transfer.finish(42)
    # The first is idle now and makes room.
    await side.send_all(second, side.reserve("req-3"))
    assert len(side.servicer.peers) == 1
    await first.close()
    await second.close()


async def test_memory_is_let_go_after_a_while_and_at_once_when_a_transfer_breaks(
    side, source, shared_transport, until, monkeypatch
):
    await side.send_all(shared_transport, side.reserve("req-1"))
    assert len(side.servicer.peers) == 1
    broken = shared_transport.open(side.target(side.reserve("req-2").lease), 3)
    await broken.send([(0, 5)])
    await broken.abort()
    await until(lambda: len(side.servicer.peers) == 0)
    monkeypatch.setattr(shared_blocks, "IDLE_S", 0.05)
    await side.send_all(shared_transport, side.reserve("req-3"))
    await until(lambda: len(side.servicer.peers) == 0)


async def test_nothing_is_left_of_a_hundred_transfers_and_ten_senders(side, until, monkeypatch):
    monkeypatch.setattr(shared_blocks, "IDLE_S", 0.01)
    before = mappings()
    num_files = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        cache = KVCache(side.shape, 8, torch.device("cpu"))
        transport = GrpcTransport(cache)
        for again in range(10):
            await side.send_all(transport, side.reserve(f"{number}-{again}"))
        await transport.close()
    del cache, transport
    await until(lambda: len(side.servicer.peers) == 0)
    await until(lambda: mappings() == before)
    # Sockets close in their own time.
    await until(lambda: len(os.listdir("/proc/self/fd")) <= num_files + 1)


SENDER = """
import asyncio, sys
import torch
from engine.cache import BlockShape, KVCache
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.reservation import Lease
from kv_transfer.transport import Target

async def main():
    cache = KVCache(BlockShape(2, 4, 2, 8, torch.bfloat16), 8, torch.device("cpu"))
    cache.blocks.fill_(3)
    address, request_id, epoch, generation, secret = sys.argv[1:]
    lease = Lease(request_id, int(epoch), int(generation), bytes.fromhex(secret))
    transfer = GrpcTransport(cache).open(Target(address, lease), 3)
    await transfer.send([(0, 0)])
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_sender_killed_in_mid_transfer_leaves_the_reservation_to_another(
    side, source, shared_transport, until
):
    before = mappings()
    reservation = side.reserve()
    lease = reservation.lease
    arguments = [side.address, lease.request_id, lease.epoch, lease.generation, lease.secret.hex()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SENDER, *map(str, arguments), cwd=ROOT
    )
    try:
        async with asyncio.timeout(60):
            while not reservation.checksums:
                await asyncio.sleep(0.01)
        assert len(side.servicer.peers) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    await until(lambda: reservation.state is ReservationState.RESERVED)
    await until(lambda: len(side.servicer.peers) == 0 and mappings() == before)
    assert set(side.cache.view_block(side.target_blocks[0]).cast("H")) == {0x4040}  # 3.0
    # The block that landed stays, and is not sent again.
    transfer = shared_transport.open(side.target(lease), 3)
    await transfer.send(list(enumerate(side.source_blocks)))
    await transfer.finish(42)
    assert transfer.num_bytes == 2 * side.shape.num_bytes
    assert reservation.state is ReservationState.COMPLETE
