"""Chooses one token of each row of logits by temperature, top_k, top_p, min_p and a random number."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from engine.random_numbers import uniform
from engine.scratch import Scratch
from engine.truncation import Truncation, is_truncated, truncate, weigh
from kvferry.sampling import SamplingParams

# Rows are padded to whole pieces of so many tokens; sums and maxima are taken by piece first.
_PIECE = 128
# Keeps the inverse of a temperature within float32.
_LEAST_TEMPERATURE = 1e-30


class Choice(Protocol):
    """One way to choose."""

    def choose(
        self, rows: Sequence[torch.Tensor], params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int | None]:
        """One token for each row, [vocab_size] of any float type; None where a row has a NaN or its largest
        logit is not finite. The rows are not changed. A position goes into its row's random number."""
        ...


class KernelChoice:
    """`torch.ops.kvferry.choose`, for rows on the CPU; `engine.kernels.load_kernels` must have loaded it."""

    def __init__(self) -> None:
        self._choose = torch.ops.kvferry.choose.default

    def choose(
        self, rows: Sequence[torch.Tensor], params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int | None]:
        """As `Choice.choose`."""
        table = [_parameters(*row) for row in zip(params, positions, strict=True)]
        chosen: list[int] = self._choose(rows, torch.tensor(table, dtype=torch.float64)).tolist()
        return [None if token_id < 0 else token_id for token_id in chosen]


class TorchChoice:
    """All rows at once in plain torch, on any device."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._padded_size = -(-vocab_size // _PIECE) * _PIECE
        self._scratch = Scratch()

    def choose(
        self, rows: Sequence[torch.Tensor], params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int | None]:
        """As `Choice.choose`."""
        # Rows that need the same work lie side by side: greedy ones, then those that are drawn, the
        # truncated last.
        order = sorted(range(len(rows)), key=lambda row: _kind(params[row]))
        values = self._padded([rows[row] for row in order])
        usable = torch.isfinite(values.amax(-1)).tolist()
        ordered = self._choose(values, [params[row] for row in order], [positions[row] for row in order])
        token_ids: list[int | None] = [None] * len(rows)
        for row, token_id, is_usable in zip(order, ordered, usable, strict=True):
            token_ids[row] = token_id if is_usable else None
        return token_ids

    def _padded(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """A float32 copy, padded to whole pieces with tokens that are never chosen."""
        padded = self._scratch.rows("logits", len(rows), self._padded_size, rows[0].device)
        padded[:, self._vocab_size :] = -torch.inf
        for row, target in zip(rows, padded[:, : self._vocab_size].unbind(), strict=True):
            target.copy_(row)
        return padded

    def _choose(
        self, values: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int]:
        num_greedy = sum(sampling.temperature == 0 for sampling in params)
        token_ids: list[int] = []
        if num_greedy:
            token_ids += _first_largest(values[:num_greedy]).tolist()
        if num_greedy < len(params):
            drawn = self._draw(values[num_greedy:], params[num_greedy:], positions[num_greedy:])
            token_ids += drawn.tolist()
        return token_ids

    def _draw(
        self, values: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> torch.Tensor:
        """Token ids, [num_rows], for rows with a temperature, the truncated ones last."""
        table = torch.tensor(
            [_parameters(*row) for row in zip(params, positions, strict=True)], dtype=torch.float64
        ).to(values.device)
        uniforms, truncation = table[:, 0], Truncation(*table[:, 1:].T)
        weights = self._scratch.rows("weights", values.shape[0], values.shape[1], values.device)
        weigh(values, truncation.inverse_temperature, out=weights)
        num_whole = sum(not is_truncated(sampling) for sampling in params)
        if num_whole < len(params):
            kept = self._scratch.rows("kept", len(params) - num_whole, values.shape[1], values.device)
            truncate(values[num_whole:], weights[num_whole:], truncation.rows(num_whole), kept)
        return invert(weights, uniforms)


def _kind(sampling: SamplingParams) -> int:
    if sampling.temperature == 0:
        return 0
    return 2 if is_truncated(sampling) else 1


def _parameters(sampling: SamplingParams, position: int) -> tuple[float, ...]:
    """The random number, then the fields of `Truncation`; greedy rows have an inverse temperature of 0."""
    if sampling.temperature == 0:
        return (0.0, 0.0, 0, 1.0, 0.0)
    if sampling.seed is None:
        raise ValueError("seed: must be set where the temperature is not 0")
    inverse_temperature = 1 / max(sampling.temperature, _LEAST_TEMPERATURE)
    drawn = uniform(sampling.seed, position)
    return (drawn, inverse_temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def _first_largest(values: torch.Tensor) -> torch.Tensor:
    """[num_rows]: as argmax, which on CPUs is slow over long rows; of equal values the first."""
    pieces = values.view(values.shape[0], -1, _PIECE)
    piece = pieces.amax(-1).argmax(-1)
    return piece * _PIECE + _pick(pieces, piece).argmax(-1)


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token of each row at which the running sum exceeds its uniform share of the whole."""
    pieces = weights.view(weights.shape[0], -1, _PIECE)
    sums = pieces.sum(-1).double().cumsum(-1)
    target = uniforms * sums[:, -1]
    piece = _first_above(sums, target)
    before = F.pad(sums, (1, 0)).gather(1, piece[:, None])[:, 0]
    inside = _pick(pieces, piece).double().cumsum(-1)
    return piece * _PIECE + _first_above(inside, target - before)


def _first_above(running: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first place where a running sum exceeds `target`; at most the last place where it grows.

    The bound matters where rounding puts the target at the very end: a weight of zero is never chosen.
    """
    return ((running <= target[:, None]) & (running < running[:, -1:])).sum(-1)


def _pick(pieces: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """[num_rows, piece]: one piece of each row."""
    return pieces[torch.arange(pieces.shape[0], device=pieces.device), piece]
