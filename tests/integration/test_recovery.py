"""A worker dies at any moment of a request's life; the client does not notice."""

import asyncio
from typing import Any

import pytest

from decode_worker.streams import StepTokens, TokenStreams
from kvferry.client import KvferryError, SamplingParams
from router import lifecycle


class Gate:
    """An engine whose step number `at` (from 0) waits until it is opened."""

    def __init__(self, engine: Any, at: int, on_reached: Any) -> None:
        self._engine, self._at, self._on_reached = engine, at, on_reached
        self.info, self.cache = engine.info, engine.cache

    def step(self, chunks: Any) -> Any:
        self._at -= 1
        if self._at == -1:
            self._on_reached()
        return self._engine.step(chunks)


async def interrupted(
    system: Any, prompt: list[int], sampling: SamplingParams, kill: str, at_token: int
) -> Any:
    """Generates, and stops a worker as soon as the client has so many tokens."""
    generation = system.client.generate(prompt, sampling)
    token_ids: list[int] = []
    entries = []
    async for delta in generation:
        token_ids += delta.token_ids
        entries += delta.logprobs
        if len(token_ids) >= at_token and kill in system.workers:
            await system.stop(kill)
    assert list(generation.result.token_ids) == token_ids
    return generation.result, entries


async def decoding_worker(system: Any) -> str:
    """The decode worker that has the one request."""
    return next(w.worker_id for w in system.router.registry if not w.is_prefill and w.inboxes)


