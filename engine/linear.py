"""Linear layers on the CPU, their weights packed once for the kernel of `csrc/linear.cpp`.

A packed weight takes the place of the original. Where the original is tied to the embedding it stays for
the embedding's sake, and the packed one costs that much again (57 MB of the demo model's 269).
"""

import torch
from torch.nn import functional

# Rows from which a processor with tiles (AMX) is faster through oneDNN.
MANY_ROWS = 64

PACKED_DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear(torch.nn.Module):
    """Computes what `linear` does: products summed in float32, the bias added, rounded once.

    keep_weight: also keeps the weight as it is, for calls with many rows. By default on a processor whose
    tiles multiply bfloat16; everywhere else the kernel is at least as fast with any number of rows.
    """

    def __init__(self, linear: torch.nn.Linear, keep_weight: bool | None = None) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        # Plain attributes: a module's parameters and buffers take longer to look up.
        self.bias = None if linear.bias is None else linear.bias.detach().contiguous()
        self.packed: torch.Tensor = torch.ops.kvferry.pack_linear.default(weight)
        self._dtype = weight.dtype
        self._multiply = torch.ops.kvferry.packed_linear.default
        if keep_weight is None:
            keep_weight = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self._dense = weight if keep_weight else None

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], unpacked: for models that look past the module. Slow."""
        panels, _, panel = self.packed.shape
        elements = self.packed.unsqueeze(-1).view(self._dtype)  # [panels, words, panel, elements of a word]
        rows = elements.permute(0, 2, 1, 3).reshape(panels * panel, -1)
        return rows[: self.out_features, : self.in_features]

    def takes_kept_weight(self, input: torch.Tensor) -> bool:  # noqa: A002
        """Whether a call with `input` goes to oneDNN."""
        return self._dense is not None and input.numel() >= MANY_ROWS * self.in_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """input: [..., in_features]. Returns [..., out_features]."""
        if self._dense is not None and self.takes_kept_weight(input):
            return functional.linear(input, self._dense, self.bias)
        out: torch.Tensor = self._multiply(input, self.packed, self.bias, self.out_features)
        return out

    # Without hooks, which cost as much as the call.
    __call__ = forward

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


def swap_linears(model: torch.nn.Module) -> int:
    """Replaces every plain linear layer in `model` that the kernel can compute; returns how many."""
    packed: dict[torch.nn.Linear, PackedLinear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not torch.nn.Linear or not can_pack(child):
                continue
            if child not in packed:
                packed[child] = PackedLinear(child)
            setattr(parent, name, packed[child])
    return len(packed)


def can_pack(linear: torch.nn.Linear) -> bool:
    """Whether the kernel can compute it."""
    return linear.weight.device.type == "cpu" and linear.weight.dtype in PACKED_DTYPES
