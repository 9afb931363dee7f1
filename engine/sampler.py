"""Chooses tokens from logits, for a whole batch at once.

For each row, in this order (that of vLLM, which follows OpenAI's API where that says anything):

1. Log probabilities, if asked for, come from the raw logits (`logprobs.py`).
2. Bias, penalties and the minimum length change the logits (`adjustments.py`).
3. Temperature 0 takes the largest logit, of equal ones the lowest id. Otherwise the logits are divided
   by the temperature.
4. top_k, top_p and min_p drop tokens (`truncation.py`).
5. One random number, which depends on the seed and the position alone (`random_numbers.py`), picks from
   what is left by the inverse of its cumulative distribution.

The cumulative sum runs in order of token id, not of probability: where rounding swaps two nearly equal
tokens, sorted sums would shift all that lies between them, these move one boundary by a rounding error.
So a row's token depends on its own logits, parameters and position, and not on the batch or the worker.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from engine.adjustments import adjust, is_adjusted
from engine.engine import Chunk, SampledToken
from engine.logprobs import RawLogprobs
from engine.random_numbers import uniform
from engine.scratch import Scratch
from engine.truncation import Truncation, is_truncated, truncate, weigh
from kvferry.sampling import SamplingParams

# Rows are padded to whole pieces of so many tokens; sums and maxima are taken by piece first.
_PIECE = 128
# Keeps the inverse of a temperature within float32.
_LEAST_TEMPERATURE = 1e-30


class Sampler:
    """Samples for one model. Keeps memory to work in, but nothing that a later choice depends on.

    Not thread-safe.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._padded_size = -(-vocab_size // _PIECE) * _PIECE
        self._eos_token_ids = eos_token_ids
        self._scratch = Scratch()

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[SampledToken]:
        """One token for each row of `logits`: [len(chunks), at least vocab_size], any float type and device.

        Every chunk has `sampling`, with its seed unless it is greedy. Raises `FloatingPointError` when
        a row has a NaN or no largest finite logit: the model's output is broken, and any token would
        be made up.
        """
        if not chunks:
            return []
        # Rows that need the same work lie side by side: greedy ones, then those that are drawn, the
        # truncated last.
        order = sorted(range(len(chunks)), key=lambda row: _kind(_sampling(chunks[row])))
        chunks = [chunks[row] for row in order]
        params = [_sampling(chunk) for chunk in chunks]
        values = self._padded(logits, order)
        raw = {
            row: RawLogprobs(values[row, : self._vocab_size], sampling.top_logprobs)
            for row, sampling in enumerate(params)
            if sampling.logprobs
        }
        for row, (sampling, chunk) in enumerate(zip(params, chunks, strict=True)):
            if is_adjusted(sampling, chunk.end - chunk.num_prompt_tokens):
                adjust(values[row, : self._vocab_size], sampling, chunk, self._eos_token_ids)
        token_ids = self._choose(values, params, [chunk.end for chunk in chunks])
        sampled: list[SampledToken] = [SampledToken(0)] * len(order)
        for row, (origin, token_id) in enumerate(zip(order, token_ids, strict=True)):
            if row in raw:
                logprob = raw[row].of(logits[origin, token_id])
                sampled[origin] = SampledToken(token_id, logprob, raw[row].alternatives)
            else:
                sampled[origin] = SampledToken(token_id)
        return sampled

    def _padded(self, logits: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        """A float32 copy, its rows in `order`, padded to whole pieces with tokens that are never chosen."""
        padded = self._scratch.rows("logits", logits.shape[0], self._padded_size, logits.device)
        padded[:, self._vocab_size :] = -torch.inf
        sources = logits[:, : self._vocab_size].unbind()
        for row, target in enumerate(padded[:, : self._vocab_size].unbind()):
            target.copy_(sources[order[row]])
        usable = torch.isfinite(padded.amax(-1)).tolist()
        if not all(usable):
            raise FloatingPointError(f"row {order[usable.index(False)]}: the model's logits are not finite")
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


def _sampling(chunk: Chunk) -> SamplingParams:
    if chunk.sampling is None:
        raise ValueError("a chunk without sampling parameters has no row of logits")
    return chunk.sampling


def _kind(sampling: SamplingParams) -> int:
    if sampling.temperature == 0:
        return 0
    return 2 if is_truncated(sampling) else 1


def _parameters(sampling: SamplingParams, position: int) -> tuple[float, ...]:
    """The random number, then the fields of `Truncation`."""
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
