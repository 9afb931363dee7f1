"""The sending half of a transfer: one bidirectional gRPC stream a request, between any two hosts.

header, with an offer of shared memory --> opened --> blocks, as bytes or as places --> end --> completed
                                                        ^-- refused: damaged, send again
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grpc

from engine.cache import KVCache
from kv_transfer import shared_blocks
from kv_transfer.byte_blocks import ByteCarrier, max_message_bytes
from kv_transfer.reservation import Lease
from kv_transfer.shared_blocks import SharedCarrier
from kv_transfer.transport import IDLE_TIMEOUT_S, Target, TransferFailed
from kvferry.v1 import common_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from rpc.channel import Channels

PUSH_METHOD = "/kvferry.v1.KvTransferService/Push"
# A block whose checksum fails so often is not bad luck.
MAX_RESENDS = 3


class Carrier(Protocol):
    """How blocks travel. max_blocks: the most that go in one message."""

    max_blocks: int

    def message(self, blocks: Sequence[tuple[int, int]]) -> bytes:
        """A serialised PushRequest: of each block its place in the sequence and in the cache."""
        ...


class GrpcTransport:
    """Pushes blocks of one cache to any KvTransferService."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._offer = shared_blocks.offer(cache)
        self._channels = Channels(max_message_bytes(cache.shape.num_bytes))

    def open(self, target: Target, num_blocks: int) -> "GrpcTransfer":
        """See `kv_transfer.transport.Transport`."""
        push: Any = self._channels.to(target.address).stream_stream(
            PUSH_METHOD,
            # They come serialised: those with blocks are made without protobuf.
            request_serializer=None,
            response_deserializer=pb.PushResponse.FromString,
        )
        header = pb.PushHeader(
            block_bytes=self._cache.shape.num_bytes,
            num_blocks=num_blocks,
            shared_memory=self._offer,
            writer=target.writer,
        )
        return GrpcTransfer(push(), self._cache, target.lease, header)

    async def close(self) -> None:
        """Ends all transfers."""
        await self._channels.close()


class GrpcTransfer:
    """See `kv_transfer.transport.Transfer`."""

    def __init__(self, call: Any, cache: KVCache, lease: Lease, header: pb.PushHeader) -> None:
        self.num_bytes = 0
        self._call = call
        self._cache = cache
        self._lease = lease
        self._sent: dict[int, int] = {}  # index -> block, to send again what arrives damaged
        self._landed: frozenset[int] = frozenset()  # What a former writer has brought.
        self._resends: Counter[int] = Counter()
        # gRPC takes one message at a time, and a damaged block is sent again while others are on their way.
        self._writing = asyncio.Lock()
        self._opening = asyncio.create_task(self._open(header))
        self._answers = asyncio.create_task(self._read_answers())

    async def send(self, blocks: Sequence[tuple[int, int]]) -> None:
        carrier = await self._opening
        lacking = [(index, block) for index, block in blocks if index not in self._landed]
        self._sent.update(lacking)
        await self._write_blocks(carrier, lacking)

    async def finish(self, first_token_id: int) -> None:
        try:
            await self._opening
            end = pb.PushRequest(end=pb.PushEnd(first_token_id=first_token_id))
            await self._write(end.SerializeToString())
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                await self._answers
        except TimeoutError:
            raise TransferFailed(f"no acknowledgement within {IDLE_TIMEOUT_S:.0f} s") from None
        finally:
            await self.abort()

    async def abort(self) -> None:
        self._call.cancel()
        self._opening.cancel()
        self._answers.cancel()
        await asyncio.gather(self._opening, self._answers, return_exceptions=True)

    async def _open(self, header: pb.PushHeader) -> Carrier:
        """Shows the lease, waits for the word that it is good, and learns how blocks are to travel.

        No block is written before: a write that crosses the refusal would hide its reason
        (grpc/grpc#36066).
        """
        lease = self._lease
        header.lease.CopyFrom(
            common_pb2.Lease(
                request_id=lease.request_id,
                epoch=lease.epoch,
                generation=lease.generation,
                secret=lease.secret,
            )
        )
        await self._write(pb.PushRequest(header=header).SerializeToString())
        answer = await self._read()
        if not answer.HasField("opened"):
            raise TransferFailed("the receiver did not open the transfer")
        self._landed = frozenset(answer.opened.landed)
        carrier = SharedCarrier if answer.opened.takes_shared_memory else ByteCarrier
        return carrier(self._cache, lease.generation)

    async def _write_blocks(self, carrier: Carrier, blocks: Sequence[tuple[int, int]]) -> None:
        for batch in _batched(blocks, carrier.max_blocks):
            await self._write(carrier.message(batch))
            self.num_bytes += len(batch) * self._cache.shape.num_bytes

    async def _write(self, message: bytes) -> None:
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S), self._writing:
                await self._call.write(message)
        except TimeoutError:
            raise TransferFailed(f"the receiver took nothing for {IDLE_TIMEOUT_S:.0f} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise TransferFailed(await self._why()) from error

    async def _why(self) -> str:
        """The status that the stream ended with; the error of a write does not carry it."""
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            return str(await self._call.details() or (await self._call.code()).name)

    async def _read_answers(self) -> None:
        """Returns once the receiver owns the sequence; sends damaged blocks again until then."""
        carrier = await self._opening
        while not (answer := await self._read()).HasField("completed"):
            await self._handle(answer.refused, carrier)

    async def _read(self) -> pb.PushResponse:
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise TransferFailed(await self._why()) from error
        if answer is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise TransferFailed("the receiver ended the stream without taking the sequence")
        return answer  # type: ignore[no-any-return]

    async def _handle(self, refused: pb.BlockRefused, carrier: Carrier) -> None:
        index = refused.index
        reason = pb.RefusalReason.Name(refused.reason)
        if refused.reason == pb.REFUSAL_REASON_DUPLICATE:
            return
        if refused.reason != pb.REFUSAL_REASON_CHECKSUM or index not in self._sent:
            raise TransferFailed(f"block {index} was refused: {reason}")
        self._resends[index] += 1
        if self._resends[index] > MAX_RESENDS:
            raise TransferFailed(f"block {index} was damaged on the way {MAX_RESENDS + 1} times")
        await self._write_blocks(carrier, [(index, self._sent[index])])


def _batched(blocks: Sequence[tuple[int, int]], max_blocks: int) -> Iterator[Sequence[tuple[int, int]]]:
    return (blocks[at : at + max_blocks] for at in range(0, len(blocks), max_blocks))
