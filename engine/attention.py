"""How a transformers model's attention reaches the paged KV cache.

transformers calls the attention function that a model's configuration names, with the keyword arguments
that were given to the model's forward. Ours is registered under `NAME`; the argument `kv_step` carries the
step. It makes no mask: a token sees the tokens of its sequence up to itself, within the layer's window.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine.batch import Batch
from engine.cache import BlockShape, KVCache
from engine.cpu_attention import CpuAttention
from engine.cuda_attention import CudaAttention
from engine.kernels import load_kernels
from engine.refusal import UnsupportedModel
from engine.torch_attention import TorchAttention

logger = logging.getLogger(__name__)

NAME = "kvferry"

# Arguments of the model's forward that come along and do not change what attention computes.
_PASSED_ALONG = frozenset({"position_ids", "cache_position", "position_embeddings", "is_causal"})


class AttentionBackend(Protocol):
    """One way to compute attention over the blocks of a cache."""

    name: str

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
        """Writes the step's keys and values into their slots, then attends over each sequence's blocks.

        query: [1, num_heads, num_tokens, head_dim]; key, value: the same with num_kv_heads; head_dim is
        contiguous. Caches: [num_blocks, block_size, num_kv_heads, head_dim], strided over the blocks.
        Token i sees tokens (i - window, i]; window 0: all up to i. softcap c turns a score s into
        c tanh(s / c); 0: none. Returns [1, num_tokens, num_heads, head_dim].
        """
        ...


class Step(Protocol):
    """What the attention function does in one call of the model."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Shapes as in `AttentionBackend.attend`."""
        ...


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step over a cache. `layers`: the layers that have attended, in order."""

    cache: KVCache
    backend: AttentionBackend
    batch: Batch
    layers: list[int] = field(default_factory=list)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        self.layers.append(layer)
        return self.backend.attend(
            query,
            key,
            value,
            self.cache.keys(layer),
            self.cache.values(layer),
            self.batch,
            scale=scale,
            window=window,
            softcap=softcap,
        )


def register() -> None:
    """Makes `NAME` known to transformers."""
    AttentionInterface.register(NAME, attention_function)


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv_step: Step | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer. Raises `UnsupportedModel` for what it would get wrong."""
    if kv_step is None:
        raise UnsupportedModel("the model does not hand keyword arguments on to its attention")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel(f"{type(module).__name__} does not say which layer it is (layer_idx)")
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} brings an attention mask of its own")
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"{type(module).__name__} is not causal")
    for name, argument in others.items():
        if name not in _PASSED_ALONG and argument is not None and argument is not False:
            raise UnsupportedModel(
                f"{type(module).__name__} needs {name}, which attention here does not have"
            )
    out = kv_step.attend(
        layer,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    return out, None


def compute_logits(model: PreTrainedModel, batch: Batch, step: Step) -> torch.Tensor:
    """One forward over a packed batch. Returns [num_sampled, vocab_size] in the model's dtype."""
    output = model(
        input_ids=batch.token_ids,
        position_ids=batch.positions,
        use_cache=False,
        logits_to_keep=batch.sampled_rows,
        kv_step=step,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def choose_backend(shape: BlockShape, device: torch.device, softcap: bool) -> AttentionBackend:
    """The fastest backend for the model; says so where that is the slow one."""
    if device.type == "cuda":
        reason = CudaAttention.why_not(shape, softcap)
        if reason is None:
            return CudaAttention(shape)
        logger.warning("attention runs in plain torch, sequence by sequence: %s", reason)
        return TorchAttention()
    reason = CpuAttention.why_not(shape)
    if reason is not None:
        logger.warning(
            "attention runs in plain torch, two to three times slower than the CPU kernel: %s", reason
        )
        return TorchAttention()
    return CpuAttention() if load_kernels() else TorchAttention()
