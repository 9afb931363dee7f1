"""The receiving half of a transfer: from messages to `Receiver` and back."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from kv_transfer import byte_blocks
from kv_transfer.receiver import BlockPart, Receiver, Refusal
from kv_transfer.reservation import Lease, LeaseRefused, Writing
from kv_transfer.shared_blocks import Peer, SharedMemoryPeers, max_batch_blocks
from kv_transfer.transport import IDLE_TIMEOUT_S
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1 import kv_transfer_pb2_grpc
from rpc.errors import Refused

SERVICE_NAME = "kvferry.v1.KvTransferService"

_Message = pb.PushRequest | list[BlockPart]

_REASONS = {
    Refusal.CHECKSUM: pb.REFUSAL_REASON_CHECKSUM,
    Refusal.GENERATION: pb.REFUSAL_REASON_GENERATION,
    Refusal.SHAPE: pb.REFUSAL_REASON_SHAPE,
    Refusal.DUPLICATE: pb.REFUSAL_REASON_DUPLICATE,
}


def add_to_server(servicer: "KvTransferServicer", server: grpc.aio.Server) -> None:
    """Registers the servicer. As the generated function does it, but for how blocks of bytes are read."""
    push = grpc.stream_stream_rpc_method_handler(
        servicer.Push,
        request_deserializer=byte_blocks.deserialize,
        response_serializer=pb.PushResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE_NAME, {"Push": push})])


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """KvTransferService over a receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self.peers = SharedMemoryPeers(receiver.shape)
        self._receiver = receiver
        # Copied and checked without a pause for other work: about a millisecond.
        self._max_stretch_blocks = max_batch_blocks(receiver.shape)

    async def Push(
        self, request_iterator: AsyncIterator[_Message], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PushResponse]:
        header = _header(await _next(request_iterator))
        writing = self._open(header)
        reservation = writing.reservation
        peer = self.peers.open(header.shared_memory)
        try:
            opened = pb.PushOpened(takes_shared_memory=peer is not None, landed=reservation.checksums)
            yield pb.PushResponse(opened=opened)
            while not reservation.is_filled:
                message = await _next(request_iterator)
                if not writing.is_current:
                    raise _denied("another writer has taken over")
                if isinstance(message, pb.PushRequest) and message.HasField("end"):
                    self._end(writing, message.end)
                    continue
                for number, part in enumerate(_parts(message, peer), start=1):
                    refusal = self._receiver.put(writing, part)
                    if refusal is not None:
                        refused = pb.BlockRefused(index=part.index, reason=_REASONS[refusal])
                        yield pb.PushResponse(refused=refused)
                    if number % self._max_stretch_blocks == 0:
                        await asyncio.sleep(0)
            yield pb.PushResponse(completed=pb.PushCompleted())
        finally:
            self._receiver.table.close(writing)
            if peer is not None:
                self.peers.close(header.shared_memory, reservation.is_filled)

    def _open(self, header: pb.PushHeader) -> Writing:
        if header.block_bytes != self._receiver.shape.num_bytes:
            raise _invalid(
                f"block_bytes: {header.block_bytes}, but a block here has {self._receiver.shape.num_bytes}"
            )
        lease = header.lease
        try:
            writing = self._receiver.table.open(
                Lease(lease.request_id, lease.epoch, lease.generation, lease.secret), header.writer
            )
        except LeaseRefused as error:
            raise _denied(str(error)) from error
        num_blocks = writing.reservation.num_blocks_to_fill
        if header.num_blocks != num_blocks:
            self._receiver.table.close(writing)
            raise _invalid(f"num_blocks: {header.num_blocks}, but {num_blocks} are reserved")
        return writing

    def _end(self, writing: Writing, end: pb.PushEnd) -> None:
        if writing.reservation.first_token_id is not None:
            raise _invalid("end: is not expected twice")
        self._receiver.end(writing, end.first_token_id)


async def _next(messages: AsyncIterator[_Message]) -> _Message:
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            return await anext(messages)
    except TimeoutError:
        raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, f"no block for {IDLE_TIMEOUT_S:.0f} s") from None
    except StopAsyncIteration:
        raise Refused(
            grpc.StatusCode.CANCELLED, "the sender ended the stream before its last block"
        ) from None


def _header(message: _Message) -> pb.PushHeader:
    if not isinstance(message, pb.PushRequest) or not message.HasField("header"):
        raise _invalid("header: must be the first message")
    return message.header


def _parts(message: _Message, peer: Peer | None) -> Iterable[BlockPart]:
    """The blocks of a message."""
    if isinstance(message, list):
        return message
    kind = message.WhichOneof("message")
    if kind != "shared_blocks" or peer is None:
        raise _invalid(f"{kind or 'nothing'} is not expected here")
    shared = message.shared_blocks
    if not len(shared.indices) == len(shared.source_blocks) == len(shared.checksums):
        raise _invalid("shared_blocks: the lists differ in length")
    return peer.parts(shared)


def _denied(message: str) -> Refused:
    return Refused(grpc.StatusCode.PERMISSION_DENIED, f"lease: {message}")


def _invalid(message: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)
