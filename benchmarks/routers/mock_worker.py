"""A prefill and a decode worker that answer OpenAI's requests over HTTP at once, in one process.

    python -m benchmarks.routers.mock_worker PREFILL_PORT DECODE_PORT

Each token is a chunk and a write of its own, one a turn of the event loop, as a worker's steps would bring
them. The prefill worker answers every request with one token, and with the `kv_transfer_params` that
vLLM's has. What routers ask of a worker beside generations is answered with what they look for.
"""

import asyncio
import json
import sys
from typing import Any, cast

HOST = "127.0.0.1"
_TEXT = " token"
# Answers to what routers look up: the union of what vllm-router and smg ask for.
_INFO = {
    "status": "ok",
    "object": "list",
    "data": [{"id": "mock", "object": "model", "owned_by": "mock", "root": "mock", "max_model_len": 8192}],
    "model_path": "mock",
    "tokenizer_path": "mock",
    "served_model_name": "mock",
    "is_generation": True,
    "version": "0",
    "tp_size": 1,
    "dp_size": 1,
}


class MockWorker(asyncio.Protocol):
    """One connection. num_tokens: of every answer; None where the request says how many."""

    def __init__(self, num_tokens: int | None) -> None:
        self._num_tokens = num_tokens
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. Bodies are expected to come with their length or in chunks."""
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        lowered = head.lower()
        if b"transfer-encoding: chunked" in lowered:
            if not rest.endswith(b"0\r\n\r\n"):
                return
            body = _unchunked(rest)
        else:
            length = int(lowered.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(rest) < length:
                return
            body = rest[:length]
        self._buffer = b""
        self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if not path.endswith(b"/completions"):
            self._send_json(_INFO)
            return
        request = json.loads(body)
        num_tokens = self._num_tokens or request.get("max_tokens") or request.get("max_completion_tokens", 1)
        is_chat = path.endswith(b"/chat/completions")
        if request.get("stream"):
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.write(head)
            event = _chunk(_event(is_chat))
            self._stream(event, num_tokens, num_tokens)
        else:
            params = {"kv_transfer_params": {"remote_engine_id": "mock", "remote_block_ids": [0]}}
            self._send_json(_whole(is_chat, num_tokens) | params)

    def _stream(self, event: bytes, num_left: int, num_tokens: int) -> None:
        if self._transport.is_closing():
            return
        if num_left:
            self._transport.write(event)
            asyncio.get_running_loop().call_soon(self._stream, event, num_left - 1, num_tokens)
            return
        last = {"id": "mock", "object": "chunk", "choices": [], "usage": _usage(num_tokens)}
        done = _chunk(b"data: " + json.dumps(last).encode() + b"\n\n") + _chunk(b"data: [DONE]\n\n")
        self._transport.write(done + b"0\r\n\r\n")

    def _send_json(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


def _unchunked(data: bytes) -> bytes:
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        if not (length := int(size, 16)):
            return body
        body += data[:length]
        data = data[length + 2 :]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(is_chat: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    choice |= {"delta": {"content": _TEXT}} if is_chat else {"text": _TEXT}
    value = {"id": "mock", "object": "chunk", "created": 0, "model": "mock", "choices": [choice]}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _whole(is_chat: bool, num_tokens: int) -> dict[str, Any]:
    text = _TEXT * num_tokens
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"id": "mock", "object": "whole", "created": 0, "model": "mock", "choices": [choice]} | {
        "usage": _usage(num_tokens)
    }


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}


async def serve(prefill_port: int, decode_port: int) -> None:
    """Serves both until cancelled."""
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: MockWorker(1), HOST, prefill_port)
    await loop.create_server(lambda: MockWorker(None), HOST, decode_port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
