"""A request through router, prefill worker and decode worker, over real gRPC, with answers known by hand."""

import asyncio

import grpc
import pytest

from engine.fake import expected_output
from kv_transfer.grpc_transport import GrpcTransfer
from kvferry.client import (
    ChatMessage,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    SamplingParams,
    Unavailable,
)
from kvferry.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from rpc.membership import Membership

PROMPT = [5, 7, 11, 13, 17, 19, 23, 29, 31]


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


def vocabulary(system) -> int:
    return system.router.tokenizer.vocab_size


async def test_the_first_token_is_prefills_and_the_rest_are_decodes(start_system):
    system = await start_system()
    result = await system.client.generate(PROMPT, greedy(12)).wait()
    assert list(result.token_ids) == expected_output(PROMPT, 12, vocabulary(system))
    assert result.text == system.router.tokenizer.decode(list(result.token_ids))
    assert result.finish_reason == "length"
    assert (result.usage.num_prompt_tokens, result.usage.num_output_tokens) == (len(PROMPT), 12)
    await system.all_free()


@pytest.mark.parametrize("num_prompt_tokens", range(1, 14))
async def test_every_prompt_length_against_the_block_size(start_system, num_prompt_tokens):
    system = await start_system()
    prompt = [(7 * i) % 400 for i in range(num_prompt_tokens)]
    result = await system.client.generate(prompt, greedy(9)).wait()
    assert list(result.token_ids) == expected_output(prompt, 9, vocabulary(system))
    await system.all_free()


async def test_a_long_prompt_in_chunks_gives_the_same(start_system):
    system = await start_system(prefill={"max_step_tokens": 16})
    prompt = [(3 * i) % 400 for i in range(150)]
    result = await system.client.generate(prompt, greedy(20)).wait()
    assert list(result.token_ids) == expected_output(prompt, 20, vocabulary(system))


async def test_the_moments_of_a_request_are_all_there_in_order(start_system):
    # An answer faster than the acknowledgement's way to the router would lack transfer_ended.
    system = await start_system(decode={"engine": {"step_time_s": 0.01}})
    result = await system.client.generate("Hello", greedy(5)).wait()
    names = [moment.name for moment in result.moments]
    assert sorted(names) == sorted(
        [
            "received",
            "tokenised",
            "reserved",
            "prefill_started",
            "transfer_started",
            "first_token",
            "transfer_ended",
            "decode_started",
            "finished",
        ]
    )
    at_s = {moment.name: moment.at_s for moment in result.moments}
    assert at_s["received"] == 0
    order = [
        "received",
        "tokenised",
        "reserved",
        "prefill_started",
        "first_token",
        "decode_started",
        "finished",
    ]
    assert [at_s[name] for name in order] == sorted(at_s[name] for name in order)
    where = {moment.name: moment.worker_id for moment in result.moments}
    assert (where["first_token"], where["decode_started"], where["received"]) == ("prefill-0", "decode-0", "")


async def test_the_client_has_the_first_token_before_the_last_block_lands(start_system, monkeypatch):
    gate = asyncio.Event()
    real_finish = GrpcTransfer.finish

    async def gated_finish(self, first_token_id):
        await gate.wait()
        await real_finish(self, first_token_id)

    monkeypatch.setattr(GrpcTransfer, "finish", gated_finish)
    system = await start_system()
    generation = system.client.generate(PROMPT, greedy(4))
    first = await anext(generation)
    expected = expected_output(PROMPT, 4, vocabulary(system))
    assert list(first.token_ids) == expected[:1]
    assert (await system.audit("decode-0")).holdings[0].state == "FILLING"
    gate.set()
    assert list((await generation.wait()).token_ids) == expected


async def test_full_blocks_travel_while_the_prompt_is_still_computed(start_system):
    system = await start_system(prefill={"max_step_tokens": 16, "engine": {"step_time_s": 0.05}})
    generation = system.client.generate([1] * 120, greedy(2))
    first = asyncio.create_task(anext(generation))
    landed = 0
    while not first.done() and landed == 0:
        await asyncio.sleep(0.02)
        landed = len(_reservation(system).checksums) if _reservation(system) else 0
    assert not first.done()
    assert landed > 0
    await first
    await generation.wait()


def _reservation(system):
    loop = system.workers["decode-0"].loop
    return next((loop.reservations.get(request_id) for request_id in loop.requests), None)


