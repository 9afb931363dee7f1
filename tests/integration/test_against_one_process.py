"""A real (tiny, float32) model through separate pools gives what one engine gives alone, for every option."""

import asyncio
from pathlib import Path

import httpx
import pytest

from decode_worker.loop import DecodeLoop
from engine.torch_engine import TorchEngine
from kvferry.client import SamplingParams


async def test_two_workers_say_what_one_engine_says(start_system, tiny, option):
    fields = {"max_tokens": 24, "seed": 11, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    sampling = SamplingParams(**fields | option)
    expected = tiny.generate(sampling)
    system = await start_system(**tiny.settings, prefill={"max_step_tokens": 8})

    generation = system.client.generate(tiny.prompt, sampling)
    entries = [entry async for delta in generation for entry in delta.logprobs]
    result = generation.result
    assert list(result.token_ids) == [token.token_id for token in expected]
    assert [entry.token_id for entry in entries] == list(result.token_ids)
    for entry, token in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(token.logprob, abs=1e-4)
        assert [i for i, _ in entry.top] == [i for i, _ in token.top_logprobs]
    assert result.usage.num_output_tokens == len(expected)

    body = sampling.to_fields() | {"prompt": tiny.prompt, "logprobs": 3}
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


async def test_a_seed_gives_the_same_whoever_else_is_in_the_batch(start_system, tiny):
    sampling = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    expected = [token.token_id for token in tiny.generate(sampling)]
    system = await start_system(2, 2, **tiny.settings)
    others = [
        system.client.generate([i + 3] * (5 + i), SamplingParams(max_tokens=20 + i, seed=i)).wait()
        for i in range(8)
    ]
    results = await asyncio.gather(
        *(system.client.generate(tiny.prompt, sampling).wait() for _ in range(4)), *others
    )
    assert [list(result.token_ids) for result in results[:4]] == [expected] * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_kv_on_the_decode_worker_is_byte_for_byte_the_prefill_workers(
    start_system, tiny, dtype, monkeypatch
):
    engines: dict[str, TorchEngine] = {}
    compared: list[bool] = []

    def make(model_dir: Path, role: str, **settings: object) -> TorchEngine:
        engines[role] = tiny.make_engine(model_dir, role, dtype=dtype)
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
    system = await start_system(model_dir=tiny.model_dir, make_engine=make, prefill={"max_step_tokens": 8})
    await system.client.generate(tiny.prompt, SamplingParams(max_tokens=5, temperature=0.0)).wait()
    assert compared == [True]
