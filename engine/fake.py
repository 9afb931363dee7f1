"""An engine without a model, whose answers can be worked out by hand, with real blocks of real bytes.

The KV of token t at position p is K = (t, t, t, t) and V = (p, p, p, p), whoever computes it. The next
token comes from what is read back out of the blocks, over all positions p so far:

    token = (constant of the role + sum of (K + 3 V + 1) * (p + 1)) modulo vocab_size

So a block that is missing, damaged, out of place or another sequence's changes the answer, and the
constant (11 on a prefill worker, 23 on a decode worker) tells who chose a token. Where the four copies of
a number differ, 101 is added for that position. For the prompt 5, 7 and a vocabulary of 1000 a prefill
worker answers 11 + (5 + 0 + 1) * 1 + (7 + 3 + 1) * 2 = 39.

While `min_tokens` forbids the end tokens, the next higher id that is allowed is taken. The log
probability of the chosen token is -1, and the alternatives are the ids that follow it, at -1, -2, -3 and
so on, itself first. All other sampling parameters are ignored.
"""

import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch

from engine.cache import BlockShape, KVCache
from engine.engine import Chunk, ModelInfo, OutOfMemory, SampledToken
from engine.finish import end_token_ids
from kvferry.config import EngineConfig
from kvferry.models import model_digest, tokenizer_digest
from kvferry.sampling import SamplingParams

Role = Literal["prefill", "decode"]

_ROLE_CONSTANTS: dict[Role, int] = {"prefill": 11, "decode": 23}
_DAMAGE = 101
_HEAD_DIM = 4
_DEFAULT_NUM_BLOCKS = 1024


