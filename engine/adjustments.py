"""What a request changes in the model's logits before a token is chosen: bias, penalties, a minimum length.

The order is that of vLLM, and the meaning of bias, presence and frequency that of OpenAI's API:

1. `logit_bias` is added.
2. The repetition penalty (Keskar et al., "CTRL", 2019) divides a positive and multiplies a negative
   logit of every token in prompt or output.
3. The presence penalty is subtracted once from every token in the output, the frequency penalty once
   for each time it is there.
4. While fewer than `min_tokens` tokens are out, the tokens that would end the output are forbidden.
"""

from collections.abc import Iterable

import numpy as np
import torch

from engine.engine import Chunk
from engine.finish import end_token_ids
from kvferry.sampling import SamplingParams

# Keeps the most extreme penalties finite, and their differences within float32.
_MAX_LOGIT = 1e30
# A forbidden token's logit. Finite, so that a row in which all are forbidden still has a distribution.
_FORBIDDEN = torch.finfo(torch.float32).min


def is_adjusted(sampling: SamplingParams, num_output_tokens: int) -> bool:
    """Whether `adjust` would change anything."""
    return (
        bool(sampling.logit_bias)
        or sampling.repetition_penalty != 1
        or _has_output_penalty(sampling)
        or num_output_tokens < sampling.min_tokens
    )


def adjust(
    logits: torch.Tensor, sampling: SamplingParams, chunk: Chunk, eos_token_ids: frozenset[int]
) -> None:
    """Changes one row of float32 logits, [vocab_size], in place. Ids beyond the vocabulary are ignored."""
    if sampling.logit_bias:
        bias = {i: value for i, value in sampling.logit_bias.items() if i < logits.shape[0]}
        where = _index(bias, logits)
        logits[where] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    if sampling.repetition_penalty != 1 or _has_output_penalty(sampling):
        _penalise(logits, sampling, np.asarray(chunk.tokens[: chunk.end]), chunk.num_prompt_tokens)
    if chunk.end - chunk.num_prompt_tokens < sampling.min_tokens:
        ends = end_token_ids(sampling, eos_token_ids)
        logits[_index((i for i in ends if i < logits.shape[0]), logits)] = _FORBIDDEN


def _has_output_penalty(sampling: SamplingParams) -> bool:
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _penalise(
    logits: torch.Tensor, sampling: SamplingParams, token_ids: np.ndarray, num_prompt_tokens: int
) -> None:
    if sampling.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(token_ids)).to(logits.device)
        old = logits[seen].double()
        new = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
        logits[seen] = new.clamp_(-_MAX_LOGIT, _MAX_LOGIT).to(logits.dtype)
    output = token_ids[num_prompt_tokens:]
    if _has_output_penalty(sampling) and output.size:
        ids, counts = np.unique(output, return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        where = torch.from_numpy(ids).to(logits.device)
        logits[where] -= torch.from_numpy(penalties).to(logits)


def _index(token_ids: Iterable[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=like.device)
