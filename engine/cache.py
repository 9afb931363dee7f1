"""The KV cache: one tensor in which a block is one contiguous run of bytes."""

from dataclasses import dataclass

import numpy as np
import torch

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
    """

    def __init__(self, shape: BlockShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.blocks = torch.zeros(
            num_blocks,
            shape.num_layers,
            2,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_dim,
            dtype=shape.dtype,
            device=device,
        )
        # [num_blocks, block_bytes], the same memory.
        self._bytes = self.blocks.view(num_blocks, -1).view(torch.uint8)

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], strided over the blocks."""
        return self.blocks[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], strided over the blocks."""
        return self.blocks[:, layer, 1]

    def read_block(self, block: int) -> bytes:
        """A copy of a block's bytes."""
        return self._bytes[block].cpu().numpy().tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        """Fills a block; `data` must be `shape.num_bytes` long."""
        source = np.frombuffer(data, dtype=np.uint8)
        if self._bytes.is_cuda:
            # A tensor over read-only memory is refused, so the bytes are copied once more on the host.
            self._bytes[block].copy_(torch.from_numpy(source.copy()))
        else:
            self._bytes[block].numpy()[:] = source