def expected_output(
    prompt: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    first_role: Role = "prefill",
    role: Role = "decode",
    end_ids: Collection[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """The output of `num_tokens`, or up to and with the first of `end_ids`, after a prompt.

    `first_role` chooses the first token and `role` the others: as they are for a pair of workers, both
    the same for a single engine. A preempted sequence yields the same, wherever it is computed again.
    """
    total = sum((token + 3 * p + 1) * (p + 1) for p, token in enumerate(prompt))
    output: list[int] = []
    while len(output) < num_tokens and not (output and output[-1] in end_ids):
        constant = _ROLE_CONSTANTS[role if output else first_role]
        token = _nearest_allowed(
            (total + constant) % vocab_size, vocab_size, end_ids if len(output) < min_tokens else ()
        )
        p = len(prompt) + len(output)
        total += (token + 3 * p + 1) * (p + 1)
        output.append(token)
    return output


class FakeEngine:
    """An `Engine` on the CPU with one layer and one head of 4 float32 numbers: 32 bytes a token.

    step_time_s, token_time_s: how long a step takes, and each of its tokens besides.
    max_tokens_per_step: a larger step raises `OutOfMemory`.
    """

    def __init__(
        self,
        role: Role,
        *,
        num_blocks: int = _DEFAULT_NUM_BLOCKS,
        block_size: int = 16,
        vocab_size: int = 1000,
        eos_token_ids: frozenset[int] = frozenset(),
        max_context_tokens: int = 4096,
        model_digest: str = "fake",
        tokenizer_digest: str = "fake",
        step_time_s: float = 0.0,
        token_time_s: float = 0.0,
        max_tokens_per_step: int | None = None,
    ) -> None:
        self.info = ModelInfo(model_digest, tokenizer_digest, vocab_size, max_context_tokens, eos_token_ids)
        self.cache = KVCache(_shape(block_size), num_blocks, torch.device("cpu"))
        self._constant = _ROLE_CONSTANTS[role]
        self._step_time_s = step_time_s
        self._token_time_s = token_time_s
        self._max_tokens_per_step = max_tokens_per_step
        self._block_size = block_size
        # [num_blocks, 2 (K, V), block_size, head_dim], the cache's own memory.
        self._kv = self.cache.blocks.numpy().reshape(num_blocks, 2, block_size, _HEAD_DIM)

    @classmethod
    def from_config(cls, config: EngineConfig, role: Role, model_dir: Path | None) -> Self:
        """The fake of a model's vocabulary, context and end tokens; of its own defaults without one.

        Of `config` the block size and the cache's size count, the latter in blocks or bytes; by default
        it has 1024 blocks. Raises `ValueError` for a size as a share of the memory.
        """
        if config.kv_cache_share is not None:
            raise ValueError("kv_cache_share: the fake engine takes num_blocks or kv_cache_bytes")
        num_blocks = config.num_blocks or _DEFAULT_NUM_BLOCKS
        if config.kv_cache_bytes is not None:
            num_blocks = config.kv_cache_bytes // _shape(config.block_size).num_bytes
            if num_blocks == 0:
                raise ValueError(f"kv_cache_bytes: {config.kv_cache_bytes} bytes hold no block")
        if model_dir is None:
            return cls(role, num_blocks=num_blocks, block_size=config.block_size)
        settings = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        settings |= settings.get("text_config") or {}
        eos = settings.get("eos_token_id")
        return cls(
            role,
            num_blocks=num_blocks,
            block_size=config.block_size,
            vocab_size=settings["vocab_size"],
            eos_token_ids=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
            max_context_tokens=settings["max_position_embeddings"],
            model_digest=model_digest(model_dir),
            tokenizer_digest=tokenizer_digest(model_dir),
        )

    def step(self, chunks: Sequence[Chunk]) -> list[SampledToken | None]:
        """As `Engine.step`. Raises `ValueError` for a chunk that breaks the rules of `Chunk`."""
        if not chunks:
            return []
        for chunk in chunks:
            self._check(chunk)
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        if self._max_tokens_per_step is not None and num_tokens > self._max_tokens_per_step:
            raise OutOfMemory(f"{num_tokens} tokens in a step, of at most {self._max_tokens_per_step}")
        if duration_s := self._step_time_s + num_tokens * self._token_time_s:
            time.sleep(duration_s)
        self._write(chunks)
        sampled = [(i, chunk, chunk.sampling) for i, chunk in enumerate(chunks) if chunk.sampling is not None]
        result: list[SampledToken | None] = [None] * len(chunks)
        if sampled:
            totals = self._read([chunk for _, chunk, _ in sampled])
            for total, (i, chunk, sampling) in zip(totals, sampled, strict=True):
                result[i] = self._choose(total, sampling, chunk.end - chunk.num_prompt_tokens)
        return result

    def _check(self, chunk: Chunk) -> None:
        if not 0 <= chunk.start < chunk.end <= len(chunk.tokens):
            raise ValueError(f"a chunk of [{chunk.start}, {chunk.end}) of {len(chunk.tokens)} tokens")
        if len(chunk.block_table) * self._block_size < chunk.end:
            raise ValueError(f"{len(chunk.block_table)} blocks do not cover {chunk.end} tokens")
        if chunk.sampling is not None and chunk.end != len(chunk.tokens):
            raise ValueError("a chunk that is sampled must end where its tokens end")

    def _write(self, chunks: Sequence[Chunk]) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for chunk in chunks:
            places = range(chunk.start, chunk.end)
            tokens += chunk.tokens[chunk.start : chunk.end]
            positions += places
            blocks += [chunk.block_table[p // self._block_size] for p in places]
        slots = np.array(positions) % self._block_size
        self._kv[blocks, 0, slots] = np.array(tokens)[:, None]
        self._kv[blocks, 1, slots] = np.array(positions)[:, None]

    def _read(self, chunks: Sequence[Chunk]) -> list[int]:
        """The sum over all positions before `end`, for each chunk."""
        blocks: list[int] = []
        firsts: list[int] = []
        ordinals: list[int] = []
        for chunk in chunks:
            num = -(-chunk.end // self._block_size)
            firsts.append(len(blocks))
            blocks += chunk.block_table[:num]
            ordinals += range(num)
        # [blocks read, block_size]
        positions = np.array(ordinals)[:, None] * self._block_size + np.arange(self._block_size)
        ends = np.repeat([chunk.end for chunk in chunks], np.diff([*firsts, len(blocks)]))
        kv = self._kv[blocks]
        # Damaged numbers may be out of range; any number will do for them.
        with np.errstate(invalid="ignore"):
            numbers = kv[..., 0].astype(np.int64)
        shares = (numbers[:, 0] + 3 * numbers[:, 1] + 1) * (positions + 1)
        bits = kv.view(np.int32)
        shares += _DAMAGE * (bits != bits[..., :1]).any(axis=(1, 3))
        shares[positions >= ends[:, None]] = 0
        totals: list[int] = np.add.reduceat(shares.sum(axis=1), firsts).tolist()
        return totals

    def _choose(self, total: int, sampling: SamplingParams, num_output_tokens: int) -> SampledToken:
        size = self.info.vocab_size
        is_early = num_output_tokens < sampling.min_tokens
        forbidden = end_token_ids(sampling, self.info.eos_token_ids) if is_early else ()
        token = _nearest_allowed((total + self._constant) % size, size, forbidden)
        if not sampling.logprobs:
            return SampledToken(token)
        num = min(sampling.top_logprobs, size)
        return SampledToken(token, -1.0, tuple(((token + i) % size, -1.0 - i) for i in range(num)))


def _shape(block_size: int) -> BlockShape:
    return BlockShape(
        num_layers=1, block_size=block_size, num_kv_heads=1, head_dim=_HEAD_DIM, dtype=torch.float32
    )


def _nearest_allowed(token: int, vocab_size: int, forbidden: Collection[int]) -> int:
    candidates = ((token + i) % vocab_size for i in range(vocab_size))
    return next((candidate for candidate in candidates if candidate not in forbidden), token)