@pytest.mark.parametrize(
    ("max_tokens", "eos"),
    [(1, frozenset()), (50, "first"), (50, "third")],
    ids=["max_tokens", "eos 1", "eos 3"],
)
async def test_an_end_at_the_seam_is_an_end(start_system, byte_level_dir, max_tokens, eos):
    """The first token may end the output; then nothing is handed off and nobody decodes."""
    size = 402
    output = expected_output(PROMPT, 4, size)
    ends = {"first": frozenset([output[0]]), "third": frozenset([output[2]])}.get(eos, eos)
    settings = {"engine": {"eos_token_ids": ends, "vocab_size": size}}
    system = await start_system(prefill=settings, decode=settings)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    result = await system.client.generate(PROMPT, sampling).wait()
    expected = {"first": output[:1], "third": output[:3]}.get(eos, output[:1])
    assert list(result.token_ids) == expected
    assert result.finish_reason == ("length" if max_tokens == 1 else "stop")
    assert system.workers["decode-0"].loop.counters["tokens"] == max(0, len(expected) - 1)
    await system.all_free()


async def test_a_stop_string_at_the_seam_is_a_stop(start_system):
    system = await start_system()
    tokenizer = system.router.tokenizer
    prompt, stop = next(
        (prompt, text)
        for prompt in ([i, 7] for i in range(400))
        if (text := tokenizer.decode(expected_output(prompt, 1, vocabulary(system)))).isalpha()
    )
    result = await system.client.generate(prompt, greedy(6, stop=[stop])).wait()
    assert (result.text, result.finish_reason, result.usage.num_output_tokens) == ("", "stop", 1)
    await system.all_free()


async def test_logprobs_come_for_every_token_the_first_included(start_system):
    system = await start_system()
    generation = system.client.generate(PROMPT, greedy(5, logprobs=True, top_logprobs=2))
    entries = [entry async for delta in generation for entry in delta.logprobs]
    output = expected_output(PROMPT, 5, vocabulary(system))
    size = vocabulary(system)
    assert [(e.token_id, e.logprob, e.top) for e in entries] == [
        (token, -1.0, ((token, -1.0), ((token + 1) % size, -2.0))) for token in output
    ]


@pytest.mark.parametrize("over", ["shared memory", "bytes"])
async def test_many_at_once_are_each_answered_as_if_alone(start_system, over):
    system = await start_system(2, 2, prefill={"max_step_tokens": 16, "over": over})
    prompts = [[(i * 31 + j) % 400 for j in range(3 + 5 * i % 40)] for i in range(24)]
    results = await asyncio.gather(
        *(system.client.generate(prompt, greedy(5 + i % 9)).wait() for i, prompt in enumerate(prompts))
    )
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert list(result.token_ids) == expected_output(prompt, 5 + i % 9, vocabulary(system)), i
    await system.all_free()


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 1), (1, 2), (2, 2)])
async def test_the_pools_scale_apart_and_share_the_load(start_system, num_prefill, num_decode):
    system = await start_system(num_prefill, num_decode, decode={"engine": {"num_blocks": 400}})
    prompts = [[first, *PROMPT[1:]] for first in range(16)]
    await asyncio.gather(*(system.client.generate(prompt, greedy(8)).wait() for prompt in prompts))
    for name, worker in system.workers.items():
        pool = num_prefill if name.startswith("prefill") else num_decode
        tokens = worker.loop.counters["tokens"]
        fair = 16 * (len(PROMPT) if name.startswith("prefill") else 7) / pool
        assert 0.5 * fair <= tokens <= 1.5 * fair, name


async def test_tokens_come_in_one_message_a_step(start_system, monkeypatch):
    sent = []
    notify = Membership.notify
    monkeypatch.setattr(
        Membership, "notify", lambda self, router: (sent.append(router), notify(self, router))
    )
    system = await start_system(decode={"engine": {"step_time_s": 0.01}})
    await asyncio.gather(*(system.client.generate(PROMPT, greedy(20)).wait() for _ in range(10)))
    counters = system.workers["decode-0"].loop.counters
    assert counters["tokens"] == 190
    assert len(sent) <= counters["steps"] < 190


async def test_out_of_blocks_the_youngest_is_preempted_and_its_output_is_the_same(start_system):
    system = await start_system(decode={"engine": {"num_blocks": 12}})
    prompts = [[10 * i + j for j in range(6)] for i in range(4)]
    results = await asyncio.gather(*(system.client.generate(p, greedy(24)).wait() for p in prompts))
    assert system.workers["decode-0"].loop.counters["preemptions"] > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == expected_output(prompt, 24, vocabulary(system))
    await system.all_free()


