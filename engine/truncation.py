"""Which tokens top_k, top_p and min_p leave: each row's cutoff, found without sorting the vocabulary.

The three are applied in that order. top_k keeps the k largest logits. top_p (Holtzman et al., "The
curious case of neural text degeneration", 2020) keeps of these the fewest, from the likeliest down,
whose share of their mass reaches top_p. min_p (Nguyen et al., 2024) drops what is less likely than min_p
times the likeliest. So what is kept is always a head of the descending order, and a threshold and a
count describe it. Among equal logits the lower token ids come first.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from kvferry.sampling import SamplingParams

# Enough for the usual top_k, and for top_p wherever the model is fairly sure; else the row is sorted.
_NUM_CANDIDATES = 64
# Rows are cut into columns of so many elements; row lengths must be multiples of it.
_COLUMN = 32
# 2**-115 is nothing beside 1, and much smaller results would be denormal numbers: slow on CPUs.
_LEAST_EXPONENT = -115.0


@dataclass(frozen=True, slots=True)
class Truncation:
    """The parameters of a batch of rows: [num_rows] float64 each. A top_k of 0 keeps all."""

    inverse_temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def rows(self, index: torch.Tensor | int) -> "Truncation":
        """The parameters of the rows in `index`, or from a number on."""
        where = slice(index, None) if isinstance(index, int) else index
        return Truncation(
            self.inverse_temperature[where], self.top_k[where], self.top_p[where], self.min_p[where]
        )


def is_truncated(sampling: SamplingParams) -> bool:
    """Whether any token may be dropped."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def weigh(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """exp((logit - largest) / temperature), float32: 1 for a row's largest, 0 below 2**-115."""
    # Powers of 2 are faster than those of e.
    scale = (inverse_temperature / math.log(2)).float()
    weights = torch.sub(logits, logits.amax(-1, keepdim=True), out=out).mul_(scale[:, None])
    return F.threshold(weights, _LEAST_EXPONENT, -torch.inf, inplace=True).exp2_()


def truncate(logits: torch.Tensor, weights: torch.Tensor, truncation: Truncation, kept: torch.Tensor) -> None:
    """Sets to zero, in place, the weights of the tokens that are not kept.

    logits: [num_rows, length] float32; `length` is a multiple of 32. weights: theirs, as of `weigh`.
    kept: memory to work in, of the same shape.
    """
    threshold, num_kept = _cutoffs(logits, weights.sum(-1).double(), truncation)
    # As numbers, not as truth values: several times faster to compute and to multiply with on a CPU.
    torch.ge(logits, threshold[:, None], out=kept)
    weights.mul_(kept)
    surplus = (kept.sum(-1) - num_kept).tolist()
    for row, num in enumerate(surplus):
        # Tokens equal to the last one that is kept.
        if num > 0:
            equal = _places(logits[row], threshold[row])
            weights[row, equal[-int(num) :]] = 0


def _largest(values: torch.Tensor, num: int) -> torch.Tensor:
    """The `num` largest of each row, in descending order: [num_rows, num].

    They lie within the `num` columns (of every width-th element) that have the largest maxima: any
    element elsewhere is exceeded, or equalled, by each of those maxima.
    """
    columns = values.view(values.shape[0], _COLUMN, -1)
    if columns.shape[2] <= num:
        return _descending(values, num)
    best = columns.amax(1).topk(num, sorted=False).indices
    candidates = columns.gather(2, best[:, None, :].expand(-1, _COLUMN, -1))
    return _descending(candidates.flatten(1), num)


def _cutoffs(
    logits: torch.Tensor, total: torch.Tensor, truncation: Truncation
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit that is kept, float32, and the most tokens that are kept, int64: [num_rows] each."""
    length = logits.shape[1]
    threshold, num_kept = _cut(_largest(logits, min(_NUM_CANDIDATES, length)), length, total, truncation)
    # Where the candidates do not reach top_k or top_p. By row, which is as fast and needs less memory.
    for row in torch.nonzero(num_kept < 0)[:, 0]:
        alone = row[None]
        threshold[alone], num_kept[alone] = _cut(
            _descending(logits[alone], length), length, total[alone], truncation.rows(alone)
        )
    return threshold, num_kept


def _cut(
    values: torch.Tensor, length: int, total: torch.Tensor, truncation: Truncation
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_cutoffs`, from the largest logits of each row, descending; -1 kept where those do not suffice."""
    num_values = values.shape[1]
    top_k = truncation.top_k.long()
    top_k = torch.where((top_k == 0) | (top_k > length), length, top_k)
    # The mass of the likeliest 1, 2, ... tokens.
    mass = weigh(values, truncation.inverse_temperature).cumsum(-1, dtype=torch.float64)
    last = mass.gather(1, top_k.clamp(max=num_values)[:, None] - 1)[:, 0]
    total = torch.where(top_k <= num_values, last, total)
    nucleus = torch.searchsorted(mass, (truncation.top_p * total)[:, None])[:, 0] + 1
    num_kept = torch.where(truncation.top_p < 1, torch.minimum(nucleus, top_k), top_k)
    is_whole = num_kept == length
    # With a top_k beyond these values, the mass that top_p is a share of is not known either.
    is_open = ((num_kept > num_values) | ((num_values < top_k) & (top_k < length))) & ~is_whole
    threshold = values.gather(1, num_kept.clamp(max=num_values)[:, None] - 1)[:, 0]
    threshold = threshold.masked_fill(is_whole, -torch.inf)
    floor = values[:, 0].double() + truncation.min_p.log() / truncation.inverse_temperature
    return torch.maximum(threshold, floor.float()), num_kept.masked_fill(is_open, -1)


def _descending(values: torch.Tensor, num: int) -> torch.Tensor:
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values[:, :num]
    # NumPy sorts with vector instructions, some twenty times faster than torch does.
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)[:, -num:]).flip(-1)


def _places(values: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Where a row holds a value, ascending."""
    if values.device.type != "cpu":
        return torch.nonzero(values == value)[:, 0]
    return torch.from_numpy(np.flatnonzero(values.numpy() == value.item()))
