"""Blocks as bytes in messages of the stream, without protobuf's copies.

The wire is that of `PushRequest.blocks`, so any protobuf client or server understands the other end. Only
the work is done by hand: a sender joins small prefixes and the cache's own memory into one message, and a
receiver reads the blocks where they lie in that message. Protobuf alone would copy each three times more.
"""

from collections.abc import Iterator, Sequence

from engine.cache import KVCache
from kv_transfer.receiver import BlockPart, checksum
from kvferry.v1 import kv_transfer_pb2 as pb

# A message costs some 40 microseconds beside its bytes, which 2 MiB take about 700 to travel.
MAX_BATCH_BYTES = 2 * 2**20
MAX_BATCH_BLOCKS = 256
# Room for the fields around the bytes of so many blocks.
MESSAGE_OVERHEAD_BYTES = 64 * 1024

_LENGTH_DELIMITED = 2
_VARINT = 0
_FIXED64 = 1
# A number takes ten bytes of 7 bits at most.
_MAX_SHIFT = 56


def _tag(field_number: int) -> int:
    return field_number << 3 | _LENGTH_DELIMITED


_BLOCKS_TAG = _tag(pb.PushRequest.BLOCKS_FIELD_NUMBER)
_BLOCK_TAG = _tag(pb.Blocks.BLOCKS_FIELD_NUMBER)
_DATA_TAG = _tag(pb.Block.DATA_FIELD_NUMBER)


def max_message_bytes(block_bytes: int) -> int:
    """The largest message of a transfer."""
    return max(MAX_BATCH_BYTES, block_bytes) + MESSAGE_OVERHEAD_BYTES


class ByteCarrier:
    """A `kv_transfer.grpc_transport.Carrier`: blocks with their bytes."""

    def __init__(self, cache: KVCache, generation: int) -> None:
        self.max_blocks = min(max(1, MAX_BATCH_BYTES // cache.shape.num_bytes), MAX_BATCH_BLOCKS)
        self._cache = cache
        self._generation = generation

    def message(self, blocks: Sequence[tuple[int, int]]) -> bytes:
        return serialize([self._block(index, block) for index, block in blocks])

    def _block(self, index: int, block: int) -> tuple[pb.Block, memoryview]:
        data = self._cache.view_block(block)
        fields = pb.Block(
            index=index,
            generation=self._generation,
            checksum=checksum(data),
            layer_end=self._cache.shape.num_layers,
            head_end=self._cache.shape.num_kv_heads,
        )
        return fields, data


def serialize(blocks: Sequence[tuple[pb.Block, memoryview]]) -> bytes:
    """A `PushRequest` with these blocks, of which `data` is given apart."""
    pieces: list[bytes | memoryview] = []
    num_bytes = 0
    for fields, data in blocks:
        prefix = fields.SerializeToString() + _head(_DATA_TAG, len(data))
        head = _head(_BLOCK_TAG, len(prefix) + len(data))
        pieces += (head, prefix, data)
        num_bytes += len(head) + len(prefix) + len(data)
    return b"".join((_head(_BLOCKS_TAG, num_bytes), *pieces))


def deserialize(message: bytes) -> pb.PushRequest | list[BlockPart]:
    """The reverse for blocks; what is something else, or laid out otherwise, is left to protobuf."""
    try:
        if message[0] == _BLOCKS_TAG:
            return list(_parts(message))
    except (IndexError, _OtherLayout):
        pass
    request = pb.PushRequest.FromString(message)
    if request.HasField("blocks"):
        return [_part(block, block.data) for block in request.blocks.blocks]
    return request


class _OtherLayout(Exception):
    """Good protobuf, perhaps, but not as `serialize` writes it."""


def _parts(message: bytes) -> Iterator[BlockPart]:
    view = memoryview(message)
    at = _body(message, 1, len(message))
    while at < len(message):
        if message[at] != _BLOCK_TAG:
            raise _OtherLayout
        num_bytes, start = _varint(message, at + 1)
        end = start + num_bytes
        data_tag_at = _skip_numbers(message, start)
        if end > len(message) or message[data_tag_at] != _DATA_TAG:
            raise _OtherLayout
        data_at = _body(message, data_tag_at + 1, end)
        yield _part(pb.Block.FromString(message[start:data_tag_at]), view[data_at:end])
        at = end


def _body(message: bytes, at: int, end: int) -> int:
    """Where a field's bytes begin, whose length stands at `at`; they must be the last before `end`."""
    num_bytes, start = _varint(message, at)
    if start + num_bytes != end:
        raise _OtherLayout
    return start


def _skip_numbers(message: bytes, at: int) -> int:
    """Where the first field at or after `at` begins that is no number."""
    while (kind := message[at] & 7) in (_VARINT, _FIXED64):
        at = _varint(message, at + 1)[1] if kind == _VARINT else at + 9
    return at


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    value = shift = 0
    while message[at] > 0x7F:
        if shift > _MAX_SHIFT:
            raise _OtherLayout
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | message[at] << shift, at + 1


def _head(tag: int, length: int) -> bytes:
    head = bytearray([tag])
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head)


def _part(block: pb.Block, data: bytes | memoryview) -> BlockPart:
    return BlockPart(
        block.index,
        block.generation,
        block.checksum,
        (block.layer_begin, block.layer_end),
        (block.head_begin, block.head_end),
        data,
    )