async def test_the_answer_is_the_unharmed_one_when_decode_dies(start_system, tiny, option):
    fields = {"max_tokens": 16, "seed": 11, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    sampling = SamplingParams(**fields | option)
    expected = tiny.generate(sampling)
    system = await start_system(1, 1, **tiny.settings)
    for number, at_token in enumerate(range(1, len(expected), 3)):
        await system.add_decode(f"decode-{number + 1}")
        system_was = len(system.workers)
        result, entries = await interrupted(system, tiny.prompt, sampling, f"decode-{number}", at_token)
        assert list(result.token_ids) == [token.token_id for token in expected]
        assert [entry.token_id for entry in entries] == list(result.token_ids)
        for entry, token in zip(entries, expected, strict=True):
            assert entry.logprob == pytest.approx(token.logprob, abs=1e-4)
        assert result.usage.num_output_tokens == len(expected)
        assert result.usage.num_prompt_tokens == len(tiny.prompt)
        assert len(system.workers) == system_was - 1
        await system.all_free()


async def test_decode_dies_at_every_token_of_an_answer(start_system, tiny):
    sampling = SamplingParams(max_tokens=64, seed=4, ignore_eos=True, stop=["never to be seen"])
    expected = [token.token_id for token in tiny.generate(sampling)]
    system = await start_system(2, 1, **tiny.settings)
    texts = set()
    for k in range(64):
        generation = system.client.generate(tiny.prompt, sampling)
        token_ids: list[int] = []
        victim = ""
        async for delta in generation:
            token_ids += delta.token_ids
            if not victim and len(token_ids) > k:
                victim = await decoding_worker(system) if len(token_ids) < 64 else "none"
                if victim != "none":
                    await system.add_decode(f"decode-{k + 1}")
                    await system.stop(victim)
        assert token_ids == expected, k
        texts.add(generation.result.text)
    assert len(texts) == 1
    await system.all_free()


async def test_another_prefill_worker_takes_over_a_prompt(start_system, tiny):
    sampling = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
    expected = [token.token_id for token in tiny.generate(sampling)]
    for chunk in range(4):
        system = await start_system(0, 1, **tiny.settings)
        loop = asyncio.get_running_loop()
        reached = asyncio.Event()
        gate = Gate(
            tiny.make_engine(tiny.model_dir, "prefill"),
            chunk,
            lambda loop=loop, reached=reached: loop.call_soon_threadsafe(reached.set),
        )
        await system.add_prefill("prefill-0", engine=gate, max_step_tokens=4)
        running = asyncio.create_task(system.client.generate(tiny.prompt, sampling).wait())
        await asyncio.wait_for(reached.wait(), 10)
        await system.add_prefill("prefill-1")
        await system.stop("prefill-0")
        result = await asyncio.wait_for(running, 20)
        assert list(result.token_ids) == expected, chunk
        await system.all_free()


async def test_the_only_workers_die_and_come_back(start_system, tiny):
    sampling = SamplingParams(max_tokens=24, seed=4, ignore_eos=True)
    expected = [token.token_id for token in tiny.generate(sampling)]
    system = await start_system(1, 1, **tiny.settings)
    generation = system.client.generate(tiny.prompt, sampling)
    token_ids: list[int] = []
    async for delta in generation:
        token_ids += delta.token_ids
        if len(token_ids) >= 5 and "decode-0" in system.workers and "prefill-0" in system.workers:
            await system.stop("prefill-0")
            await system.stop("decode-0")
            await system.add_decode("decode-1")
            await system.add_prefill("prefill-1")
    assert token_ids == expected
    assert b"kvferry_recoveries_total 1.0" in system.router.metrics()
    await system.all_free()


@pytest.mark.parametrize("lost", ["a step", "the last tokens"])
async def test_a_token_that_was_lost_on_its_way_is_noticed(start_system, tiny, monkeypatch, lost):
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = [token.token_id for token in tiny.generate(sampling)]
    system = await start_system(1, 1, **tiny.settings)
    take = TokenStreams.take
    losses: list[StepTokens] = []

    def lossy_take(streams: TokenStreams, router_id: str) -> StepTokens | None:
        step = take(streams, router_id)
        if step is None or losses or (lost == "the last tokens" and not step.ended):
            return step
        losses.append(step)
        return StepTokens(ended=step.ended) if step.ended else None

    monkeypatch.setattr(TokenStreams, "take", lossy_take)
    result = await system.client.generate(tiny.prompt, sampling).wait()
    assert losses
    assert losses[0].token_ids
    assert list(result.token_ids) == expected
    assert b"kvferry_recoveries_total 1.0" in system.router.metrics()
    await system.all_free()


async def test_a_request_whose_workers_die_over_and_over_is_given_up_and_named(start_system):
    system = await start_system(1, 1, decode={"engine": {"step_time_s": 0.05}})
    generation = system.client.generate([5, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    num_kills = 0
    with pytest.raises(KvferryError) as raised:
        async for _ in generation:
            victim = await decoding_worker(system)
            num_kills += 1
            await system.add_decode(f"decode-{num_kills}", engine={"step_time_s": 0.05})
            await system.stop(victim)
    assert 2 <= num_kills <= lifecycle.MAX_RECOVERIES + 1
    assert "was lost" in str(raised.value)
    assert "tokens" in str(raised.value)
    await system.all_free()


async def test_an_accepted_request_waits_where_the_prefill_queues_are_full(start_system):
    slow = {"max_waiting": 1, "max_step_tokens": 8, "engine": {"step_time_s": 0.05}}
    system = await start_system(1, 2, prefill=slow, decode={"engine": {"step_time_s": 0.02}})
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    generation = system.client.generate([5, 7], sampling)
    token_ids: list[int] = []
    others: list[asyncio.Task[Any]] = []
    async for delta in generation:
        token_ids += delta.token_ids
        if not others and len(token_ids) > 3:
            victim = await decoding_worker(system)
            prompts = ([3] * 60, [4] * 60)
            few = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
            others = [asyncio.create_task(system.client.generate(p, few).wait()) for p in prompts]
            while not system.workers["prefill-0"].loop.scheduler.num_waiting:
                await asyncio.sleep(0.005)
            await system.stop(victim)
    assert len(token_ids) == 40
    assert system.workers["prefill-0"].loop.counters["prefills_refused"] > 0
    await asyncio.gather(*others)
    await system.all_free()


async def test_a_silent_worker_is_left_and_its_requests_carry_on(start_system, tiny):
    sampling = SamplingParams(max_tokens=64, seed=4, ignore_eos=True)
    expected = [token.token_id for token in tiny.generate(sampling)]
    system = await start_system(1, 2, **tiny.settings)
    generation = system.client.generate(tiny.prompt, sampling)
    token_ids: list[int] = []
    left = ""
    async for delta in generation:
        token_ids += delta.token_ids
        if not left:
            left = await decoding_worker(system)
            worker = next(w for w in system.router.registry if w.worker_id == left)
            system.router.registry.remove(worker, "it said nothing")
    assert token_ids == expected
    assert b"kvferry_recoveries_total 1.0" in system.router.metrics()
    await system.all_free()
    async with asyncio.timeout(10):  # It joins again by itself.
        while left not in {w.worker_id for w in system.router.registry}:
            await asyncio.sleep(0.02)


async def test_a_request_with_more_tokens_than_there_are_blocks_waits_for_workers_too(start_system, tiny):
    """How much room it needs is known only once a worker is there to say how large a block is."""
    sampling = SamplingParams(max_tokens=80, seed=4, ignore_eos=True)
    expected = [token.token_id for token in tiny.generate(sampling)]
    system = await start_system(1, 1, **tiny.settings)
    generation = system.client.generate(tiny.prompt, sampling)
    token_ids: list[int] = []
    async for delta in generation:
        token_ids += delta.token_ids
        if len(token_ids) >= 5 and "decode-0" in system.workers:
            await system.stop("prefill-0")
            await system.stop("decode-0")
            async with asyncio.timeout(10):
                while system.router.admission.num_queued == 0:
                    await asyncio.sleep(0.005)
            await system.add_decode("decode-1")
            await system.add_prefill("prefill-1")
    assert token_ids == expected