async def test_a_prompt_that_runs_out_of_memory_passes_in_smaller_chunks(start_system):
    system = await start_system(prefill={"max_step_tokens": 128, "engine": {"max_tokens_per_step": 32}})
    prompt = [(3 * i) % 400 for i in range(150)]
    result = await system.client.generate(prompt, greedy(3)).wait()
    assert list(result.token_ids) == expected_output(prompt, 3, vocabulary(system))
    assert system.workers["prefill-0"].loop.counters["steps_out_of_memory"] == 2


async def test_a_higher_priority_is_served_first(start_system):
    system = await start_system(
        decode={"engine": {"num_blocks": 8, "step_time_s": 0.005}}, router={"queue_timeout_s": 30}
    )
    ended: list[str] = []

    async def run(name: str, priority: int) -> None:
        await system.client.generate([len(name)] * 20, greedy(10), priority=priority).wait()
        ended.append(name)

    running = asyncio.create_task(run("running", 0))
    while not system.workers["decode-0"].loop.requests:
        await asyncio.sleep(0.005)
    waiting = []
    for name, priority in [("low", -5), ("normal", 0), ("high", 5)]:
        waiting.append(asyncio.create_task(run(name, priority)))
        while system.router.admission.num_queued < len(waiting):
            await asyncio.sleep(0.005)
    await asyncio.gather(running, *waiting)
    assert ended == ["running", "high", "normal", "low"]


# -- Bad input and scarcity --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], greedy(1), "prompt"),
        ("", greedy(1), "prompt"),
        ([402], greedy(1), "prompt.*402"),
        ([1] * 300, greedy(1), "300"),
        ([1] * 250, greedy(50), "max_tokens"),
        ([1], greedy(5, stop_token_ids=[9999]), "stop_token_ids"),
        ([1], greedy(1, min_tokens=2), "min_tokens"),
        ([1], greedy(1, top_logprobs=2), "top_logprobs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_can_be_refused_is_refused_before_any_worker_hears_of_it(
    start_system, prompt, sampling, message
):
    system = await start_system()
    with pytest.raises(InvalidRequest, match=message):
        await system.client.generate(prompt, sampling).wait()
    assert not system.workers["prefill-0"].loop.counters
    assert not system.workers["decode-0"].loop.counters


async def test_another_model_and_a_chat_without_template_are_refused(start_system, byte_fallback_dir):
    system = await start_system(model_dir=byte_fallback_dir)
    with pytest.raises(InvalidRequest, match="model"):
        await system.client.generate("Hi", greedy(1), model="gpt-5").wait()
    with pytest.raises(InvalidRequest, match="messages.*template"):
        await system.client.generate([ChatMessage("user", "Hi")], greedy(1)).wait()


async def test_a_request_that_can_never_fit_is_refused_at_once(start_system):
    system = await start_system(decode={"engine": {"num_blocks": 8}})
    with pytest.raises(InvalidRequest, match="max_tokens.*blocks"):
        await system.client.generate([1] * 20, greedy(40)).wait()
    # Without a bound of the client's, the cache is the bound.
    result = await system.client.generate([1] * 20, SamplingParams(temperature=0.0, ignore_eos=True)).wait()
    assert (result.finish_reason, result.usage.num_output_tokens) == ("length", 12)


async def test_no_room_waits_and_then_says_when_to_come_again(start_system):
    system = await start_system(
        decode={"engine": {"num_blocks": 8, "step_time_s": 0.05}},
        router={"queue_timeout_s": 0.3, "max_queued": 1},
    )
    holder = system.client.generate([1] * 20, greedy(12))
    await anext(holder)
    queued = asyncio.create_task(system.client.generate([2] * 20, greedy(12)).wait())
    while system.router.admission.num_queued == 0:
        await asyncio.sleep(0.005)
    with pytest.raises(Overloaded) as refused:  # The queue is full: at once.
        await system.client.generate([3] * 20, greedy(12)).wait()
    assert refused.value.retry_after_s >= 1
    with pytest.raises(Overloaded, match=r"0\.3 s"):  # It has waited long enough.
        await queued
    assert list((await holder.wait()).token_ids) == expected_output([1] * 20, 12, vocabulary(system))
    result = await system.client.generate([1] * 20, greedy(12)).wait()
    assert result.usage.num_output_tokens == 12
    await system.all_free()


async def test_a_full_prefill_queue_sends_the_request_to_another_worker(start_system):
    slow = {"max_waiting": 1, "max_step_tokens": 4, "engine": {"step_time_s": 0.02}}
    system = await start_system(2, 1, prefill=slow, decode={"engine": {"num_blocks": 4000}})
    results = await asyncio.gather(
        *(system.client.generate([1] * 12, greedy(3)).wait() for _ in range(12)), return_exceptions=True
    )
    done = [r for r in results if not isinstance(r, Exception)]
    refused = [r for r in results if isinstance(r, Exception)]
    assert len(done) >= 2
    assert all(isinstance(r, Overloaded) for r in refused)
    assert all(list(r.token_ids) == expected_output([1] * 12, 3, vocabulary(system)) for r in done)
    await system.all_free()


