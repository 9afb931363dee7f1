"""The client against a real gRPC server that plays the router."""

import asyncio

import pytest

from kvferry.client import (
    AsyncClient,
    Cancelled,
    ChatMessage,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    Overloaded,
    SamplingParams,
    ServerError,
    Unavailable,
)


@pytest.fixture
def client(address):
    with Client(address) as client:
        yield client


def test_tokens_come_one_by_one_and_make_up_the_result(client):
    generation = client.generate("hello", SamplingParams(logprobs=True))
    deltas = list(generation)
    assert [(d.text, d.token_ids) for d in deltas] == [("Hel", (5,)), ("", (6,)), ("lo", (7,))]
    assert [(e.token_id, e.logprob, e.top) for d in deltas for e in d.logprobs] == [
        (5, -2.5, ((5, -0.25),)),
        (6, -3.0, ((6, -0.25),)),
        (7, -3.5, ((7, -0.25),)),
    ]
    result = generation.result
    assert (result.text, result.token_ids, result.finish_reason) == ("Hello", (5, 6, 7), "length")
    assert (result.request_id, result.model) == ("r-1", "tiny")
    assert (result.usage.num_prompt_tokens, result.usage.num_output_tokens) == (4, 3)
    assert [(m.name, m.at_s, m.worker_id) for m in result.moments] == [
        ("received", 0.0, ""),
        ("first_token", 0.5, "prefill-0"),
    ]
    assert result.logprobs == tuple(e for d in deltas for e in d.logprobs)


def test_the_request_arrives_as_it_was_given(client, router):
    sampling = SamplingParams(temperature=0.0, seed=2**63, stop=["x"], logit_bias={3: -1.5}, max_tokens=5)
    client.generate("text", sampling, model="m", priority=-3, label="mine").wait()
    request = router.requests.get(timeout=5)
    assert (request.text, request.model, request.priority, request.label) == ("text", "m", -3, "mine")
    assert SamplingParams.from_message(request.sampling) == sampling

    client.generate([ChatMessage("system", "be brief"), ChatMessage("user", "hi")]).wait()
    chat = router.requests.get(timeout=5).chat
    assert [(m.role, m.content) for m in chat.messages] == [("system", "be brief"), ("user", "hi")]

    client.generate([1, 2, 3]).wait()
    assert list(router.requests.get(timeout=5).token_ids.ids) == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([], {}),
        ([-1], {}),
        ([2**32], {}),
        (["text"], {}),
        ([ChatMessage("user", "a"), 3], {}),
        ([3, ChatMessage("user", "a")], {}),
        ("\ud800", {}),
        ("a", {"priority": 2**40}),
    ],
)
def test_what_no_message_can_hold_is_an_invalid_request(client, prompt, options):
    with pytest.raises(InvalidRequest, match="priority" if options else "prompt: "):
        client.generate(prompt, **options)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("NOT_FOUND", InvalidRequest),
        ("RESOURCE_EXHAUSTED", InvalidRequest),
        ("UNAVAILABLE", Unavailable),
        ("DEADLINE_EXCEEDED", DeadlineExceeded),
        ("CANCELLED", Cancelled),
        ("INTERNAL", ServerError),
        ("UNIMPLEMENTED", ServerError),
    ],
)
async def test_each_status_is_one_exception_with_the_servers_words(address, client, code, kind):
    with pytest.raises(KvferryError, match=f"said {code}") as caught:
        client.generate(f"fail {code}").wait()
    assert type(caught.value) is kind
    async with AsyncClient(address) as async_client:
        with pytest.raises(KvferryError, match=f"said {code}") as caught:
            await async_client.generate(f"fail {code}").wait()
        assert type(caught.value) is kind


def test_overload_says_when_to_come_back(client):
    with pytest.raises(Overloaded) as caught:
        client.generate("fail RESOURCE_EXHAUSTED retry").wait()
    assert caught.value.retry_after_s == 7


def test_an_error_half_way_names_the_request_and_leaves_no_result(client):
    generation = client.generate("fault half-way")
    with pytest.raises(ServerError) as caught:
        generation.wait()
    assert caught.value.request_id == "r-1"
    with pytest.raises(RuntimeError):
        _ = generation.result


def test_a_stream_that_ends_without_an_end_is_an_error(client):
    with pytest.raises(ServerError, match="half-way"):
        client.generate("cut").wait()


def test_a_router_that_is_not_there_is_unavailable():
    with Client("127.0.0.1:9") as client:
        with pytest.raises(Unavailable, match="refused"):
            client.generate("a").wait()
        with pytest.raises(Unavailable):
            client.list_workers()


def test_the_deadline_ends_the_request_on_both_sides(client, router):
    generation = client.generate("hang", timeout_s=0.3)
    assert next(generation).text == "Hel"
    with pytest.raises(DeadlineExceeded):
        generation.wait()
    assert router.ended.wait(5)


def test_cancel_reaches_the_server_and_ends_the_iteration(client, router):
    generation = client.generate("hang")
    next(generation)
    generation.cancel()
    assert router.ended.wait(5)
    with pytest.raises(Cancelled):
        next(generation)


def test_a_request_cancelled_at_once_never_yields(client):
    generation = client.generate("hang")
    generation.cancel()
    with pytest.raises(Cancelled):
        next(generation)


def test_leaving_the_block_cancels(client, router):
    with client.generate("hang") as generation:
        next(generation)
        assert not router.ended.is_set()
    assert router.ended.wait(5)


def test_a_dropped_generation_cancels(client, router):
    next(client.generate("hang"))
    assert router.ended.wait(5)


def test_closing_the_client_cancels(address, router):
    client = Client(address)
    generation = client.generate("hang")
    next(generation)
    client.close()
    assert router.ended.wait(5)


def test_cancel_after_the_end_keeps_the_result(client):
    generation = client.generate("hello")
    generation.wait()
    generation.cancel()
    assert generation.result.text == "Hello"
    assert list(generation) == []


async def test_async_tokens_and_result(address):
    async with AsyncClient(address) as client:
        generation = client.generate("hello")
        assert [delta.text async for delta in generation] == ["Hel", "", "lo"]
        assert generation.result.text == "Hello"


async def test_async_cancel_and_leaving_the_block(address, router):
    async with AsyncClient(address) as client:
        generation = client.generate("hang")
        await anext(generation)
        generation.cancel()
        with pytest.raises(Cancelled):
            await anext(generation)
        assert await asyncio.to_thread(router.ended.wait, 5)
        router.ended.clear()
        async with client.generate("hang") as generation:
            await anext(generation)
        assert await asyncio.to_thread(router.ended.wait, 5)


async def test_a_cancelled_task_cancels_the_request_and_stays_cancelled(address, router):
    async with AsyncClient(address) as client:
        task = asyncio.create_task(client.generate("hang").wait())
        await asyncio.to_thread(router.requests.get, timeout=5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(router.ended.wait, 5)


async def test_async_deadline(address):
    async with AsyncClient(address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("hang", timeout_s=0.3).wait()


async def test_pools_as_the_router_sees_them(address, client):
    pools = client.list_workers()
    assert (pools.model, pools.num_requests, pools.num_queued) == ("tiny", 3, 1)
    (worker,) = pools.workers
    assert (worker.worker_id, worker.role, worker.address, worker.epoch) == (
        "decode-0",
        "decode",
        "127.0.0.1:1",
        9,
    )
    assert (worker.num_free_blocks, worker.num_blocks, worker.num_running) == (60, 64, 2)
    assert worker.incompatible.startswith("block_size")
    async with AsyncClient(address) as async_client:
        assert await async_client.list_workers() == pools
