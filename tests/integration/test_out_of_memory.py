"""A step runs out of the device's memory: the prompt passes in smaller chunks, which grow again later."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.torch_engine import TorchEngine
from kvferry.client import SamplingParams
from kvferry.config import EngineConfig
from scheduling.step_limit import NUM_STEPS_BEFORE_GROWTH

PROMPT = [(7 * i) % 390 + 3 for i in range(600)]
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class SmallDevice:
    """Makes engines whose model says as torch does that `max_tokens` are all that fits its device."""

    def __init__(self) -> None:
        self.max_tokens = 128
        self.sizes: list[int] = []

    def make_engine(self, model_dir: Path, role: str, **settings: Any) -> TorchEngine:
        config = EngineConfig(dtype="float32", block_size=16, num_blocks=100, num_threads=1)
        engine = TorchEngine.load(config, model_dir)
        if role == "prefill":
            engine._model.register_forward_pre_hook(self._check, with_kwargs=True)
        return engine

    def _check(self, model: Any, args: Any, kwargs: Any) -> None:
        num_tokens = kwargs["input_ids"].numel()
        self.sizes.append(num_tokens)
        if num_tokens > self.max_tokens:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {num_tokens} tokens")


@pytest.fixture(scope="module")
def long_dir(byte_level_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a context of 1024 tokens and the test tokenizer."""
    folder = tmp_path_factory.mktemp("long-llama")
    for file in byte_level_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=402,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


async def test_a_prompt_that_does_not_fit_at_512_passes_at_128_and_the_chunk_recovers(start_system, long_dir):
    device = SmallDevice()
    settings = {"model_dir": long_dir, "make_engine": device.make_engine}
    system = await start_system(prefill={"max_step_tokens": 512}, **settings)

    result = await system.client.generate(PROMPT, GREEDY).wait()
    assert device.sizes == [512, 256, 128, 128, 128, 128, 88]
    counters = system.workers["prefill-0"].loop.counters
    assert counters["steps_out_of_memory"] == 2
    assert counters["steps"] == 5

    # Memory is there again. Each run of good steps, however small, doubles the chunk.
    device.max_tokens = 512
    for number in range(2 * NUM_STEPS_BEFORE_GROWTH):
        await system.client.generate([3 + number], SamplingParams(max_tokens=1, temperature=0)).wait()
    device.sizes.clear()
    again = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    unharmed = await system.client.generate(PROMPT, again, cache_salt="nothing is cached").wait()
    assert device.sizes == [512, 88]
    assert list(unharmed.token_ids) == list(result.token_ids)
    assert counters["steps_out_of_memory"] == 2
    await system.all_free()

    event = 'kvferry_worker_events_total{event="steps_out_of_memory",role="prefill",worker="prefill-0"} 2.0'
    async with asyncio.timeout(5):
        while event not in system.router.metrics().decode():
            await asyncio.sleep(0.02)


async def test_a_prompt_that_does_not_fit_at_all_fails_alone_and_says_why(start_system, long_dir):
    device = SmallDevice()
    device.max_tokens = 8
    settings = {"model_dir": long_dir, "make_engine": device.make_engine}
    system = await start_system(prefill={"max_step_tokens": 512}, **settings)
    with pytest.raises(Exception, match="prefill step failed: OutOfMemory"):
        await system.client.generate(PROMPT, GREEDY).wait()
    assert device.sizes[-2:] == [16, 16]
    short = await system.client.generate(PROMPT[:8], GREEDY).wait()
    assert len(short.token_ids) == 4
    await system.all_free()
