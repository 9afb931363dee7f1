"""Asks for a job over its API, and keeps all that came back."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.jobs import Job
from benchmarks.load.connection import Exchange, HttpClient
from kvferry.client import AsyncClient, ChatMessage, KvferryError, SamplingParams
from router.tokenizer import Tokenizer

# A request without a deadline of its own that has not ended by then hangs: the router's queue lasts 30 s.
PATIENCE_S = 90.0
_LEAVE_POLL_S = 0.01
_HTTP_ERRORS = {400: "InvalidRequest", 404: "InvalidRequest", 429: "Overloaded", 503: "Unavailable"}
_HTTP_ERRORS |= {504: "DeadlineExceeded"}


@dataclass(slots=True)
class Answer:
    """What a client has of a request. tokens: the bytes of each output token.

    token_ids: the same as ids, where the API tells them. error: "" for a whole answer, "left" where the
    client went, else the class of `kvferry.errors` and the message. num_claimed: output tokens by its usage.
    """

    text: str = ""
    tokens: list[bytes] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_claimed: int = 0
    finish_reason: str = ""
    was_recovered: bool = False
    error: str = ""
    message: str = ""
    seconds: float = 0.0


class Clients:
    """One client of each API, over the same router."""

    def __init__(self, grpc_address: str, http_address: str, model: str, tokenizer: Tokenizer) -> None:
        self._grpc = AsyncClient(grpc_address)
        self._http = HttpClient(f"http://{http_address}", timeout_s=PATIENCE_S)
        self._model = model
        self._tokenizer = tokenizer

    async def ask(self, job: Job) -> Answer:
        """What becomes of a job; no error is raised."""
        began_s = time.monotonic()
        answer = Answer()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await (self._ask_grpc if job.api == "grpc" else self._ask_http)(job, answer)
        except TimeoutError:
            answer.error, answer.message = "Hang", f"no end within {PATIENCE_S:g} s"
        answer.seconds = time.monotonic() - began_s
        return answer

    async def close(self) -> None:
        """Closes the connections."""
        await self._grpc.close()
        self._http.close()

    async def _ask_grpc(self, job: Job, answer: Answer) -> None:
        chat = [ChatMessage("user", job.question)]
        sampling = SamplingParams(**job.sampling)
        try:
            async with self._grpc.generate(chat, sampling, timeout_s=job.timeout_s) as generation:
                async for delta in generation:
                    answer.text += delta.text
                    answer.token_ids += delta.token_ids
                    if job.cancel_after is not None and len(answer.token_ids) >= job.cancel_after:
                        answer.error = "left"
                        return
            result = generation.result
            answer.num_claimed = result.usage.num_output_tokens
            answer.finish_reason = result.finish_reason
            answer.was_recovered = sum(m.name == "reserved" for m in result.moments) > 1
        except KvferryError as error:
            answer.error, answer.message = type(error).__name__, str(error)
        finally:
            answer.tokens = [self._tokenizer.token_bytes(i) for i in answer.token_ids]

    async def _ask_http(self, job: Job, answer: Answer) -> None:
        is_stream = job.api == "http-stream"
        extra: dict[str, Any] = (
            {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        )
        fields = {
            "model": self._model,
            "messages": [{"role": "user", "content": job.question}],
            **job.sampling,
            **extra,
        }
        exchange = await self._exchange(job, json.dumps(fields).encode())
        if exchange is None:
            answer.error = "left"
        elif exchange.failure and not exchange.pieces:
            answer.error, answer.message = "Unavailable", exchange.failure
        elif exchange.status != 200:
            _take_error(answer, exchange.status, exchange.body)
        elif is_stream:
            _take_stream(answer, exchange)
        else:
            body = json.loads(exchange.body) if not exchange.failure else {}
            _take_choice(answer, body, "message")
            if exchange.failure:
                answer.error, answer.message = "Unavailable", exchange.failure

    async def _exchange(self, job: Job, body: bytes) -> Exchange | None:
        """None where the client left: it has no tokens to count, so it leaves by time."""
        call = self._http.post("/v1/chat/completions", body)
        if job.cancel_after is None:
            return await call
        task = asyncio.create_task(call)
        done, _ = await asyncio.wait([task], timeout=job.cancel_after * _LEAVE_POLL_S)
        if done:
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        return None


def _take_error(answer: Answer, status: int, body: bytes) -> None:
    answer.error = _HTTP_ERRORS.get(status, "ServerError")
    answer.message = f"HTTP {status}: {body[:300].decode('utf-8', 'replace')}"


def _take_stream(answer: Answer, exchange: Exchange) -> None:
    lines = [line[5:].strip() for line in exchange.body.split(b"\n") if line.startswith(b"data:")]
    for data in lines:
        if data == b"[DONE]":
            return
        try:
            value = json.loads(data)
        except ValueError:
            # The connection broke within an event.
            break
        if error := value.get("error"):
            is_ours = error["message"].startswith("internal error")
            answer.error = "ServerError" if is_ours else "Unavailable"
            answer.message = str(error)
            return
        _take_choice(answer, value, "delta")
    answer.error = "Unavailable" if exchange.failure else "ServerError"
    answer.message = exchange.failure or "the stream ended without [DONE] or an error"


def _take_choice(answer: Answer, value: Mapping[str, Any], part: str) -> None:
    for choice in value.get("choices") or ():
        answer.text += (choice[part] or {}).get("content") or ""
        entries: Sequence[Any] = (choice.get("logprobs") or {}).get("content") or ()
        answer.tokens += [bytes(entry["bytes"]) for entry in entries]
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if usage := value.get("usage"):
        answer.num_claimed = usage["completion_tokens"]
