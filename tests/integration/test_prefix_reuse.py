"""Prompts that begin alike share KV blocks on both sides, and nobody ever reads another's.

The fake engine's answers come from the bytes in the blocks, so a wrong or damaged block changes the output.
"""

import asyncio
import random

import httpx
import pytest

from engine.fake import FakeEngine, expected_output
from kvferry.client import InvalidRequest, KvferryError, SamplingParams
from router.worker import Worker

BLOCK_SIZE = 4
PROMPT = [(7 * i) % 400 for i in range(40)]


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


class Watched:
    """A system, and what its workers have counted since the last look."""

    def __init__(self, system):
        self.system = system
        self._last = {}

    async def ask(self, prompt, num_tokens=4, **options):
        """The output is checked; returns how many tokens of the prompt were cached."""
        result = await self.system.client.generate(prompt, greedy(num_tokens), **options).wait()
        size = self.system.router.tokenizer.vocab_size
        assert list(result.token_ids) == expected_output(prompt, num_tokens, size)
        assert result.usage.num_cached_tokens % BLOCK_SIZE == 0
        return result.usage.num_cached_tokens

    async def indexed(self):
        """Waits until the router knows of every block that can be shared."""
        async with asyncio.timeout(5):
            while not all(
                self.known(name) == set(self.allocator(name).cache.hashes) for name in self.system.workers
            ):
                await asyncio.sleep(0.01)

    def known(self, name):
        return self.worker(name).index._held

    def worker(self, name) -> Worker:
        return next(w for w in self.system.router.registry if w.worker_id == name)

    def allocator(self, name):
        return self.system.workers[name].loop._allocator

    def counter(self, worker, event):
        """How far a worker's counter has moved since it was last asked for here."""
        value = self.system.workers[worker].loop.counters[event]
        before = self._last.get((worker, event), 0)
        self._last[worker, event] = value
        return value - before


@pytest.fixture
async def watch(start_system):
    async def start(*args, **kwargs) -> Watched:
        return Watched(await start_system(*args, **kwargs))

    return start


@pytest.fixture
def received(monkeypatch):
    """The index of every block that a decode worker wrote."""
    from kv_transfer.receiver import Receiver

    indices = []
    put = Receiver.put

    def noted(self, reservation, part):
        refusal = put(self, reservation, part)
        indices.append(part.index if refusal is None else refusal)
        return refusal

    monkeypatch.setattr(Receiver, "put", noted)
    return indices


async def test_only_the_rest_is_computed_and_only_the_rest_travels(watch, received):
    system = await watch()
    assert await system.ask(PROMPT) == 0
    assert system.counter("prefill-0", "tokens") == 40
    assert sorted(received) == list(range(10))
    received.clear()
    longer = [*PROMPT, 1, 2, 3, 4, 5]
    assert await system.ask(longer) == 40
    assert system.counter("prefill-0", "tokens") == 5
    assert sorted(received) == [10, 11]
    received.clear()
    other_end = [*PROMPT[:22], *range(18)]
    assert await system.ask(other_end) == 20
    assert system.counter("prefill-0", "tokens") == 20
    assert sorted(received) == [5, 6, 7, 8, 9]
    assert system.counter("prefill-0", "prefix_hit_tokens") == 60
    assert system.counter("prefill-0", "prefix_query_tokens") == 125
    assert system.counter("decode-0", "prefix_hit_tokens") == 60
    await system.system.all_free()


