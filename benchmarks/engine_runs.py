"""What `benchmarks.engine` times: the same work by our engine, by transformers, and the products alone."""

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from engine.cache import BlockShape
from engine.engine import Chunk
from engine.torch_engine import TorchEngine
from kvferry import models
from kvferry.config import EngineConfig
from kvferry.sampling import SamplingParams

BLOCK_SIZE = 16
# Tokens by which a sequence grows in a round, and is cut again; more than any round has steps.
_GROWTH = 16
_GREEDY = SamplingParams(temperature=0.0)


class Stopwatch:
    """Seconds of one clock, once the device has done what it was told."""

    def __init__(self, clock: str, device: str) -> None:
        self._now = time.process_time if clock == "cpu" else time.perf_counter
        self._on_cuda = device == "cuda"

    def now(self) -> float:
        """Seconds since any moment."""
        if self._on_cuda:
            torch.cuda.synchronize()
        return self._now()

    def time(self, call: Callable[[], object]) -> float:
        """Seconds that `call` takes."""
        start = self.now()
        call()
        return self.now() - start


def num_blocks(decode: list[tuple[int, int]], prefill: list[int]) -> int:
    """Blocks that the largest of these points needs."""
    tokens = [batch * (context + _GROWTH + BLOCK_SIZE) for batch, context in decode]
    return -(-max(*tokens, *prefill) // BLOCK_SIZE)


def load_engine(name: str, device: str, num_threads: int, num_blocks: int) -> TorchEngine:
    """Ours. Takes seconds."""
    config = {
        "device": device,
        "num_threads": num_threads,
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
    }
    return TorchEngine.load(EngineConfig.model_validate(config), models.resolve(name))


def load_transformers(name: str, device: str) -> PreTrainedModel:
    """The same model in the same dtype, with transformers' own attention."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        models.resolve(name), dtype="auto", local_files_only=True
    )
    loaded.requires_grad_(False)
    model: PreTrainedModel = loaded.to(device)
    return model


class _TimedModel:
    """The engine's model, the seconds of its calls added up."""

    def __init__(self, model: Any, watch: Stopwatch) -> None:
        self.model, self._watch, self.seconds = model, watch, 0.0

    def __call__(self, **arguments: Any) -> Any:
        start = self._watch.now()
        output = self.model(**arguments)
        self.seconds += self._watch.now() - start
        return output


class OurDecode:
    """A batch of sequences in our engine, one token a step. The cache holds random keys and values."""

    def __init__(self, engine: TorchEngine, watch: Stopwatch, batch: int, context: int) -> None:
        self._engine, self._watch, self._context = engine, watch, context
        engine.cache.blocks.normal_()
        needed = -(-(context + _GROWTH) // BLOCK_SIZE)
        blocks = random.Random(batch).sample(range(engine.cache.num_blocks), batch * needed)
        self._tables = [blocks[row * needed : (row + 1) * needed] for row in range(batch)]
        self._tokens = [_random_tokens(engine.info.vocab_size, context + 1, row) for row in range(batch)]
        self.steps(1)

    def steps(self, num_steps: int) -> list[float]:
        """Seconds of each step."""
        times = []
        for _ in range(num_steps):
            chunks = [
                Chunk(tokens, len(tokens) - 1, len(tokens), table, self._context, _GREEDY)
                for tokens, table in zip(self._tokens, self._tables, strict=True)
            ]
            start = self._watch.now()
            sampled = self._engine.step(chunks)
            times.append(self._watch.now() - start)
            for tokens, token in zip(self._tokens, sampled, strict=True):
                assert token is not None
                tokens.append(token.token_id)
        for tokens in self._tokens:
            del tokens[self._context + 1 :]
        return times

    def outside(self, num_steps: int) -> list[float]:
        """Of some steps, the seconds spent outside the model."""
        timed = _TimedModel(self._engine._model, self._watch)
        self._engine._model = timed  # type: ignore[assignment]
        times = []
        for _ in range(num_steps):
            timed.seconds = 0.0
            times.append(self.steps(1)[0] - timed.seconds)
        self._engine._model = timed.model
        return times


class _Marks(StoppingCriteria):
    """Notes when each step of `generate` ends."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch, self.seconds = watch, list[float]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        self.seconds.append(self._watch.now())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class TheirDecode:
    """The same batch in transformers' `generate`, from a cache filled with random keys and values."""

    def __init__(self, model: Any, shape: BlockShape, watch: Stopwatch, batch: int, context: int) -> None:
        self._model, self._watch = model, watch
        self._tokens = torch.randint(model.config.vocab_size, (batch, context + 1), device=model.device)
        self._cache: Any = DynamicCache(config=model.config)
        for layer in range(shape.num_layers):
            size = (batch, shape.num_kv_heads, context, shape.head_dim)
            key, value = torch.randn((2, *size), dtype=shape.dtype, device=model.device)
            self._cache.update(key, value, layer)
        self.steps(1)

    def steps(self, num_steps: int) -> list[float]:
        """Seconds of each step. `generate`'s first step, and what it does before, do not count."""
        marks = _Marks(self._watch)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=num_steps + 1, eos_token_id=None, pad_token_id=0
        )
        self._model.generate(
            self._tokens,
            attention_mask=torch.ones_like(self._tokens),
            cache=self._cache,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([marks]),
        )
        self._cache.crop(-(num_steps + 1))
        return [end - start for start, end in zip(marks.seconds, marks.seconds[1:], strict=False)]


class OurPrefill:
    """One prompt in one step of our engine."""

    def __init__(self, engine: TorchEngine, watch: Stopwatch, num_tokens: int) -> None:
        self._engine, self._watch = engine, watch
        tokens, table = (
            _random_tokens(engine.info.vocab_size, num_tokens, 0),
            range(-(-num_tokens // BLOCK_SIZE)),
        )
        self._chunks = [Chunk(tokens, 0, num_tokens, table, num_tokens, _GREEDY)]
        self.run()

    def run(self) -> float:
        """Seconds."""
        return self._watch.time(lambda: self._engine.step(self._chunks))


class TheirPrefill:
    """The same prompt in one forward of transformers' model, which fills a cache."""

    def __init__(self, model: PreTrainedModel, watch: Stopwatch, num_tokens: int) -> None:
        self._model, self._watch = model, watch
        self._tokens = torch.randint(model.config.vocab_size, (1, num_tokens), device=model.device)
        self.run()

    def run(self) -> float:
        """Seconds."""
        return self._watch.time(self._forward)

    def _forward(self) -> list[int]:
        output = self._model(input_ids=self._tokens, use_cache=True, logits_to_keep=1)
        token_ids: list[int] = output.logits[:, -1].argmax(-1).tolist()
        return token_ids


class Products:
    """The matrix products of a model's linear layers and nothing else, by torch."""

    def __init__(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        assert isinstance(head, torch.nn.Linear)
        self._head = head.weight
        self._weights = [
            module.weight
            for module in model.modules()
            if type(module) is torch.nn.Linear and module is not head
        ]
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(weight.nbytes for weight in (*self._weights, self._head))

    def num_operations(self, num_rows: int, num_sampled: int = 1) -> int:
        """Multiplications and additions of as many rows, of which some get logits."""
        body = sum(weight.numel() for weight in self._weights)
        return 2 * (num_rows * body + num_sampled * self._head.numel())

    def run(self, num_rows: int) -> None:
        """All products of as many rows, of which one gets logits."""
        for weight in self._weights:
            functional.linear(self._input(num_rows, weight), weight)
        functional.linear(self._input(1, self._head), self._head)

    def _input(self, num_rows: int, weight: torch.Tensor) -> torch.Tensor:
        size = (num_rows, weight.shape[1])
        if size not in self._inputs:
            self._inputs[size] = torch.randn(size, dtype=weight.dtype, device=weight.device)
        return self._inputs[size]


def mixed_sampling(engine: TorchEngine, num_rows: int) -> Callable[[], object]:
    """Samples a batch in which a fourth each is greedy, drawn, truncated, and truncated with penalties."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 50, "min_p": 0.05, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    ]
    vocab_size = engine.info.vocab_size
    chunks = []
    for row in range(num_rows):
        sampling = SamplingParams.model_validate({**kinds[row % len(kinds)], "seed": row})
        chunks.append(Chunk(_random_tokens(vocab_size, 256, row), 255, 256, range(16), 128, sampling))
    logits = (3 * torch.randn(num_rows, vocab_size)).to(engine.cache.blocks.device, torch.bfloat16)
    return lambda: engine._sampler.sample(logits, chunks)


def _random_tokens(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]