# -- Cancelling, deadlines, lost peers ---------------------------------------------------------------------


@pytest.mark.parametrize("num_deltas", [0, 1, 2, 7])
async def test_closing_the_stream_frees_both_sides_within_a_second(start_system, num_deltas):
    slow = {"engine": {"step_time_s": 0.02}}
    system = await start_system(prefill=slow | {"max_step_tokens": 8}, decode=slow)
    generation = system.client.generate([3] * 60, greedy(150))
    if num_deltas == 0:
        waiting = asyncio.create_task(anext(generation))
        await asyncio.sleep(0.06)  # In the midst of the prefill.
        assert (await system.audit("prefill-0")).holdings
        generation.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    for _ in range(num_deltas):
        await anext(generation)
    generation.cancel()
    await system.all_free()
    assert system.router.num_requests == 0


@pytest.mark.parametrize("over", ["shared memory", "bytes"])
async def test_a_burst_of_cancels_leaves_nothing_behind_and_nobody_hurt(start_system, over):
    system = await start_system(
        2, 2, prefill={"max_step_tokens": 8, "over": over}, decode={"engine": {"num_blocks": 60}}
    )
    survivor = asyncio.create_task(system.client.generate(PROMPT, greedy(60)).wait())

    async def start_and_leave(i: int) -> None:
        generation = system.client.generate([i % 300] * (1 + i % 40), greedy(100))
        await asyncio.sleep(0.003 * (i % 11))
        generation.cancel()

    await asyncio.gather(*(start_and_leave(i) for i in range(100)))
    assert list((await survivor).token_ids) == expected_output(PROMPT, 60, vocabulary(system))
    await system.all_free()


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_deadline_ends_the_request_and_names_the_stage(start_system, where):
    slow = {"engine": {"step_time_s": 0.1}, "max_step_tokens": 8}
    system = await start_system(**{where: slow})
    with pytest.raises(DeadlineExceeded):
        await system.client.generate([3] * 40, greedy(100), timeout_s=0.35).wait()
    await system.all_free()


async def test_a_lost_router_frees_its_requests_on_the_workers(start_system):
    system = await start_system(decode={"engine": {"step_time_s": 0.02}})
    generation = system.client.generate(PROMPT, greedy(200))
    await anext(generation)
    for worker in system.workers.values():
        worker.set_routers([])
    await system.all_free()


# -- Disagreement ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"block_size": 8}, "block_size: 8 here, 4 on prefill-0"),
        ({"model_digest": "other"}, "model_digest"),
        ({"tokenizer_digest": "other"}, "tokenizer_digest: other here"),
    ],
    ids=["block_size", "model", "tokenizer"],
)
async def test_workers_that_do_not_fit_are_never_paired_and_the_field_is_named(start_system, settings, field):
    system = await start_system(1, 0)
    await system.add_decode("decode-0", engine=settings)
    assert field.partition(":")[0] in system.router.why_not_ready()
    with pytest.raises(Unavailable, match=field.partition(":")[0]):
        await system.client.generate(PROMPT, greedy(2)).wait()
    pools = await system.client.list_workers()
    assert any(field in worker.incompatible for worker in pools.workers)
    await system.add_decode("decode-1")
    assert system.router.why_not_ready() == ""
    for _ in range(3):
        result = await system.client.generate(PROMPT, greedy(4)).wait()
        assert list(result.token_ids) == expected_output(PROMPT, 4, vocabulary(system))
    assert not system.workers["decode-0"].loop.counters


async def test_readiness_tells_what_is_missing(start_system):
    system = await start_system(0, 0)
    assert "no prefill worker" in system.router.why_not_ready()
    await system.add_prefill()
    assert system.router.why_not_ready() == "no decode worker has joined"
    with pytest.raises(Unavailable, match="no decode worker"):
        await system.client.generate(PROMPT, greedy(2)).wait()
    await system.add_decode()
    assert system.router.why_not_ready() == ""


async def test_reserving_is_refused_to_a_router_that_cannot_hear_the_tokens(start_system):
    system = await start_system()
    async with grpc.aio.insecure_channel(system.addresses["decode-0"]) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        request = decode_pb2.ReserveRequest(
            request_id="x",
            router_id="nobody",
            prompt_token_ids=[1],
            sampling=common_pb2.SamplingParams(max_tokens=1, seed=1),
            deadline_s=5,
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Reserve(request)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await system.all_free()
