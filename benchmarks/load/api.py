"""OpenAI's two ways to ask for a generation: the bodies that are sent, and what is read out of answers."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from benchmarks.load.connection import Exchange
from benchmarks.load.outcome import Job, Outcome
from kvferry.results import ChatMessage
from router.tokenizer import Tokenizer

_MAX_QUOTED_BYTES = 200


class Api(Protocol):
    """How a job is asked for."""

    name: str
    path: str

    def prompt_fields(self, prompt: str) -> dict[str, Any]:
        """The fields of a body that hold the prompt."""
        ...

    def count(self, tokenizer: Tokenizer, prompt: str) -> int:
        """The prompt's tokens as a server counts them."""
        ...

    def text(self, choice: Mapping[str, Any]) -> str:
        """The new text in a choice of a streamed chunk."""
        ...


class CompletionsApi:
    """/v1/completions."""

    name = "completions"
    path = "/completions"

    def prompt_fields(self, prompt: str) -> dict[str, Any]:
        """See `Api`."""
        return {"prompt": prompt}

    def count(self, tokenizer: Tokenizer, prompt: str) -> int:
        """See `Api`."""
        return len(tokenizer.encode(prompt))

    def text(self, choice: Mapping[str, Any]) -> str:
        """See `Api`."""
        return choice.get("text") or ""


class ChatApi:
    """/v1/chat/completions."""

    name = "chat"
    path = "/chat/completions"

    def prompt_fields(self, prompt: str) -> dict[str, Any]:
        """See `Api`."""
        return {"messages": [{"role": "user", "content": prompt}]}

    def count(self, tokenizer: Tokenizer, prompt: str) -> int:
        """See `Api`."""
        return len(tokenizer.encode_chat([ChatMessage("user", prompt)]))

    def text(self, choice: Mapping[str, Any]) -> str:
        """See `Api`."""
        return (choice.get("delta") or {}).get("content") or ""


def body(api: Api, model: str, job: Job, extra: Mapping[str, Any]) -> bytes:
    """A greedy, streamed request for exactly `num_output_tokens`. extra: fields that one server knows."""
    fields = {
        "model": model,
        **api.prompt_fields(job.prompt),
        "max_tokens": job.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    return json.dumps(fields).encode()


def read(api: Api, exchange: Exchange, job: Job, started_s: float) -> Outcome:
    """What a request came to. Anything but a whole stream of the tokens asked for is an error."""
    times_s: list[float] = []
    usage: Mapping[str, Any] = {}
    error = exchange.failure
    is_done = False
    if not error and exchange.status != 200:
        error = f"HTTP {exchange.status}: {_quoted(exchange.body)}"
    for at_s, data in _events(exchange) if exchange.status == 200 else ():
        if data == b"[DONE]":
            is_done = True
            continue
        try:
            value = json.loads(data)
        except ValueError:
            error = error or f"an event that is not JSON: {_quoted(data)}"
            break
        if value.get("error"):
            error = error or f"error event: {_quoted(data)}"
        usage = value.get("usage") or usage
        if any(api.text(choice) for choice in value.get("choices") or ()):
            times_s.append(at_s)
    num_output_tokens = usage.get("completion_tokens", len(times_s))
    if not error:
        error = _shortfall(is_done, bool(times_s), num_output_tokens, job)
    num_off = usage.get("prompt_tokens", job.num_prompt_tokens) - job.num_prompt_tokens
    return Outcome(started_s, exchange.ended_s, times_s, num_output_tokens, num_off, error)


def _shortfall(is_done: bool, has_text: bool, num_output_tokens: int, job: Job) -> str:
    if not is_done:
        return "the stream ended without [DONE]"
    if not has_text:
        return "no text"
    if num_output_tokens != job.num_output_tokens:
        return f"{num_output_tokens} tokens instead of {job.num_output_tokens}"
    return ""


def _events(exchange: Exchange) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event and when its end arrived."""
    rest = b""
    for at_s, piece in exchange.pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at_s, line[5:].strip()


def _quoted(data: bytes) -> str:
    return data[:_MAX_QUOTED_BYTES].decode("utf-8", "replace").replace("\n", " ")
