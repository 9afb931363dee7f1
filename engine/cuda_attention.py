"""Attention on CUDA: torch's own variable-length flash attention, over block tables where it can."""

import torch
from torch.nn.attention.varlen import varlen_attn

from engine.batch import Batch
from engine.cache import BlockShape
from engine.torch_attention import write_slots

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
# torch's FlashAttention 2 reads blocks in place only where a block is a multiple of so many tokens.
_PAGED_MULTIPLE = 256


class CudaAttention:
    """`varlen_attn` with a block table; blocks that it cannot read in place are gathered first."""

    name = "cuda"

    def __init__(self, shape: BlockShape) -> None:
        self._paged = shape.block_size % _PAGED_MULTIPLE == 0

    @staticmethod
    def why_not(shape: BlockShape, softcap: bool) -> str | None:
        """Why it cannot serve a model with such blocks; None if it can."""
        if shape.dtype not in _DTYPES:
            return f"flash attention takes float16 and bfloat16, not {shape.dtype}"
        if shape.head_dim % 8 or shape.head_dim > _MAX_HEAD_DIM:
            return f"flash attention takes head sizes that are multiples of 8 up to {_MAX_HEAD_DIM}"
        if softcap:
            return "torch's flash attention has no softcap"
        if torch.cuda.get_device_capability()[0] < 8:
            return "flash attention needs compute capability 8.0"
        return None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`; `softcap` must be 0."""
        if softcap:
            raise ValueError("softcap")
        write_slots(key, value, key_cache, value_cache, batch.slots)
        if self._paged:
            keys, values, tables = key_cache, value_cache, batch.tables
        else:
            # [num_blocks * block_size, num_kv_heads, head_dim], each sequence padded to whole blocks.
            keys = key_cache.index_select(0, batch.blocks).flatten(0, 1)
            values = value_cache.index_select(0, batch.blocks).flatten(0, 1)
            tables = None
        out = varlen_attn(
            query[0].transpose(0, 1),
            keys,
            values,
            batch.starts,
            batch.block_starts,
            batch.max_queries,
            batch.max_length,
            scale=scale,
            # Its window counts the tokens to the left without the token itself.
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=True,
            seqused_k=batch.lengths,
            block_table=tables,
        )
        assert isinstance(out, torch.Tensor)
        return out[None]
