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
Steps 3 to 5 are a `Choice` (`choice.py`).
"""

from collections.abc import Sequence

import torch

from engine.adjustments import adjust, is_adjusted
from engine.choice import Choice, TorchChoice
from engine.engine import Chunk, SampledToken
from engine.logprobs import RawLogprobs
from kvferry.sampling import SamplingParams


class Sampler:
    """Samples for one model. Keeps memory to work in, but nothing that a later choice depends on.

    choice: how tokens are chosen from logits that are already adjusted.

    Not thread-safe.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], choice: Choice | None = None) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._choice = choice or TorchChoice(vocab_size)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[SampledToken]:
        """One token for each row of `logits`: [len(chunks), at least vocab_size], any float type and device.

        Every chunk has `sampling`, with its seed unless it is greedy. Raises `FloatingPointError` when
        a row has a NaN or no largest finite logit: the model's output is broken, and any token would
        be made up.
        """
        if not chunks:
            return []
        params = [_sampling(chunk) for chunk in chunks]
        rows = list(logits[:, : self._vocab_size].unbind())
        raw = {
            row: RawLogprobs(rows[row].float(), sampling.top_logprobs)
            for row, sampling in enumerate(params)
            if sampling.logprobs
        }
        for row, (sampling, chunk) in enumerate(zip(params, chunks, strict=True)):
            if is_adjusted(sampling, chunk.end - chunk.num_prompt_tokens):
                if not rows[row].amax().isfinite():
                    raise _broken(row)
                rows[row] = rows[row].to(torch.float32, copy=True)
                adjust(rows[row], sampling, chunk, self._eos_token_ids)
        token_ids = self._choice.choose(rows, params, [chunk.end for chunk in chunks])
        sampled = []
        for row, token_id in enumerate(token_ids):
            if token_id is None:
                raise _broken(row)
            if row in raw:
                logprob = raw[row].of(logits[row, token_id])
                sampled.append(SampledToken(token_id, logprob, raw[row].alternatives))
            else:
                sampled.append(SampledToken(token_id))
        return sampled


def _sampling(chunk: Chunk) -> SamplingParams:
    if chunk.sampling is None:
        raise ValueError("a chunk without sampling parameters has no row of logits")
    return chunk.sampling


def _broken(row: int) -> FloatingPointError:
    return FloatingPointError(f"row {row}: the model's logits are not finite")
