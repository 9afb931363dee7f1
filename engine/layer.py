"""A decoder's layers on the CPU, each in one call: `csrc/layer.cpp`.

With few rows a layer's modules take longer to call each other than to compute. A layer of the common form
(norm, attention with rotary embeddings, norm, gated feed-forward layer, each added to its input) is replaced
by one call, if that computes the same on random input; any other stays as it is.
"""

from typing import Any

import torch

from engine.attention import PagedStep, Step
from engine.batch import Batch
from engine.cache import BlockShape, KVCache
from engine.cpu_attention import CpuAttention
from engine.engine import Chunk
from engine.fused import FusedRMSNorm, FusedSwiGLU
from engine.linear import PackedLinear
from engine.refusal import UnsupportedModel

_PARTS = {
    "input_layernorm": FusedRMSNorm,
    "post_attention_layernorm": FusedRMSNorm,
    "mlp": FusedSwiGLU,
    "self_attn": torch.nn.Module,
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_TRIAL_TOKENS = 11


class FusedLayer(torch.nn.Module):
    """Computes what `original` does, whose modules are replaced already. Without a step over a cache it
    leaves the work to `original`.

    scale, window, softcap: what `original` tells attention.
    """

    def __init__(self, original: torch.nn.Module, scale: float, window: int, softcap: float) -> None:
        super().__init__()
        self.original = original
        parts: Any = original
        first, second, mlp = parts.input_layernorm, parts.post_attention_layernorm, parts.mlp
        linears = [getattr(parts.self_attn, name) for name in _PROJECTIONS]
        packed = [linear.packed for linear in linears]
        self._weights = [first.weight, *packed, second.weight, *(linear.packed for linear in mlp.linears)]
        self._biases = [linear.bias for linear in linears]
        self._norms = [float(number) for norm in (first, second) for number in norm.constants]
        self._num_inner = mlp.linears[0].out_features
        self._layer = parts.self_attn.layer_idx
        self._constants = (scale, window, softcap)
        self._linear = linears[0]
        self._compute = torch.ops.kvferry.decoder_layer.default

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: Any = None,
        kv_step: Step | None = None,
        **others: Any,
    ) -> Any:
        """As the original's."""
        if (
            not isinstance(kv_step, PagedStep)
            or not isinstance(kv_step.backend, CpuAttention)
            or self._linear.takes_kept_weight(hidden_states)
        ):
            return self.original(
                hidden_states, position_embeddings=position_embeddings, kv_step=kv_step, **others
            )
        kv_step.layers.append(self._layer)
        batch = kv_step.batch
        return self._compute(
            hidden_states,
            *position_embeddings,
            self._weights,
            self._biases,
            self._norms,
            self._num_inner,
            kv_step.cache.blocks,
            self._layer,
            batch.slots,
            batch.starts,
            batch.lengths,
            batch.tables,
            *self._constants,
        )

    __call__ = forward  # without hooks


class FusedLayers(torch.nn.ModuleList):
    """A list of layers of which a model takes all by a slice: that makes no new list at every step."""

    def __getitem__(self, index: Any) -> Any:
        """As a list's."""
        whole = range(len(self))
        return self if isinstance(index, slice) and whole[index] == whole else super().__getitem__(index)


def fuse_layers(model: torch.nn.Module) -> int:
    """Replaces in `model` the layers that can be, after their modules were; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not torch.nn.ModuleList:
                continue
            fused = [fused_layer(layer) for layer in child]
            if any(layer is not None for layer in fused):
                layers = [new or old for new, old in zip(fused, child, strict=True)]
                setattr(parent, name, FusedLayers(layers))
                count += sum(layer is not None for layer in fused)
    return count


def fused_layer(layer: torch.nn.Module) -> FusedLayer | None:
    """The same as `layer`; None if it is no layer that we know."""
    children = dict(layer.named_children())
    if children.keys() != _PARTS.keys() or not all(isinstance(children[n], t) for n, t in _PARTS.items()):
        return None
    attention: Any = children["self_attn"]
    linears: dict[str, Any] = dict(attention.named_children())
    if linears.keys() != set(_PROJECTIONS) or not all(type(m) is PackedLinear for m in linears.values()):
        return None
    head_dim = getattr(attention, "head_dim", 0)
    num_outputs = linears["k_proj"].out_features
    if not head_dim or num_outputs % head_dim:
        return None
    # Layers before it have a place in the cache, too.
    num_layers = getattr(attention, "layer_idx", 0) + 1
    return _tried(layer, BlockShape(num_layers, 4, num_outputs // head_dim, head_dim, torch.bfloat16))


class _Recorder(CpuAttention):
    """Attention that keeps what it was told."""

    constants: tuple[float, int, float] | None = None

    def attend(self, *tensors: Any, scale: float, window: int, softcap: float) -> torch.Tensor:
        """As `AttentionBackend.attend`."""
        self.constants = (scale, window, softcap)
        return super().attend(*tensors, scale=scale, window=window, softcap=softcap)


def _tried(layer: Any, shape: BlockShape) -> FusedLayer | None:
    """The fused layer, if on a prompt and a single token it computes exactly what `layer` does."""
    generator = torch.Generator().manual_seed(1)
    cache = KVCache(shape, 2 * _TRIAL_TOKENS, torch.device("cpu"))
    before = torch.randn(cache.blocks.shape, generator=generator).to(shape.dtype)
    tokens = range(_TRIAL_TOKENS)
    chunks = [
        Chunk(tokens, start, _TRIAL_TOKENS, table, _TRIAL_TOKENS, None)
        for start, table in ((0, [5, 1, 3]), (_TRIAL_TOKENS - 1, [0, 4, 2]))
    ]
    batch = Batch.pack(chunks, shape.block_size, torch.device("cpu"))
    num_tokens = batch.token_ids.shape[1]
    hidden = torch.randn(1, num_tokens, layer.input_layernorm.weight.shape[0], generator=generator)
    angles = 3 * torch.randn(1, num_tokens, shape.head_dim, generator=generator)
    recorder = _Recorder()
    arguments = {
        "position_embeddings": (angles.cos().to(shape.dtype), angles.sin().to(shape.dtype)),
        "position_ids": batch.positions,
        "kv_step": PagedStep(cache, recorder, batch),
    }

    def run(module: torch.nn.Module) -> tuple[Any, torch.Tensor]:
        cache.blocks.copy_(before)
        return module(hidden.to(shape.dtype), **arguments), cache.blocks.clone()

    try:
        wanted, wanted_blocks = run(layer)
    except (TypeError, ValueError, RuntimeError, AttributeError, UnsupportedModel):
        return None
    if not isinstance(wanted, torch.Tensor) or recorder.constants is None:
        return None
    fused = FusedLayer(layer, *recorder.constants)
    got, got_blocks = run(fused)
    return fused if torch.equal(got, wanted) and torch.equal(got_blocks, wanted_blocks) else None
