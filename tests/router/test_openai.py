"""The official client against the real server."""

import asyncio

import openai
import pytest

from router.errors import DeadlineExceeded, Overloaded, Unavailable
from router.events import Delta

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}]


@pytest.fixture
async def client(base_url):
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat(client, service):
    response = await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, user="me")
    [choice] = response.choices
    assert choice.message.content == service.ANSWER
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    [request] = service.requests
    assert response.id == "chatcmpl-" + request.request_id.removeprefix("req-")
    assert response.object == "chat.completion"
    assert response.model == "tiny"
    assert request.label == "me"
    assert request.sampling.temperature == 0
    assert response.usage.prompt_tokens == len(request.prompt_token_ids)
    # The end token is counted, but not shown.
    assert response.usage.completion_tokens == len(service.tokenizer.encode(service.ANSWER)) + 1
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens


async def test_a_stream_says_what_the_whole_response_says(client, service):
    options = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "seed": -5}
    whole = await client.chat.completions.create(**options)
    stream = await client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *parts, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    choices = [chunk.choices[0] for chunk in parts]
    # OpenAI's chunks then have the field, without a value, from the start.
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in parts)
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    streamed = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert streamed == whole.choices[0].logprobs.content
    assert len(streamed) == whole.usage.completion_tokens
    assert service.requests[0].sampling.seed == 2**64 - 5


async def test_chat_logprobs(client, service):
    response = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3
    )
    content = response.choices[0].logprobs.content
    shown = [entry for entry in content if entry.token != "<|im_end|>"]
    assert b"".join(bytes(entry.bytes) for entry in shown).decode() == service.ANSWER
    assert {entry.logprob for entry in content} == {-0.5}
    assert [alternative.logprob for alternative in content[0].top_logprobs] == [-0.5, -1.5, -9999.0]
    assert content[0].top_logprobs[0].token == content[0].token


async def test_completions(client, service):
    response = await client.completions.create(model="tiny", prompt="Paris is", max_tokens=100, logprobs=2)
    [choice] = response.choices
    assert choice.text == service.ANSWER
    assert choice.finish_reason == "stop"
    assert response.object == "text_completion"
    assert response.id.startswith("cmpl-")
    logprobs = choice.logprobs
    num_tokens = response.usage.completion_tokens
    assert set(logprobs.token_logprobs) == {-0.5}
    lengths = {len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.top_logprobs)}
    assert lengths == {len(logprobs.text_offset)} == {num_tokens}
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "\ufffd" not in token and token != "<|im_end|>":
            assert choice.text[offset:].startswith(token)
    assert logprobs.text_offset[-1] == len(choice.text)


async def test_streamed_completions(client, service):
    options = {"model": "tiny", "prompt": "Paris is", "max_tokens": 100, "logprobs": 0}
    whole = await client.completions.create(**options)
    stream = await client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage == whole.usage
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        values = [value for logprobs in streamed for value in getattr(logprobs, name)]
        assert values == getattr(whole.choices[0].logprobs, name)


async def test_a_stream_without_usage_has_none(client):
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


async def test_max_tokens_and_stop_strings(client, service):
    create = client.chat.completions.create
    response = await create(model="tiny", messages=MESSAGES, max_completion_tokens=3)
    assert response.choices[0].finish_reason == "length"
    assert response.usage.completion_tokens == 3
    response = await create(model="tiny", messages=MESSAGES, stop=" is")
    assert response.choices[0].finish_reason == "stop"
    assert response.choices[0].message.content == "The capital"
    response = await client.completions.create(model="tiny", prompt="a", stop=["Paris", ","])
    assert response.choices[0].text == "The capital is "[: len(response.choices[0].text)]
    assert service.requests[-1].max_tokens == 16


async def test_every_extension_reaches_the_sampling(client, service):
    values = {
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
    }
    await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        logit_bias={"5": -100, "6": 1.5},
        presence_penalty=1,
        frequency_penalty=-1,
        top_p=0.5,
        extra_body={**values, "priority": 3},
    )
    [request] = service.requests
    assert {name: getattr(request.sampling, name) for name in values} == values
    assert request.sampling.logit_bias == {5: -100, 6: 1.5}
    assert (request.sampling.presence_penalty, request.sampling.frequency_penalty) == (1, -1)
    assert request.sampling.top_p == 0.5
    assert request.priority == 3


async def test_an_answer_can_be_sent_back_as_it_came(client, service):
    first = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    messages = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "Really?"}]
    await client.chat.completions.create(model="tiny", messages=messages)
    prompt = service.tokenizer.decode(service.requests[-1].prompt_token_ids)
    assert f"assistant\n{service.ANSWER}\nuser\nReally?" in prompt


async def test_text_parts_and_developer_messages(client, service):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for messages in (
        [{"role": "developer", "content": parts}, {"role": "user", "content": "c"}],
        [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}],
    ):
        await client.chat.completions.create(model="tiny", messages=messages)
    first, second = service.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_prompts_as_token_ids_and_in_lists_of_one(client, service):
    for prompt in ([5, 6], [[5, 6]], "Paris", ["Paris"]):
        await client.completions.create(model="tiny", prompt=prompt)
    ids = [request.prompt_token_ids for request in service.requests]
    assert ids[0] == ids[1] == [5, 6]
    assert ids[2] == ids[3] == service.tokenizer.encode("Paris")


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).object == "model"
    with pytest.raises(openai.NotFoundError, match="'org/other' is not served here; 'tiny' is"):
        await client.models.retrieve("org/other")


async def test_errors_are_the_clients_own(client, service):
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="tiny", messages=MESSAGES, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as caught:
        await create(model="other", messages=MESSAGES)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    for error, expected in (
        (Overloaded("no room", 7), openai.RateLimitError),
        (Unavailable("no worker"), openai.InternalServerError),
        (DeadlineExceeded("too late in prefill"), openai.InternalServerError),
    ):
        service.script = failing(error)
        for stream in (False, True):
            with pytest.raises(expected) as caught:
                await create(model="tiny", messages=MESSAGES, stream=stream)
            assert str(error) in str(caught.value)
            assert caught.value.status_code == error.http_status
    service.script = failing(Overloaded("no room", 7))
    with pytest.raises(openai.RateLimitError) as caught:
        await create(model="tiny", messages=MESSAGES)
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.type == "rate_limit_error"


async def test_an_error_in_a_started_stream_reaches_the_client(client, service):
    service.script = failing(Unavailable("decode-0 was lost"), Delta("Hel", [1]))
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="decode-0 was lost"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content
    assert text == "Hel"


async def test_the_synchronous_client(base_url, service):
    def ask():
        with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES)
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="tiny", prompt="")
            return whole.choices[0].message.content, text

    assert await asyncio.to_thread(ask) == (service.ANSWER, service.ANSWER)


def failing(error, *events):
    async def script(request):
        for event in events:
            yield event
        raise error

    return script
