"""A real (tiny, float32) model through separate pools gives what one engine gives alone, for every option."""

import asyncio
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode_worker.loop import DecodeLoop
from engine.engine import Chunk, SampledToken
from engine.finish import finish_reason
from engine.torch_engine import TorchEngine
from kvferry.client import SamplingParams
from kvferry.config import EngineConfig

PROMPT = [45, 300, 12, 7, 77, 130, 299, 8, 45, 300, 12, 7, 200, 201, 202]
END_TOKEN = 2

OPTIONS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.8},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {17: 8.0, 23: -100.0}},
    "stop_token_ids": {"stop_token_ids": list(range(0, 400, 9))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(0, 400, 7))},
    "max_tokens 1": {"max_tokens": 1},
    "ends allowed": {"ignore_eos": False, "logit_bias": {END_TOKEN: 6.0}},
    "everything": {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 2.0},
        "min_tokens": 4,
        "stop_token_ids": [11, 13],
    },
}


@pytest.fixture(scope="module")
def model_dir(byte_level_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the test tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    for file in byte_level_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=402,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        # Wide enough that no two tokens are near a tie.
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=END_TOKEN,
        pad_token_id=END_TOKEN,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_engine(model_dir: Path, role: str, **settings: object) -> TorchEngine:
    defaults = {"dtype": "float32", "block_size": 4, "num_blocks": 64, "num_threads": 1}
    return TorchEngine.load(EngineConfig(**defaults | settings), model_dir)


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> TorchEngine:
    return make_engine(model_dir, "both")


def generate_alone(engine: TorchEngine, sampling: SamplingParams) -> list[SampledToken]:
    """The plainest loop there is: one sequence, one step a token."""
    tokens, output, start = list(PROMPT), [], 0
    while True:
        (token,) = engine.step([Chunk(tokens, start, len(tokens), list(range(60)), len(PROMPT), sampling)])
        start = len(tokens)
        tokens.append(token.token_id)
        output.append(token)
        if finish_reason(
            sampling,
            engine.info.eos_token_ids,
            token_id=token.token_id,
            num_output_tokens=len(output),
            num_tokens=len(tokens),
            max_context_tokens=256,
        ):
            return output


@pytest.mark.parametrize("option", OPTIONS)
async def test_two_workers_say_what_one_engine_says(start_system, model_dir, alone, option):
    fields = {"max_tokens": 24, "seed": 11, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    sampling = SamplingParams(**fields | OPTIONS[option])
    expected = generate_alone(alone, sampling)
    system = await start_system(model_dir=model_dir, make_engine=make_engine, prefill={"max_step_tokens": 8})

    generation = system.client.generate(PROMPT, sampling)
    entries = [entry async for delta in generation for entry in delta.logprobs]
    result = generation.result
    assert list(result.token_ids) == [token.token_id for token in expected]
    assert [entry.token_id for entry in entries] == list(result.token_ids)
    for entry, token in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(token.logprob, abs=1e-4)
        assert [i for i, _ in entry.top] == [i for i, _ in token.top_logprobs]
    assert result.usage.num_output_tokens == len(expected)

    body = sampling.to_fields() | {"prompt": PROMPT, "logprobs": 3}
    del body["top_logprobs"]
    body["logit_bias"] = {str(i): bias for i, bias in sampling.logit_bias.items()}
    async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
        answer = await http.post(f"{system.http_address}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["text"] == result.text
    assert choice["finish_reason"] == result.finish_reason
    assert answer.json()["usage"]["completion_tokens"] == len(expected)
    assert len(choice["logprobs"]["token_logprobs"]) == len(expected)
    await system.all_free()


async def test_a_seed_gives_the_same_whoever_else_is_in_the_batch(start_system, model_dir, alone):
    sampling = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    expected = [token.token_id for token in generate_alone(alone, sampling)]
    system = await start_system(2, 2, model_dir=model_dir, make_engine=make_engine)
    others = [
        system.client.generate([i + 3] * (5 + i), SamplingParams(max_tokens=20 + i, seed=i)).wait()
        for i in range(8)
    ]
    results = await asyncio.gather(
        *(system.client.generate(PROMPT, sampling).wait() for _ in range(4)), *others
    )
    assert [list(result.token_ids) for result in results[:4]] == [expected] * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_kv_on_the_decode_worker_is_byte_for_byte_the_prefill_workers(
    start_system, model_dir, dtype, monkeypatch
):
    engines: dict[str, TorchEngine] = {}
    compared: list[bool] = []

    def make(model_dir: Path, role: str, **settings: object) -> TorchEngine:
        engines[role] = make_engine(model_dir, role, dtype=dtype)
        return engines[role]

    real_complete = DecodeLoop.complete

    def complete(loop, reservation):
        """Both sides still hold the blocks at this point: nothing was acknowledged yet."""
        job = system.workers["prefill-0"].loop.jobs[reservation.lease.request_id]
        sent = [engines["prefill"].cache.read_block(block) for block in job.sequence.block_table]
        landed = [engines["decode"].cache.read_block(block) for block in reservation.block_table]
        compared.append(any(map(any, sent)) and sent == landed[: len(sent)])
        real_complete(loop, reservation)

    monkeypatch.setattr(DecodeLoop, "complete", complete)
    system = await start_system(model_dir=model_dir, make_engine=make, prefill={"max_step_tokens": 8})
    await system.client.generate(PROMPT, SamplingParams(max_tokens=5, temperature=0.0)).wait()
    assert compared == [True]
