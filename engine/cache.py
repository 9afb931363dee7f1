"""The KV cache: one tensor in which a block is one contiguous run of bytes."""

import logging
import math
from dataclasses import dataclass

import torch

from engine.segment import Segment, segments_supported

logger = logging.getLogger(__name__)

LAYOUT = "block,layer,kv,token,head,dim"


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of one block: [num_layers, 2 (K, V), block_size, num_kv_heads, head_dim] of dtype."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one block."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Blocks of keys and values: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].

    Holds bytes, not owners: who may use which block is the allocator's to say.

    segment: on the CPU the shared memory in which the cache lies, block b at b * shape.num_bytes; None
        where it lies elsewhere. A peer on the same host may read blocks there that were promised to it.
    """

    def __init__(self, shape: BlockShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        size = (
            num_blocks,
            shape.num_layers,
            2,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self.segment = _segment(num_blocks * shape.num_bytes) if device.type == "cpu" else None
        if self.segment is not None:
            memory = torch.frombuffer(self.segment.memory, dtype=shape.dtype, count=math.prod(size))
            self.blocks = memory.view(size)
        else:
            self.blocks = torch.zeros(size, dtype=shape.dtype, device=device)
        self._block_bytes = shape.num_bytes
        # [num_blocks, block_bytes], the same memory.
        self._bytes = self.blocks.view(num_blocks, -1).view(torch.uint8)
        self._host = None if self._bytes.is_cuda else self._bytes.view(-1).numpy().data

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], strided over the blocks."""
        return self.blocks[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], strided over the blocks."""
        return self.blocks[:, layer, 1]

    def view_block(self, block: int) -> memoryview:
        """A block's bytes in host memory: on the CPU the cache's own, which change with it; else a copy."""
        if self._host is None:
            return self._bytes[block].cpu().numpy().data
        return self._host[block * self._block_bytes : (block + 1) * self._block_bytes]

    def read_block(self, block: int) -> bytes:
        """A copy of a block's bytes."""
        return self.view_block(block).tobytes()

    def write_block(self, block: int, data: bytes | memoryview) -> None:
        """Fills a block; `data` must be `shape.num_bytes` long."""
        if self._host is None:
            # A tensor over read-only memory is refused, so the bytes are copied once more on the host.
            self._bytes[block].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        else:
            self.view_block(block)[:] = data


def _segment(num_bytes: int) -> Segment | None:
    if not segments_supported():
        return None
    try:
        return Segment(num_bytes)
    except OSError as error:
        logger.warning("the KV cache is not shared (%s): blocks travel as bytes on this host too", error)
        return None
