"""The two ends of a transfer without engines: caches of the demo model's shape, a transport, a socket."""

import asyncio
import socket
import time
from dataclasses import dataclass

import torch

from benchmarks.processes import cpu_s
from engine.cache import BlockShape, KVCache
from kv_transfer import byte_blocks
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.receiver import Receiver
from kv_transfer.reservation import Lease, Reservation, ReservationTable
from kv_transfer.server import SERVICE_NAME, KvTransferServicer, add_to_server
from kv_transfer.transport import Target
from rpc.channel import DEFAULT_MAX_MESSAGE_BYTES
from rpc.server import GrpcServer

HOST = "127.0.0.1"
# SmolLM2-135M in bf16: 23,040 bytes a token.
DEMO_SHAPE = BlockShape(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
# Blocks so small that only the cost of messages counts.
TINY_SHAPE = BlockShape(num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall and CPU seconds of one end in one transfer."""

    wall_s: float
    cpu_s: float


def _cache(shape: BlockShape, num_blocks: int, seed: int) -> KVCache:
    cache = KVCache(shape, num_blocks, torch.device("cpu"))
    cache.blocks.copy_(torch.rand(cache.blocks.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


class SenderEnd:
    """Pushes blocks of its cache, or writes them to a socket."""

    def __init__(self, shape: BlockShape, num_blocks: int) -> None:
        self._cache = _cache(shape, num_blocks, 1)
        self._segment = self._cache.segment
        self._shared = GrpcTransport(self._cache)
        # As on a device, or in another kernel: nothing to offer.
        self._cache.segment = None
        self._bytes = GrpcTransport(self._cache)

    async def push(self, address: str, lease: Lease, blocks: list[int], is_shared: bool) -> Cost:
        """One transfer, from its opening to the acknowledgement."""
        start_s, start_cpu_s = time.perf_counter(), cpu_s()
        transport = self._shared if is_shared else self._bytes
        transfer = transport.open(Target(address, lease), len(blocks))
        await transfer.send(list(enumerate(blocks)))
        await transfer.finish(1)
        return Cost(time.perf_counter() - start_s, cpu_s() - start_cpu_s)

    async def stop(self) -> None:
        """Closes the connections."""
        await self._shared.close()
        await self._bytes.close()

    async def write_to_socket(self, port: int, blocks: list[int]) -> Cost:
        """The same bytes over plain TCP, each block straight from the cache, up to a byte in answer."""
        with socket.create_connection((HOST, port)) as connection:
            start_s, start_cpu_s = time.perf_counter(), cpu_s()
            for block in blocks:
                connection.sendall(self._cache.view_block(block))
            connection.recv(1)
            return Cost(time.perf_counter() - start_s, cpu_s() - start_cpu_s)


class ReceiverEnd:
    """Takes transfers into its cache, reads blocks from a socket, copies within its own memory."""

    def __init__(self, shape: BlockShape, num_blocks: int) -> None:
        self._cache = _cache(shape, num_blocks, 2)
        self._source = _cache(shape, num_blocks, 3)
        self._table = ReservationTable(1)
        self._completed: list[Reservation] = []
        self._server = GrpcServer(
            max(DEFAULT_MAX_MESSAGE_BYTES, byte_blocks.max_message_bytes(shape.num_bytes))
        )
        receiver = Receiver(self._cache, self._table, self._completed.append)
        self._server.add(SERVICE_NAME, KvTransferServicer(receiver), add_to_server)
        self._listener = socket.create_server((HOST, 0))

    async def start(self) -> tuple[str, int]:
        """Serves; returns the address of the service and the port of the socket."""
        port = await self._server.start(HOST, 0)
        return f"{HOST}:{port}", self._listener.getsockname()[1]

    async def stop(self) -> None:
        """Ends all calls."""
        self._listener.close()
        await self._server.stop(0)

    async def reserve(self, blocks: list[int]) -> tuple[Lease, float]:
        """A lease for these blocks, and the CPU seconds used so far."""
        for reservation in self._completed:
            self._table.free(reservation.lease.request_id)
        self._completed.clear()
        return self._table.grant("benchmark", blocks, len(blocks)).lease, cpu_s()

    async def cpu_s(self) -> float:
        """CPU seconds used so far, once all blocks of the last transfer were seen to have landed."""
        (reservation,) = self._completed
        assert len(reservation.checksums) == reservation.num_prompt_blocks
        return cpu_s()

    async def read_from_socket(self, blocks: list[int]) -> Cost:
        """Takes one connection and reads the blocks straight into their places."""
        connection, _ = await asyncio.to_thread(self._listener.accept)
        with connection:
            start_s, start_cpu_s = time.perf_counter(), cpu_s()
            for block in blocks:
                view = self._cache.view_block(block)
                while view:
                    view = view[connection.recv_into(view) :]
            connection.sendall(b".")
            return Cost(time.perf_counter() - start_s, cpu_s() - start_cpu_s)

    async def copy(self, sources: list[int], blocks: list[int]) -> Cost:
        """The same blocks from one cache to another in one process, without any check."""
        start_s, start_cpu_s = time.perf_counter(), cpu_s()
        for source, block in zip(sources, blocks, strict=True):
            self._cache.write_block(block, self._source.view_block(source))
        return Cost(time.perf_counter() - start_s, cpu_s() - start_cpu_s)
