"""A tiny server of OpenAI's completions, its delays known."""

import asyncio
import json
from dataclasses import dataclass, field

import pytest


@dataclass
class TinyServer:
    """Answers each request after `first_s`, then a token every `gap_s`; `spoil` says what goes wrong."""

    first_s: float = 0.05
    gap_s: float = 0.02
    spoil: str = ""
    prompt_tokens: int | None = None
    tokens_per_event: int = 1
    requests: list[dict] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0
    num_connections: int = 0
    url: str = ""

    async def serve(self, reader, writer):
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                path = head.split(b" ")[1]
                await self._answer(path, json.loads(body) if body else {}, writer)
                if b"connection: close" in head.lower():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path, request, writer):
        if path == b"/v1/models":
            self._send_json(writer, {"data": [{"id": "tiny"}]})
            return
        self.requests.append(request)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            await self._generate(path, request, writer)
        finally:
            self.num_open -= 1

    async def _generate(self, path, request, writer):
        if self.spoil == "status":
            self._send_json(writer, {"error": {"message": "broken"}}, "500 Internal Server Error")
            return
        if self.spoil == "hang":
            await asyncio.sleep(30)
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        await asyncio.sleep(self.first_s)
        num = request["max_tokens"] - (self.spoil == "short")
        is_chat = path.endswith(b"/chat/completions")
        for index in range(0, num, self.tokens_per_event):
            if index:
                await asyncio.sleep(self.gap_s)
            if self.spoil == "cut" and index == num // 2:
                writer.transport.abort()
                return
            if self.spoil == "event" and index == num // 2:
                self._event(writer, {"error": {"message": "worker lost"}})
                break
            text = f" {index}"
            self._event(writer, {"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]})
        else:
            self._event(writer, {"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
            usage = {"completion_tokens": num}
            if self.prompt_tokens is not None:
                usage["prompt_tokens"] = self.prompt_tokens
            self._event(writer, {"choices": [], "usage": usage})
            if self.spoil != "no done":
                self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer, value):
        self._chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, writer, data):
        # In two pieces, as a network may cut anything anywhere.
        data = b"%x\r\n%b\r\n" % (len(data), data)
        writer.write(data[:7])
        writer.write(data[7:])

    def _send_json(self, writer, value, status="200 OK"):
        body = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


@pytest.fixture
async def tiny_server():
    server = TinyServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    yield server
    listening.close()
