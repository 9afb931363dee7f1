"""The HTTP server under everything that is not the official client."""

import asyncio
import json
import logging
import socket

import httpx
import pytest

from kvferry.config import RouterConfig
from router.events import Delta, Finished
from router.http import HttpServer, build_app

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def client(base_url):
    async with httpx.AsyncClient(base_url=base_url, timeout=20) as client:
        yield client


@pytest.fixture
async def app_client(service):
    """Without a server between: for tables of cases about bodies."""
    transport = httpx.ASGITransport(build_app(service, RouterConfig()))
    async with httpx.AsyncClient(base_url="http://router", transport=transport) as client:
        yield client


def hanging(*events):
    async def script(request):
        for event in events:
            yield event
        await asyncio.Event().wait()

    return script


def refused(response, status, param):
    """Checks the shape of an error, and gives its message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param
    assert response.headers["x-request-id"].startswith("req-")
    return body["error"]["message"]


MESSAGE = {"role": "user", "content": "hi"}

BAD_CHATS = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "hi"}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "hi"}]}),
    ("messages[0].role", {"messages": [{"content": "hi"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages[1].name", {"messages": [MESSAGE, {**MESSAGE, "name": "x"}]}),
    (
        "messages[0].content[0]",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
    ("messages", {"messages": [{"role": "user", "content": "hi " * 300}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": "a" * 90_000}]}),
    ("max_completion_tokens", {"max_completion_tokens": 256}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_tokens", {"max_tokens": 256}),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 5}),
    ("logprobs", {"logprobs": 1}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"top_logprobs": 1}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
    ("echo", {"echo": True}),
]

BAD_COMPLETIONS = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": 3}),
    ("prompt", {"prompt": ["a", "b"]}),
    ("prompt", {"prompt": [[1], [2]]}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [1, True]}),
    ("prompt", {"prompt": [1, 2.0]}),
    ("prompt", {"prompt": [9999]}),
    ("prompt", {"prompt": [2**70]}),
    ("logprobs", {"logprobs": True}),
    ("logprobs", {"logprobs": 21}),
    ("top_logprobs", {"top_logprobs": 1}),
    ("best_of", {"best_of": 2}),
    ("echo", {"echo": True}),
    ("suffix", {"suffix": "x"}),
    ("messages", {"messages": [MESSAGE]}),
]

BAD_FOR_BOTH = [
    ("model", {"model": 3}),
    ("temperature", {"temperature": 2.5}),
    ("temperature", {"temperature": "1"}),
    ("temperature", {"temperature": True}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -1}),
    ("top_k", {"top_k": 1.5}),
    ("min_p", {"min_p": 2}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": True}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 3}),
    ("seed", {"seed": 1.5}),
    ("seed", {"seed": 2**64}),
    ("stop", {"stop": 3}),
    ("stop[0]", {"stop": ""}),
    ("stop[1]", {"stop": ["a", 5]}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop_token_ids[0]", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [9999]}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"9999": 1}}),
    ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias[1]", {"logit_bias": {"1": 101}}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("priority", {"priority": 101}),
    ("priority", {"priority": "high"}),
    ("user", {"user": "x" * 300}),
    ("n", {"n": 2}),
    ("n", {"n": True}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.usage", {"stream": True, "stream_options": {"usage": True}}),
    ("store", {"store": True}),
    ("temperatur", {"temperatur": 1}),
]


@pytest.mark.parametrize(
    ("path", "param", "changes"),
    [
        *((CHAT, *case) for case in BAD_CHATS + BAD_FOR_BOTH),
        *((COMPLETIONS, *case) for case in BAD_COMPLETIONS + BAD_FOR_BOTH),
    ],
)
async def test_bad_input_names_its_field_and_reaches_no_worker(app_client, service, path, param, changes):
    body = dict(ASK) if path == CHAT else {"model": "tiny", "prompt": "hi"}
    response = await app_client.post(path, json=body | changes)
    message = refused(response, 400, param)
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert message.startswith(f"{param}: ")
    assert len(message) < 300
    assert not service.requests


async def test_a_misspelt_field_is_met_with_the_right_one(client):
    response = await client.post(CHAT, json={**ASK, "max_token": 1})
    assert "'max_tokens'" in refused(response, 400, "max_token")


async def test_null_is_the_default_everywhere(client, service):
    names = ["temperature", "stop", "n", "tools", "seed", "logit_bias", "stream", "stream_options", "user"]
    response = await client.post(CHAT, json=ASK | dict.fromkeys(names))
    assert response.status_code == 200
    assert service.requests[0].sampling.temperature == 1.0


async def test_defaults_spelt_out_are_accepted(client):
    spelt_out = {"n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    assert (await client.post(CHAT, json=ASK | spelt_out)).status_code == 200
    body = {"prompt": "a", "echo": False, "best_of": 1, "suffix": ""}
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"hi"',
        b"null",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a"} x',
        b"[" * 50_000,
    ],
)
async def test_what_is_no_json_object_is_refused(client, data):
    for path in (CHAT, COMPLETIONS):
        refused(await client.post(path, content=data), 400, "body")


async def test_numbers_too_large_for_a_float_are_refused(client):
    response = await client.post(COMPLETIONS, content=b'{"prompt": "a", "temperature": 1e999}')
    refused(response, 400, "temperature")


async def test_the_content_type_does_not_matter(client):
    data = json.dumps(ASK)
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "nonsense"):
        response = await client.post(CHAT, content=data, headers={"content-type": content_type})
        assert response.status_code == 200


async def test_a_body_too_large_is_refused_however_it_comes(client, service):
    data = json.dumps(ASK | {"user": "x" * 100_000}).encode()

    async def in_pieces():
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]

    for content in (data, in_pieces()):
        response = await client.post(CHAT, content=content)
        assert "more than 100000 bytes" in refused(response, 413, None)
    assert not service.requests
    assert (await client.post(CHAT, json=ASK)).status_code == 200


async def test_a_long_body_that_fits_is_served(client, service):
    response = await client.post(COMPLETIONS, content=json.dumps({"prompt": [1] * 200}) + " " * 50_000)
    assert response.status_code == 200
    assert service.requests[0].prompt_token_ids == [1] * 200


async def test_unknown_paths_and_methods(client):
    assert "/v1/nothing" in refused(await client.get("/v1/nothing"), 404, None)
    refused(await client.get("/"), 404, None)
    refused(await client.post(CHAT + "/", json=ASK), 404, None)
    response = await client.get(CHAT)
    refused(response, 405, None)
    assert response.headers["allow"] == "POST"
    refused(await client.delete("/health"), 405, None)


async def test_every_response_has_its_requests_id(client, service):
    response = await client.post(CHAT, json=ASK)
    assert response.headers["x-request-id"] == service.requests[0].request_id
    response = await client.post(CHAT, json=ASK | {"stream": True})
    assert response.headers["x-request-id"] == service.requests[1].request_id
    one, two = [await client.get("/health") for _ in range(2)]
    assert one.headers["x-request-id"] != two.headers["x-request-id"]


async def test_health_is_not_readiness(client, service):
    assert (await client.get("/ready")).json() == {"status": "ready"}
    service.reason = "no decode worker"
    response = await client.get("/ready")
    assert (response.status_code, response.json()["reason"]) == (503, "no decode worker")
    assert (await client.get("/health")).status_code == 200


async def test_metrics(client):
    response = await client.get("/metrics")
    assert response.content == b"kvferry_requests_total 1\n"
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_a_stream_on_the_wire(client, service):
    async def script(request):
        yield Delta("", [1])
        yield Delta("a\nb", [2])
        yield Finished("stop", 3, 2, [])

    service.script = script
    async with client.stream("POST", CHAT, json=ASK | {"stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = (await response.aread()).decode()
    *events, end = text.split("\n\n")
    assert end == ""
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    # A chunk without text is not worth sending.
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a\nb"}, {}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_ours_is_a_500_in_the_log_and_nothing_more(client, service, stream, caplog):
    async def script(request):
        raise ZeroDivisionError("secret detail")
        yield

    service.script = script
    response = await client.post(CHAT, json=ASK | {"stream": stream})
    message = refused(response, 500, None)
    request_id = service.requests[0].request_id
    assert response.headers["x-request-id"] == request_id
    assert request_id in message
    assert "secret" not in response.text
    assert request_id in caplog.text
    assert "ZeroDivisionError: secret detail" in caplog.text


async def test_a_fault_before_the_request_exists_is_a_500_too(client, service, caplog):
    def broken():
        raise ZeroDivisionError

    service.why_not_ready = broken
    response = await client.get("/ready")
    message = refused(response, 500, None)
    assert response.headers["x-request-id"] in message
    assert response.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize("end", ["fault", "no end"])
async def test_a_stream_that_goes_wrong_never_looks_finished(client, service, end, caplog):
    async def script(request):
        yield Delta("a", [1])
        if end == "fault":
            raise ZeroDivisionError("secret detail")

    service.script = script
    response = await client.post(CHAT, json=ASK | {"stream": True})
    *_, last, empty = response.text.split("\n\n")
    assert empty == ""
    assert "internal error" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    # In one piece it is an error, not half an answer.
    assert (await client.post(CHAT, json=ASK)).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("events", [[], [Delta("a", [1])]])
async def test_a_client_that_leaves_ends_its_request(base_url, service, stream, events):
    service.script = hanging(*events)
    async with httpx.AsyncClient(base_url=base_url) as client:
        task = asyncio.create_task(client.post(CHAT, json=ASK | {"stream": stream}))
        await asyncio.wait_for(service.started.wait(), 10)
        await asyncio.sleep(0.1)
        assert not service.closed.is_set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(service.closed.wait(), 1)


async def test_a_client_that_leaves_does_not_disturb_another(client, base_url, service):
    async with httpx.AsyncClient(base_url=base_url) as other:
        service.script = hanging(Delta("a", [1]))
        task = asyncio.create_task(other.post(CHAT, json=ASK | {"stream": True}))
        await asyncio.wait_for(service.started.wait(), 10)
        service.script = service.answer
        responses = await asyncio.gather(*(client.post(CHAT, json=ASK) for _ in range(5)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert {r.json()["choices"][0]["message"]["content"] for r in responses} == {service.ANSWER}
    assert (await client.post(CHAT, json=ASK)).status_code == 200


async def test_a_connection_closed_in_mid_body_is_no_fault(base_url, service, caplog):
    port = int(base_url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient(base_url=base_url) as client:
        assert (await client.post(CHAT, json=ASK)).status_code == 200
    await asyncio.sleep(0.2)
    assert len(service.requests) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_stopping_ends_open_requests_with_an_error(http_server, service):
    port = await http_server.start()
    service.script = hanging(Delta("a", [1]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        whole = asyncio.create_task(client.post(CHAT, json=ASK))
        streamed = asyncio.create_task(client.post(CHAT, json=ASK | {"stream": True}))
        while len(service.requests) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await asyncio.wait_for(http_server.stop(), 5)
        message = refused(await whole, 503, None)
        assert "shutting down" in message
        last = (await streamed).text.split("\n\n")[-2]
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_a_client_that_reads_nothing_does_not_hold_up_a_stop(http_server, service):
    async def endless(request):
        while True:
            yield Delta("x" * 100_000, [1])

    service.script = endless
    port = await http_server.start()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        data = json.dumps(ASK | {"stream": True})
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode()
        )
        await asyncio.wait_for(service.started.wait(), 10)
        await asyncio.sleep(0.3)
        await asyncio.wait_for(http_server.stop(), 10)
    await asyncio.wait_for(service.closed.wait(), 10)


async def test_an_address_in_use_is_an_error_at_once(http_server):
    port = await http_server.start()
    with pytest.raises(OSError, match="in use"):
        await HttpServer(http_server.app, "127.0.0.1", port).start()
