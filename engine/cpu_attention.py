"""Attention on a CPU: the C++ kernel of `csrc/`."""

import torch

from engine.batch import Batch
from engine.cache import BlockShape

MAX_HEAD_DIM = 256


class CpuAttention:
    """`torch.ops.kvferry.paged_attention`, which `engine.kernels.load_kernels` must have loaded."""

    name = "cpu"

    def __init__(self) -> None:
        self._paged_attention = torch.ops.kvferry.paged_attention.default

    @staticmethod
    def why_not(shape: BlockShape) -> str | None:
        """Why the kernel cannot serve a model with such blocks; None if it can."""
        if shape.head_dim % 8 or shape.head_dim > MAX_HEAD_DIM:
            return f"it takes head sizes that are multiples of 8 up to {MAX_HEAD_DIM}, not {shape.head_dim}"
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
        """As `AttentionBackend.attend`."""
        out: torch.Tensor = self._paged_attention(
            query,
            key,
            value,
            key_cache,
            value_cache,
            batch.slots,
            batch.starts,
            batch.lengths,
            batch.tables,
            scale,
            window,
            softcap,
        )
        return out
