"""What stands between a decoder's linear layers, in one call instead of many: `csrc/fused.cpp`.

With few rows a bfloat16 model spends as long in small operations as in its products. Those are replaced
whose meaning we know: RMS norms, rotary embeddings and gated feed-forward layers with SiLU. A module is
taken for one of them by its form, and replaced only if it computes the same on random input; any other
stays as it is. The replacements round where transformers' modules do.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers.utils import deprecation

from engine.linear import PackedLinear, can_pack

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ROTARY = "apply_rotary_pos_emb"
Rotated = tuple[torch.Tensor, torch.Tensor]


class FusedRMSNorm(torch.nn.Module):
    """weight: [size]. Computes x / sqrt(mean(x^2) + epsilon) * (weight + offset) along the last dimension."""

    def __init__(self, weight: torch.Tensor, epsilon: float, offset: float, round_first: bool) -> None:
        super().__init__()
        self.weight = weight
        self.constants = (epsilon, offset, round_first)
        self._norm = torch.ops.kvferry.rms_norm.default

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._norm(hidden_states, self.weight, *self.constants)
        return out

    __call__ = forward  # without hooks, which cost as much as the call


class FusedSwiGLU(torch.nn.Module):
    """Computes down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self.linears = (gate, up, down)
        self._weights = (gate.packed, up.packed, down.packed, gate.out_features, down.out_features)
        self._swiglu = torch.ops.kvferry.swiglu.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.linears
        if gate.takes_kept_weight(x):
            return down(functional.silu(gate(x)) * up(x))
        out: torch.Tensor = self._swiglu(x, *self._weights)
        return out

    __call__ = forward


def fuse(model: torch.nn.Module) -> int:
    """Replaces in `model`, which is in evaluation mode, what can be; returns how many places. Comes before
    `swap_linears`: it knows feed-forward layers by their linears."""
    count = 0
    forwards: dict[type, Callable[..., Any] | None] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = fused_norm(child) or fused_swiglu(child)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
        kind = type(parent)
        if kind not in forwards:
            forwards[kind] = forward_with_fused_rotary(kind)
        forward = forwards[kind]
        if forward is not None and "forward" not in vars(parent):
            # Of this instance alone: the class may serve others in this process.
            parent.forward = types.MethodType(forward, parent)
            count += 1
    return count


def fused_norm(module: torch.nn.Module) -> FusedRMSNorm | None:
    """The same as `module`; None if it is no RMS norm that we know."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, torch.nn.Parameter)
        and isinstance(epsilon, float)
        and len(list(module.parameters())) == 1
        and weight.dim() == 1
        and _takes_one(module, weight)
    ):
        return None
    # Small rows show where epsilon goes.
    x = _random(4, weight.shape[0]) * torch.tensor([[1e-3], [0.1], [1], [100]], dtype=torch.bfloat16)
    wanted = module(x)
    for offset in (0.0, 1.0):  # Gemma keeps weights less 1
        for round_first in (True, False):
            fused = FusedRMSNorm(weight.detach(), epsilon, offset, round_first)
            got = fused(x)
            # Sums in another order may tip a rounding, rarely.
            same = (got == wanted).float().mean().item() > 0.98
            if same and torch.allclose(got, wanted, rtol=2**-7, atol=0):
                return fused
    return None


def fused_swiglu(module: torch.nn.Module) -> FusedSwiGLU | None:
    """The same as `module`; None if it is no gated feed-forward layer with SiLU and without biases."""
    children = dict(module.named_children())
    linears = [child for name in _PROJECTIONS if type(child := children.get(name)) is torch.nn.Linear]
    if len(linears) != len(_PROJECTIONS) or len(list(module.parameters())) != len(_PROJECTIONS):
        return None
    if not all(can_pack(linear) and _takes_one(module, linear.weight) for linear in linears):
        return None
    fused = FusedSwiGLU(*(PackedLinear(linear) for linear in linears))
    # Large rows show a limit on the activations.
    x = _random(4, linears[0].in_features) * torch.tensor([[0.1], [1], [10], [100]], dtype=torch.bfloat16)
    wanted, got = module(x).float(), fused(x).float()
    close = (got - wanted).norm(dim=1) <= 0.01 * wanted.norm(dim=1)
    return fused if close.all() else None


def forward_with_fused_rotary(kind: type) -> Callable[..., Any] | None:
    """`kind.forward` calling our rotary embedding; None where it calls none that we know."""
    forward = getattr(kind, "forward", None)
    # transformers' wrapper that renames old arguments: nobody here passes those.
    while isinstance(forward, types.FunctionType) and forward.__globals__["__name__"] == deprecation.__name__:
        forward = getattr(forward, "__wrapped__", None)
    if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    original = forward.__globals__.get(_ROTARY)
    if original is None or not _is_known_rotary(original):
        return None
    names = {**forward.__globals__, _ROTARY: fused_rotary(original)}
    changed = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def fused_rotary(original: Callable[..., Rotated]) -> Callable[..., Rotated]:
    """`original`, a model's `apply_rotary_pos_emb`, by our kernel wherever that takes its arguments."""
    rotary = torch.ops.kvferry.rotary.default

    def rotate(
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *others: Any,
        **named: Any,
    ) -> Rotated:
        if others or named or query.dtype != torch.bfloat16 or query.shape[0] != 1:
            return original(query, key, cos, sin, *others, **named)
        if cos.shape != (1, query.shape[2], query.shape[3]) or cos.dtype != query.dtype:
            return original(query, key, cos, sin)
        rotated: Rotated = rotary(query, key, cos, sin)
        return rotated

    return rotate


def _is_known_rotary(function: Callable[..., Any]) -> bool:
    query, key = _random(1, 3, 5, 64), _random(1, 1, 5, 64)
    cos, sin = _random(1, 5, 64), _random(1, 5, 64)
    try:
        wanted = function(query, key, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False
    got = torch.ops.kvferry.rotary.default(query, key, cos, sin)
    return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def _takes_one(module: torch.nn.Module, weight: torch.Tensor) -> bool:
    """Whether it is called with one tensor, and computes in bfloat16 on the CPU."""
    num_arguments = len(inspect.signature(module.forward).parameters)
    return num_arguments == 1 and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"


def _random(*size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(size))
    return torch.randn(size, generator=generator).to(torch.bfloat16)
