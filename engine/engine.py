"""What an engine is: chunks of sequences in, one sampled token a finished chunk out.

A step is one packed forward over any mix of chunks. A prompt's chunk and a running sequence's single
token differ only in length, so a worker of either role, or of both, calls the same method.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.cache import KVCache
from kvferry.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence, computed in one step.

    tokens: the whole sequence so far, prompt then output; read, never kept or changed.
    start, end: the inputs are tokens[start:end]. The KV of tokens[:start] is in the cache already.
    block_table: blocks in order; covers `end` tokens.
    num_prompt_tokens: how many of `tokens` are the prompt; the rest is output.
    sampling: how to choose token number `end`; None where more of the prompt follows.
    """

    tokens: Sequence[int]
    start: int
    end: int
    block_table: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams | None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token; `logprob` and `top_logprobs` (id, value; likeliest first) only where asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the rest of the system must know of a loaded model."""

    model_digest: str
    tokenizer_digest: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]


class OutOfMemory(RuntimeError):
    """The device could not hold a step's activations. Nothing was sampled; a smaller step may fit."""


class Engine(Protocol):
    """One model on one device. Not thread-safe: one step at a time."""

    info: ModelInfo
    cache: KVCache

    def step(self, chunks: Sequence[Chunk]) -> list[SampledToken | None]:
        """Computes every chunk's KV into its blocks and samples where asked; in the order of `chunks`.

        Raises `OutOfMemory`; any other exception is a fault of the engine.
        """
        ...
