"""Attention in plain torch, sequence by sequence: for machines without a kernel, and to test against."""

import torch
import torch.nn.functional as F  # noqa: N812

from engine.batch import Batch


class TorchAttention:
    """Gathers each sequence's keys and values and calls torch's attention. Any device and dtype."""

    name = "torch"

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
        write_slots(key, value, key_cache, value_cache, batch.slots)
        block_size = key_cache.shape[1]
        starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
        outs = []
        for row, length in enumerate(lengths):
            blocks = batch.tables[row, : -(-length // block_size)]
            # [num_kv_heads, length, head_dim]
            keys = key_cache[blocks].flatten(0, 1)[:length].transpose(0, 1)
            values = value_cache[blocks].flatten(0, 1)[:length].transpose(0, 1)
            queries = query[0, :, starts[row] : starts[row + 1]]
            outs.append(_attend_one(queries, keys, values, scale, window, softcap))
        return torch.cat(outs)[None]


def write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Copies keys and values [1, num_kv_heads, num_tokens, head_dim] into their slots of the caches."""
    block_size = key_cache.shape[1]
    blocks, places = slots // block_size, slots % block_size
    key_cache[blocks, places] = key[0].transpose(0, 1)
    value_cache[blocks, places] = value[0].transpose(0, 1)


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """The last tokens of one sequence, query [num_heads, num_queries, head_dim], over all its tokens."""
    num_heads, num_queries, head_dim = query.shape
    num_kv_heads, length, _ = keys.shape
    # The heads that share a key head are more queries of that head: keys are not repeated.
    query = query.reshape(num_kv_heads, -1, head_dim)
    positions = torch.arange(length - num_queries, length, device=query.device)
    seen = torch.arange(length, device=query.device) <= positions[:, None]
    if window:
        seen &= torch.arange(length, device=query.device) > positions[:, None] - window
    mask = seen.repeat(num_heads // num_kv_heads, 1)
    if softcap:
        scores = softcap * torch.tanh(query.float() @ keys.float().mT * (scale / softcap))
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out = (weights @ values.float()).to(query.dtype)
    else:
        out = F.scaled_dot_product_attention(query[None], keys[None], values[None], mask, scale=scale)[0]
    return out.reshape(num_heads, num_queries, head_dim).transpose(0, 1)
