"""Blocks over gRPC: one bidirectional stream a request. Works between any two hosts."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc

from engine.cache import KVCache
from kv_transfer.receiver import BlockPart, Receiver, Refusal, checksum
from kv_transfer.reservation import Lease, LeaseRefused, Reservation
from kv_transfer.transport import Target, TransferFailed
from kvferry.v1 import common_pb2, kv_transfer_pb2_grpc
from kvferry.v1 import kv_transfer_pb2 as pb
from rpc.channel import Channels
from rpc.errors import Refused

SERVICE_NAME = "kvferry.v1.KvTransferService"
# Room for a message's fields around the block's bytes.
MESSAGE_OVERHEAD_BYTES = 64 * 1024
# A block whose checksum fails so often is not bad luck.
MAX_RESENDS = 3
# Longest silence of a peer in a transfer. Blocks come a chunk apart, and a chunk takes well under this.
IDLE_TIMEOUT_S = 30.0


def max_message_bytes(block_bytes: int) -> int:
    """The largest message of a transfer: one block and its fields."""
    return block_bytes + MESSAGE_OVERHEAD_BYTES


class GrpcTransport:
    """Pushes blocks of one cache to any KvTransferService."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._channels = Channels(max_message_bytes(cache.shape.num_bytes))

    def open(self, target: Target, num_blocks: int) -> "GrpcTransfer":
        """See `kv_transfer.transport.Transport`."""
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channels.to(target.address))
        return GrpcTransfer(stub.Push(), self._cache, target.lease, num_blocks)

    async def close(self) -> None:
        """Ends all transfers."""
        await self._channels.close()


class GrpcTransfer:
    """See `kv_transfer.transport.Transfer`."""

    def __init__(self, call: Any, cache: KVCache, lease: Lease, num_blocks: int) -> None:
        self.num_bytes = 0
        self._call = call
        self._cache = cache
        self._lease = lease
        self._num_blocks = num_blocks
        self._sent: dict[int, int] = {}  # index -> block, to send again what arrives damaged
        self._resends: Counter[int] = Counter()
        self._opening = asyncio.create_task(self._open())
        self._answers = asyncio.create_task(self._read_answers())

    async def send(self, index: int, block: int) -> None:
        await self._opening
        self._sent[index] = block
        await self._write_block(index, block)

    async def finish(self, first_token_id: int) -> None:
        await self._opening
        await self._write(pb.PushRequest(end=pb.PushEnd(first_token_id=first_token_id)))
        try:
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

    async def _open(self) -> None:
        """Shows the lease and waits for the word that it is good.

        No block is written before: a write that crosses the refusal would hide its reason
        (grpc/grpc#36066).
        """
        lease = common_pb2.Lease(
            request_id=self._lease.request_id,
            epoch=self._lease.epoch,
            generation=self._lease.generation,
            secret=self._lease.secret,
        )
        header = pb.PushHeader(
            lease=lease, block_bytes=self._cache.shape.num_bytes, num_blocks=self._num_blocks
        )
        await self._write(pb.PushRequest(header=header))
        answer = await self._read()
        if not answer.HasField("opened"):
            raise TransferFailed("the receiver did not open the transfer")

    async def _write_block(self, index: int, block: int) -> None:
        data = self._cache.read_block(block)
        shape = self._cache.shape
        part = pb.Block(
            index=index,
            generation=self._lease.generation,
            checksum=checksum(data),
            layer_end=shape.num_layers,
            head_end=shape.num_kv_heads,
            data=data,
        )
        self.num_bytes += len(data)
        await self._write(pb.PushRequest(block=part))

    async def _write(self, message: pb.PushRequest) -> None:
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
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
        await self._opening
        while not (answer := await self._read()).HasField("completed"):
            await self._handle(answer.refused)

    async def _read(self) -> pb.PushResponse:
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise TransferFailed(await self._why()) from error
        if answer is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise TransferFailed("the receiver ended the stream without taking the sequence")
        return answer  # type: ignore[no-any-return]

    async def _handle(self, refused: pb.BlockRefused) -> None:
        index = refused.index
        reason = pb.RefusalReason.Name(refused.reason)
        if refused.reason == pb.REFUSAL_REASON_DUPLICATE:
            return
        if refused.reason != pb.REFUSAL_REASON_CHECKSUM or index not in self._sent:
            raise TransferFailed(f"block {index} was refused: {reason}")
        self._resends[index] += 1
        if self._resends[index] > MAX_RESENDS:
            raise TransferFailed(f"block {index} was damaged on the way {MAX_RESENDS + 1} times")
        await self._write_block(index, self._sent[index])


_REASONS = {
    Refusal.CHECKSUM: pb.REFUSAL_REASON_CHECKSUM,
    Refusal.GENERATION: pb.REFUSAL_REASON_GENERATION,
    Refusal.SHAPE: pb.REFUSAL_REASON_SHAPE,
    Refusal.DUPLICATE: pb.REFUSAL_REASON_DUPLICATE,
}


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """The receiving end: from messages to `Receiver` and back."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PushResponse]:
        reservation = self._open(await _next(request_iterator))
        try:
            yield pb.PushResponse(opened=pb.PushOpened())
            while not reservation.is_filled:
                message = await _next(request_iterator)
                kind = message.WhichOneof("message")
                if kind == "block":
                    refusal = self._receiver.put(reservation, _part(message.block))
                    if refusal is not None:
                        refused = pb.BlockRefused(index=message.block.index, reason=_REASONS[refusal])
                        yield pb.PushResponse(refused=refused)
                elif kind == "end" and reservation.first_token_id is None:
                    self._receiver.end(reservation, message.end.first_token_id)
                else:
                    raise Refused(
                        grpc.StatusCode.INVALID_ARGUMENT, f"{kind or 'nothing'} is not expected here"
                    )
            yield pb.PushResponse(completed=pb.PushCompleted())
        finally:
            self._receiver.table.close(reservation)

    def _open(self, message: pb.PushRequest) -> Reservation:
        if not message.HasField("header"):
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "header: must be the first message")
        header = message.header
        if header.block_bytes != self._receiver.shape.num_bytes:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"block_bytes: {header.block_bytes}, but a block here has {self._receiver.shape.num_bytes}",
            )
        lease = header.lease
        try:
            reservation = self._receiver.table.open(
                Lease(lease.request_id, lease.epoch, lease.generation, lease.secret)
            )
        except LeaseRefused as error:
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"lease: {error}") from error
        if header.num_blocks != reservation.num_prompt_blocks:
            self._receiver.table.close(reservation)
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"num_blocks: {header.num_blocks}, but {reservation.num_prompt_blocks} are reserved",
            )
        return reservation


async def _next(messages: AsyncIterator[pb.PushRequest]) -> pb.PushRequest:
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            return await anext(messages)
    except TimeoutError:
        raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, f"no block for {IDLE_TIMEOUT_S:.0f} s") from None
    except StopAsyncIteration:
        raise Refused(
            grpc.StatusCode.CANCELLED, "the sender ended the stream before its last block"
        ) from None


def _part(block: pb.Block) -> BlockPart:
    return BlockPart(
        block.index,
        block.generation,
        block.checksum,
        (block.layer_begin, block.layer_end),
        (block.head_begin, block.head_end),
        block.data,
    )
