"""Token for token what transformers generates, however the work is cut and mixed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.engine import Chunk
from engine.sampler import Sampler
from engine.torch_engine import TorchEngine
from kvferry.config import EngineConfig
from kvferry.sampling import SamplingParams

FAMILIES = ["llama", "llama-yarn", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"]
BLOCK_SIZE = 4
NUM_BLOCKS = 400
VOCAB_SIZE = 97
GREEDY = SamplingParams(temperature=0.0)


class RecordingSampler(Sampler):
    """The real one, keeping the logits it was given."""

    seen: torch.Tensor

    def sample(self, logits, chunks):
        self.seen = logits.float().clone()
        return super().sample(logits, chunks)


@dataclass
class Sequence:
    """One sequence on its way through the engine; `logits` has a row for each output token."""

    prompt: list[int]
    num_output: int
    table: list[int]
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.num_output

    def next_chunk(self, max_tokens: int) -> Chunk:
        end = min(len(self.tokens), self.num_computed + max_tokens)
        num_blocks = -(-end // BLOCK_SIZE)
        last = end == len(self.tokens)
        return Chunk(
            tokens=self.tokens,
            start=self.num_computed,
            end=end,
            block_table=self.table[:num_blocks],
            num_prompt_tokens=len(self.prompt),
            sampling=GREEDY if last else None,
        )


@pytest.fixture(scope="module")
def load(model_folder: Callable[[str], Path]) -> Callable[[str], TorchEngine]:
    engines: dict[str, TorchEngine] = {}

    def get(family: str) -> TorchEngine:
        if family not in engines:
            config = EngineConfig(device="cpu", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_threads=1)
            engines[family] = TorchEngine.load(config, model_folder(family))
            engines[family]._sampler = RecordingSampler(VOCAB_SIZE, frozenset())
        return engines[family]

    return get


def make_sequences(lengths: list[int], num_output: int, seed: int) -> list[Sequence]:
    """Random prompts, their blocks scattered over the cache."""
    rng = random.Random(seed)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [
        Sequence(
            [rng.randrange(VOCAB_SIZE) for _ in range(length)],
            num_output,
            [free.pop() for _ in range(-(-(length + num_output) // BLOCK_SIZE))],
        )
        for length in lengths
    ]


def run(engine: TorchEngine, sequences: list[Sequence], chunk_size: int, seed: int) -> None:
    """Any subset of the sequences steps together: prompts' chunks and single tokens in one batch."""
    # What earlier users of the blocks left must not matter.
    engine.cache.blocks.normal_()
    rng = random.Random(seed)
    while running := [s for s in sequences if not s.finished]:
        batch = rng.sample(running, rng.randint(1, len(running)))
        chunks = [sequence.next_chunk(chunk_size) for sequence in batch]
        sampled = engine.step(chunks)
        rows = iter(engine._sampler.seen) if any(token is not None for token in sampled) else iter(())
        for sequence, chunk, token in zip(batch, chunks, sampled, strict=True):
            sequence.num_computed = chunk.end
            assert (token is None) == (chunk.sampling is None)
            if token is not None:
                sequence.tokens.append(token.token_id)
                sequence.logits.append(next(rows))


def assert_same(sequences: list[Sequence], reference) -> None:
    for sequence in sequences:
        wanted = reference.greedy(sequence.prompt, sequence.num_output)
        gap = wanted.logits.topk(2).values.diff().abs().min().item()
        torch.testing.assert_close(torch.stack(sequence.logits), wanted.logits, rtol=1e-4, atol=2e-4)
        assert gap > 1e-3, "a near tie proves nothing: choose another seed"
        assert sequence.tokens == wanted.tokens


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_generate_what_transformers_generates(load, reference, family, chunk_size):
    # Every length modulo the block size, and some past the window.
    sequences = make_sequences([1, 2, 3, 4, 5, 21, 34], num_output=6, seed=1)
    run(load(family), sequences, chunk_size, seed=chunk_size)
    assert_same(sequences, reference(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_long_contexts_generate_what_transformers_generates(load, reference, family):
    sequences = make_sequences([389, 250], num_output=3, seed=3)
    run(load(family), sequences, chunk_size=150, seed=3)
    assert_same(sequences, reference(family))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_recomputing_a_sequence_from_its_tokens_changes_nothing(load, reference, family):
    """What preemption does: the output so far is computed again as if it were a prompt, in new blocks."""
    [sequence] = make_sequences([9], num_output=8, seed=4)
    engine = load(family)
    while len(sequence.tokens) < 13:
        chunk = sequence.next_chunk(100)
        [token] = engine.step([chunk])
        sequence.num_computed = chunk.end
        sequence.tokens.append(token.token_id)
        sequence.logits.append(engine._sampler.seen[0])
    sequence.num_computed = 0
    sequence.table = [block + 1 for block in range(len(sequence.table))]
    run(engine, [sequence], chunk_size=100, seed=4)
    assert_same([sequence], reference(family))


def test_kv_is_the_same_however_a_prompt_is_cut(load):
    engine = load("llama")
    [whole] = make_sequences([23], num_output=1, seed=5)
    run(engine, [whole], chunk_size=1000, seed=5)
    wanted = engine.cache.blocks[whole.table].clone()
    [cut] = make_sequences([23], num_output=1, seed=5)
    run(engine, [cut], chunk_size=5, seed=5)
    got = engine.cache.blocks[cut.table]
    # [blocks, layers, kv, place, ...]: the last block's last place is free.
    torch.testing.assert_close(got[:-1], wanted[:-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[-1, :, :, :3], wanted[-1, :, :, :3], rtol=1e-4, atol=1e-4)
