"""The chunks of a step as one packed batch of tensors, made once and read by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
import torch

from engine.engine import Chunk


@dataclass(frozen=True, slots=True)
class Batch:
    """All tensors are on the model's device.

    token_ids, positions: int64 [1, num_tokens], chunk after chunk.
    sampled_rows: int64 [num_sampled]: the last token of each chunk that is to be sampled.
    slots: int64 [num_tokens]: where each token's KV goes: block * block_size + place in the block.
    starts: int32 [num_chunks + 1]: the first token of each chunk, then num_tokens.
    lengths: int32 [num_chunks]: tokens of each sequence in the cache, those of this step included.
    tables: int32 [num_chunks, max_blocks]: block tables, padded with 0.
    blocks: int32 [num_blocks]: the same without padding, table after table.
    block_starts: int32 [num_chunks + 1]: the first of each table in `blocks`, then num_blocks; in tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sampled_rows: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    blocks: torch.Tensor
    block_starts: torch.Tensor
    max_queries: int
    max_length: int

    @classmethod
    def pack(cls, chunks: Sequence[Chunk], block_size: int, device: torch.device) -> Self:
        """Raises `ValueError` for an empty chunk or a block table that does not cover its chunk."""
        counts = [chunk.end - chunk.start for chunk in chunks]
        starts = [0, *accumulate(counts)]
        num_blocks = [-(-chunk.end // block_size) for chunk in chunks]
        token_ids = np.empty(starts[-1], np.int64)
        positions = np.empty(starts[-1], np.int64)
        tables = np.zeros((len(chunks), max(num_blocks)), np.int32)
        for row, chunk in enumerate(chunks):
            if counts[row] < 1 or len(chunk.block_table) < num_blocks[row]:
                raise ValueError(
                    f"tokens {chunk.start} to {chunk.end} do not fit {len(chunk.block_table)} blocks"
                )
            token_ids[starts[row] : starts[row + 1]] = chunk.tokens[chunk.start : chunk.end]
            positions[starts[row] : starts[row + 1]] = np.arange(chunk.start, chunk.end)
            tables[row, : num_blocks[row]] = chunk.block_table[: num_blocks[row]]
        rows = np.repeat(np.arange(len(chunks)), counts)
        slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        used = np.arange(tables.shape[1]) < np.asarray(num_blocks)[:, None]
        sampled = [
            end - 1 for chunk, end in zip(chunks, starts[1:], strict=True) if chunk.sampling is not None
        ]

        def on_device(values: object, dtype: type) -> torch.Tensor:
            host = torch.from_numpy(np.asarray(values, dtype))
            # From pinned memory the copy does not wait for what the device still computes.
            return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

        return cls(
            token_ids=on_device(token_ids[None], np.int64),
            positions=on_device(positions[None], np.int64),
            sampled_rows=on_device(sampled, np.int64),
            slots=on_device(slots, np.int64),
            starts=on_device(starts, np.int32),
            lengths=on_device([chunk.end for chunk in chunks], np.int32),
            tables=on_device(tables, np.int32),
            blocks=on_device(tables[used], np.int32),
            block_starts=on_device([n * block_size for n in accumulate(num_blocks, initial=0)], np.int32),
            max_queries=max(counts),
            max_length=max(chunk.end for chunk in chunks),
        )