@pytest.mark.parametrize("num_prompt_tokens", range(1, 18))
async def test_every_length_against_the_block_size_asked_twice(watch, received, num_prompt_tokens):
    """A prompt of whole blocks is held in full: nothing is sent, and it still completes."""
    system = await watch()
    prompt = PROMPT[:num_prompt_tokens]
    assert await system.ask(prompt, 9) == 0
    received.clear()
    # At least the last token is computed, for its logits.
    assert await system.ask(prompt, 9) == (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert len(received) == (num_prompt_tokens % BLOCK_SIZE != 0)
    await system.system.all_free()


async def test_outputs_are_shared_too_where_a_chat_goes_on(watch, received):
    system = await watch()
    output = expected_output(PROMPT, 16, system.system.router.tokenizer.vocab_size)
    await system.ask(PROMPT, 16)
    received.clear()
    await system.ask([*PROMPT, *output, 5, 6], 8)
    # Decode has all but the last of the output, whose KV nobody needed.
    assert min(received) == (len(PROMPT) + 15) // BLOCK_SIZE


async def test_tenants_with_different_salts_share_nothing(watch, received):
    system = await watch()
    for salt in ("", "a", "b"):
        received.clear()
        assert await system.ask(PROMPT, cache_salt=salt) == 0
        assert system.counter("prefill-0", "tokens") == 40
        assert len(received) == 10
    assert system.counter("decode-0", "prefix_hit_tokens") == 0
    assert await system.ask(PROMPT, cache_salt="a") == 36


async def test_a_salt_is_bounded(watch):
    system = await watch()
    with pytest.raises(InvalidRequest, match="cache_salt.*256"):
        await system.ask(PROMPT, cache_salt="x" * 257)
    assert await system.ask(PROMPT, cache_salt="ü" * 256) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_http_tells_the_cached_tokens_and_takes_a_salt(watch, stream):
    system = await watch()
    seen = []
    async with httpx.AsyncClient(base_url=system.system.http_address, trust_env=False) as client:
        for salt in (None, None, "tenant", "tenant"):
            body = {"prompt": PROMPT, "max_tokens": 2, "stream": stream, "cache_salt": salt}
            if stream:
                body["stream_options"] = {"include_usage": True}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200
            text = response.text.split("\n\n")[-3].removeprefix("data: ") if stream else response.text
            usage = httpx.Response(200, text=text).json()["usage"]
            seen.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
        refused = await client.post("/v1/completions", json={"prompt": PROMPT, "cache_salt": "x" * 300})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "cache_salt"
        assert "xxx" not in refused.text
    assert seen == [(40, 0), (40, 36), (40, 0), (40, 36)]


async def test_eviction_under_pressure_keeps_outputs_right(watch):
    """Caches that hold two of the six prompts."""
    small = {"engine": {"num_blocks": 24}}
    system = await watch(prefill=small, decode=small)
    prompts = [[50 * i + j for j in range(40)] for i in range(6)]
    for _ in range(3):
        for prompt in prompts:
            await system.ask([token % 400 for token in prompt], 8)
    for name in ("prefill-0", "decode-0"):
        assert system.allocator(name).cache.num_evictions > 50
    await system.system.all_free()


async def test_preemption_among_sequences_that_share_blocks(watch):
    system = await watch(decode={"engine": {"num_blocks": 16}})
    await system.ask(PROMPT[:12], 2)
    prompts = [[*PROMPT[:12], i] for i in range(4)]
    await asyncio.gather(*(system.ask(prompt, 30) for prompt in prompts))
    assert system.counter("decode-0", "preemptions") > 0
    await system.system.all_free()


async def test_a_cancel_leaves_the_others_blocks_alone(watch):
    slow = {"engine": {"step_time_s": 0.01}}
    system = await watch(prefill=slow | {"max_step_tokens": 8}, decode=slow)
    await system.ask(PROMPT, 2)
    survivors = [asyncio.create_task(system.ask([*PROMPT, 9, i], 20)) for i in range(2)]
    for i in range(20):
        generation = system.system.client.generate([*PROMPT, i % 3, *range(i)], greedy(50))
        waiting = asyncio.create_task(anext(generation))
        await asyncio.sleep(0.005 * (i % 7))
        generation.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.gather(*survivors)
    await system.system.all_free()
    await system.ask(PROMPT, 30)


async def test_what_a_failed_step_left_is_never_shared(watch, monkeypatch):
    step = FakeEngine.step

    def failing(self, chunks):
        if any(chunk.start == 0 and chunk.tokens[0] == 399 for chunk in chunks):
            raise RuntimeError("planted")
        return step(self, chunks)

    system = await watch(prefill={"max_step_tokens": 8})
    monkeypatch.setattr(FakeEngine, "step", failing)
    with pytest.raises(KvferryError, match="prefill step failed"):
        await system.ask([399, *PROMPT])
    monkeypatch.setattr(FakeEngine, "step", step)
    assert await system.ask([399, *PROMPT]) == 0
    await system.system.all_free()


async def test_a_block_for_a_shared_place_is_refused_and_not_written(watch, monkeypatch):
    """A sender that pushes what decode holds already cannot touch it."""
    from kv_transfer.receiver import Receiver, Refusal

    system = await watch()
    await system.ask(PROMPT, 2)
    refusals = []
    put = Receiver.put

    def push_more(self, writing, part):
        for index in range(writing.reservation.num_held_blocks):
            forged = type(part)(
                index, part.generation, part.checksum, part.layers, part.heads, bytes(part.data)
            )
            refusals.append(put(self, writing, forged))
        return put(self, writing, part)

    monkeypatch.setattr(Receiver, "put", push_more)
    await system.ask([*PROMPT, 1, 2, 3], 8)
    assert refusals == [Refusal.DUPLICATE] * 10
    await system.ask(PROMPT, 8)


async def test_a_prompt_goes_where_its_beginning_is(watch):
    system = await watch(3, 3)
    prompts = [[100 * i + j for j in range(40)] for i in range(4)]
    homes = []
    for prompt in prompts:
        await system.ask(prompt, cache_salt="tenant")
        homes.append([n for n in system.system.workers if system.counter(n, "prefix_query_tokens")])
    assert len({tuple(home) for home in homes}) == 3  # Idle equals take turns.
    await system.indexed()
    for prompt, home in zip(prompts * 2, homes * 2, strict=True):
        assert await system.ask([*prompt, 7], 4, cache_salt="tenant") == 40
        assert [n for n in system.system.workers if system.counter(n, "prefix_query_tokens")] == home


async def test_a_worker_with_the_prefix_does_not_get_everything(watch):
    system = await watch(2, 1, prefill={"max_step_tokens": 8, "engine": {"step_time_s": 0.005}})
    await system.ask(PROMPT)
    await system.indexed()
    prompts = [[*PROMPT, *([i] * 40)] for i in range(12)]
    await asyncio.gather(*(system.ask(prompt) for prompt in prompts))
    got = [system.counter(name, "prefix_query_tokens") for name in ("prefill-0", "prefill-1")]
    assert min(got) >= 2 * 80


async def test_a_stale_index_costs_time_and_nothing_else(watch):
    """The router thinks that the workers have what they have evicted."""
    small = {"engine": {"num_blocks": 16}}
    system = await watch(prefill=small, decode=small)
    await system.ask(PROMPT)
    await system.indexed()
    known = {name: set(system.known(name)) for name in system.system.workers}
    for first in (1, 2):
        await system.ask([first, *PROMPT], 8)
    await system.indexed()
    for name, hashes in known.items():
        system.known(name).update(hashes)
    assert await system.ask(PROMPT, 8) == 0
    await system.system.all_free()


async def test_the_index_heals_when_a_change_was_lost(watch, monkeypatch):
    lost = {}
    take_report = Worker.take_report

    def lossy(self, load, now_s):
        if load.block_changes.added and self.worker_id not in lost:
            lost[self.worker_id] = load.block_changes.added
            load.ClearField("block_changes")
        take_report(self, load, now_s)

    system = await watch()
    monkeypatch.setattr(Worker, "take_report", lossy)
    await system.ask(PROMPT)
    async with asyncio.timeout(5):
        while len(lost) < 2:
            await asyncio.sleep(0.01)
    await system.ask([5, *PROMPT])  # Brings the next change, which shows the loss.
    await system.indexed()
    assert await system.ask(PROMPT) == 36
    for name, hashes in lost.items():
        assert system.worker(name).index.num_leading([hashes[:16]]) == 1


async def test_the_index_heals_when_a_worker_rejoins(watch):
    system = await watch()
    await system.ask(PROMPT)
    await system.indexed()
    worker = system.system.workers["prefill-0"]
    before = system.worker("prefill-0")
    worker.set_routers([])
    async with asyncio.timeout(5):
        while any(w is before for w in system.system.router.registry):
            await asyncio.sleep(0.01)
    worker.set_routers([system.system.grpc_address])
    async with asyncio.timeout(5):
        while not any(w.worker_id == "prefill-0" for w in system.system.router.registry):
            await asyncio.sleep(0.01)
    await system.indexed()
    assert system.worker("prefill-0") is not before
    assert await system.ask(PROMPT) == 36


async def test_a_restarted_worker_is_known_to_hold_nothing(watch):
    system = await watch()
    await system.ask(PROMPT)
    await system.indexed()
    await system.system.stop("prefill-0")
    await system.system.add_prefill("prefill-0")
    await system.indexed()
    assert not system.known("prefill-0")
    assert await system.ask(PROMPT) == 0


async def test_workers_that_name_blocks_otherwise_are_not_paired(watch, monkeypatch):
    system = await watch(1, 0)
    monkeypatch.setattr("scheduling.block_hash.SCHEME", "md5")
    await system.system.add_decode("decode-0")
    assert "hash_scheme: md5 here, blake2b-128 on prefill-0" in system.system.router.why_not_ready()


async def test_cached_and_evicted_blocks_are_among_the_metrics(watch):
    small = {"engine": {"num_blocks": 16}}
    system = await watch(prefill=small, decode=small)
    for first in range(3):
        await system.ask([first, *PROMPT[1:]])
    await asyncio.sleep(0.5)
    lines = system.system.router.metrics().decode().splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    for worker, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        labels = f'role="{role}"'
        blocks = {
            state: values[f'kvferry_blocks{{{labels},state="{state}",worker="{worker}"}}']
            for state in ("free", "cached", "reserved", "running", "total")
        }
        assert blocks.pop("total") == sum(blocks.values()) == 16
        assert blocks["cached"] > 0
        for event in ("blocks_evicted", "prefix_query_tokens"):
            name = f'kvferry_worker_events_total{{event="{event}",{labels},worker="{worker}"}}'
            assert values[name] > 0


@pytest.mark.parametrize("seed", range(4))
async def test_many_random_requests_over_few_prefixes_in_tiny_caches(watch, seed):
    """Sharing, eviction, preemption, salts and cancels at once; every output is right, nothing is left."""
    choose = random.Random(seed)
    tiny = {"engine": {"num_blocks": choose.choice([26, 40])}}
    system = await watch(2, 2, prefill=tiny | {"max_step_tokens": 16}, decode=tiny)
    stems = [[choose.randrange(400) for _ in range(choose.choice([8, 19, 24, 40]))] for _ in range(4)]

    async def one(i: int) -> None:
        await asyncio.sleep(0.002 * i)
        stem = choose.choice(stems)
        cut = choose.choice([len(stem), choose.randrange(1, len(stem) + 1)])
        prompt = [*stem[:cut], *([choose.randrange(400)] * choose.choice([0, 1, 5]))]
        salt = choose.choice(["", "", "other"])
        if choose.random() < 0.2:
            generation = system.system.client.generate(prompt, greedy(30), cache_salt=salt)
            await asyncio.sleep(choose.random() * 0.03)
            generation.cancel()
        else:
            await system.ask(prompt, choose.choice([1, 2, 9, 30]), cache_salt=salt)

    await asyncio.gather(*(one(i) for i in range(80)))
    assert sum(system.counter(name, "prefix_hit_tokens") for name in system.system.workers) > 0
    await system.system.all_free()
