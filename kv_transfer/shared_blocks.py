"""Blocks that stay in the sender's shared memory until the receiver copies them: only their places travel.

The receiver maps the sender's memory for reading and copies a block when its message has come, under the
same checks as a block of bytes. So a sender can write nothing of the receiver's, late or early, and neither
end has to be configured: the sender offers its memory, and a receiver that is not on the same kernel, cannot
open the file or does not find it as offered asks for bytes.
"""

import asyncio
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.cache import BlockShape, KVCache
from engine.segment import NAME_PREFIX, SEALS
from kv_transfer.receiver import BlockPart, checksum
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

# Messages are small, so this bounds only how long the event loops copy and check without a pause: 1 ms.
MAX_BATCH_BYTES = 8 * 2**20
# More workers on one host than anyone runs; a bound on open files and on memory that is kept from the system.
MAX_PEERS = 64
# A mapping keeps a dead sender's memory; one that lives is quicker to read while it stays mapped.
IDLE_S = 10.0


def max_batch_blocks(shape: BlockShape) -> int:
    """The most blocks in one message."""
    return max(1, MAX_BATCH_BYTES // shape.num_bytes)


def boot_id() -> str:
    """Names the running kernel; empty where it has no name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def offer(cache: KVCache) -> pb.SharedMemory | None:
    """What a receiver needs to find the cache; None where the cache cannot be shared."""
    boot = boot_id()
    if cache.segment is None or not boot:
        return None
    segment = cache.segment
    return pb.SharedMemory(
        boot_id=boot, pid=os.getpid(), fd=segment.fd, name=segment.name, num_bytes=segment.num_bytes
    )


class SharedCarrier:
    """A `kv_transfer.grpc_transport.Carrier`: places and checksums."""

    def __init__(self, cache: KVCache, generation: int) -> None:
        self.max_blocks = max_batch_blocks(cache.shape)
        self._cache = cache
        self._generation = generation

    def message(self, blocks: Sequence[tuple[int, int]]) -> bytes:
        shared = pb.SharedBlocks(
            generation=self._generation,
            indices=[index for index, _ in blocks],
            source_blocks=[block for _, block in blocks],
            checksums=[checksum(self._cache.view_block(block)) for _, block in blocks],
        )
        return pb.PushRequest(shared_blocks=shared).SerializeToString()


_Key = tuple[int, int, str]


class Peer:
    """A sender's memory, mapped here."""

    def __init__(self, memory: mmap.mmap, shape: BlockShape) -> None:
        self.num_transfers = 0
        self.drop: asyncio.TimerHandle | None = None
        self._bytes = memoryview(memory)
        self._shape = shape

    def parts(self, message: pb.SharedBlocks) -> Iterator[BlockPart]:
        """The blocks that a message names; one that is not there has no bytes."""
        layers, heads = (0, self._shape.num_layers), (0, self._shape.num_kv_heads)
        num_bytes = self._shape.num_bytes
        columns = zip(message.indices, message.source_blocks, message.checksums, strict=True)
        for index, source, digest in columns:
            data = self._bytes[source * num_bytes : (source + 1) * num_bytes]
            yield BlockPart(index, message.generation, digest, layers, heads, data, is_shared=True)


class SharedMemoryPeers:
    """The senders on this host whose memory is mapped. Call it on one event loop."""

    def __init__(self, shape: BlockShape) -> None:
        self._shape = shape
        self._boot_id = boot_id()
        # By process, descriptor and random name: another incarnation of a sender is another peer.
        self._peers: dict[_Key, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def open(self, offered: pb.SharedMemory) -> Peer | None:
        """The memory that a sender offers, for one transfer; None where bytes are to be sent instead."""
        if not self._boot_id or offered.boot_id != self._boot_id:
            return None
        peer = self._peers.get(_key(offered)) or self._add(offered)
        if peer is None:
            return None
        peer.num_transfers += 1
        if peer.drop is not None:
            peer.drop.cancel()
        return peer

    def close(self, offered: pb.SharedMemory, is_complete: bool) -> None:
        """Ends a transfer's use. Its memory stays mapped for a while, unless the transfer was broken off."""
        key = _key(offered)
        peer = self._peers[key]
        peer.num_transfers -= 1
        if peer.num_transfers == 0:
            idle_s = IDLE_S if is_complete else 0
            peer.drop = asyncio.get_running_loop().call_later(idle_s, self._drop, key)

    def _add(self, offered: pb.SharedMemory) -> Peer | None:
        if len(self._peers) >= MAX_PEERS:
            idle = next((key for key, peer in self._peers.items() if peer.num_transfers == 0), None)
            if idle is None:
                return None
            self._drop(idle)
        memory = _map(offered, self._shape.num_bytes)
        if memory is None:
            return None
        peer = self._peers[_key(offered)] = Peer(memory, self._shape)
        return peer

    def _drop(self, key: _Key) -> None:
        """Unmaps once nothing refers to the memory any more."""
        peer = self._peers.pop(key)
        if peer.drop is not None:
            peer.drop.cancel()


def _key(offered: pb.SharedMemory) -> _Key:
    return offered.pid, offered.fd, offered.name


def _map(offered: pb.SharedMemory, block_bytes: int) -> mmap.mmap | None:
    """Maps offered memory for reading; None where it is not all that it should be."""
    path = f"/proc/{offered.pid}/fd/{offered.fd}"
    try:
        # Looked at before it is opened: to open some other file of a process can have effects.
        if not offered.name.startswith(NAME_PREFIX) or not _is_named(path, offered.name):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        # As it is between two containers on one host.
        logger.debug("shared memory of process %d cannot be opened: %s", offered.pid, error)
        return None
    try:
        reason = _why_not(fd, offered, block_bytes)
        if reason is None:
            return mmap.mmap(fd, offered.num_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        reason = str(error)
    finally:
        os.close(fd)
    logger.warning("shared memory of process %d is not used: %s", offered.pid, reason)
    return None


def _is_named(path: str, name: str) -> bool:
    return os.readlink(path) == f"/memfd:{name} (deleted)"


def _why_not(fd: int, offered: pb.SharedMemory, block_bytes: int) -> str | None:
    """What keeps an open file from being mapped."""
    status = os.fstat(fd)
    if not _is_named(f"/proc/self/fd/{fd}", offered.name):
        return "it has another name"
    if status.st_uid != os.geteuid():
        return "it is another user's"
    if not offered.num_bytes == status.st_size > 0 or status.st_size % block_bytes:
        return (
            f"{offered.num_bytes} bytes are offered, it has {status.st_size}, and a block has {block_bytes}"
        )
    # To read a mapping beyond a file's end is death by SIGBUS; sealed, the file cannot shrink.
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        return "it is not sealed"
    return None
