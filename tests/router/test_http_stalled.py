"""A client that takes nothing is given up, and its request with it."""

import asyncio

from kvferry.sampling import SamplingParams
from router import http_generation
from router.events import RequestSpec
from router.http_generation import StreamedGeneration
from router.openai_responses import CompletionFormat


async def test_a_client_that_takes_nothing_loses_its_request(service, monkeypatch):
    monkeypatch.setattr(http_generation, "_SEND_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_generation, "_STALL_POLL_S", 0.02)
    never = asyncio.Event()
    num_sent = 0

    async def receive():
        await never.wait()

    async def send(message):
        nonlocal num_sent
        num_sent += 1
        if num_sent > 2:
            await never.wait()

    request = await service.validate(RequestSpec("hello", SamplingParams(max_tokens=8)))
    response_format = CompletionFormat(request.request_id, "tiny", 0, service.tokenizer, False)
    response = StreamedGeneration(service, request, response_format, asyncio.Event(), False)
    await asyncio.wait_for(response({"type": "http"}, receive, send), 10)
    assert service.closed.is_set()
    assert num_sent == 3
