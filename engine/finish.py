"""When an output ends, as far as tokens tell. Both kinds of worker ask here, the prefill worker for the
first token; stop strings are the router's, where there is text.
"""

from enum import Enum

from kvferry.sampling import SamplingParams


class FinishReason(Enum):
    """Why an output ended; the values are the proto enum's names without its prefix."""

    STOP = "STOP"
    LENGTH = "LENGTH"


def end_token_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end this output: the request's own, and the model's unless it ignores those."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | eos_token_ids


def finish_reason(
    sampling: SamplingParams,
    eos_token_ids: frozenset[int],
    token_id: int,
    num_output_tokens: int,
    num_tokens: int,
    max_context_tokens: int,
) -> FinishReason | None:
    """Whether the output ends with `token_id`, and why; None where it goes on.

    `num_output_tokens` and `num_tokens` (prompt and output) count `token_id` too. The first
    `min_tokens` tokens never end an output with STOP: the sampler forbids the end tokens there, so
    that at least `min_tokens` others come before one. LENGTH knows no minimum. A token that is both
    an end token and the last allowed is a STOP.
    """
    may_stop = num_output_tokens > sampling.min_tokens
    if may_stop and token_id in end_token_ids(sampling, eos_token_ids):
        return FinishReason.STOP
    if sampling.max_tokens is not None and num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return FinishReason.LENGTH if num_tokens >= max_context_tokens else None
