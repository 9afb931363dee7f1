"""HTTP/1.1 at the least CPU: what arrives is stamped and kept, and read only when the load is over.

A load generator shares its cores with what it measures. So nothing here parses JSON or splits events; a
body is a list of (time, bytes), one entry for each chunk of the transfer encoding.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 10.0
# A header that is longer is no answer of an API.
_MAX_HEADER_BYTES = 2**16


@dataclass(slots=True)
class Exchange:
    """A request and what came back, times on the monotonic clock.

    failure: empty when a whole response arrived, whatever its status.
    """

    sent_s: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended_s: float = 0.0
    failure: str = ""

    @property
    def body(self) -> bytes:
        """All of the body that arrived."""
        return b"".join(piece for _, piece in self.pieces)


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.is_reusable = True
        self._buffer = b""
        self._headers: Mapping[str, str] | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    async def run(self, request: bytes, timeout_s: float) -> Exchange:
        """Sends a request and waits for its whole response, at most `timeout_s`."""
        assert self._transport is not None
        self._exchange = exchange = Exchange(time.monotonic())
        self._headers = None
        self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._finish("connection closed")
        else:
            self._transport.write(request)
        try:
            async with asyncio.timeout(timeout_s):
                await self._done
        except TimeoutError:
            self._finish(f"no whole answer within {timeout_s:g} s")
        finally:
            if exchange.failure or not exchange.ended_s:
                self.close()
        return exchange

    def close(self) -> None:
        """Drops the connection; it cannot be used again."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.is_reusable = False
        is_end = self._headers is not None and not _is_framed(self._headers)
        self._finish("" if is_end and exc is None else "connection closed in the middle of an answer")

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        now_s = time.monotonic()
        self._buffer = self._buffer + data if self._buffer else data
        exchange = self._exchange
        if exchange is None or exchange.ended_s:
            self.close()
            return
        if self._headers is None and not self._take_head(exchange):
            return
        assert self._headers is not None
        if "transfer-encoding" in self._headers:
            self._take_chunks(exchange, now_s)
        elif "content-length" in self._headers:
            num_bytes = int(self._headers["content-length"])
            if len(self._buffer) >= num_bytes:
                exchange.pieces.append((now_s, self._buffer[:num_bytes]))
                self._buffer = self._buffer[num_bytes:]
                self._finish()
        else:
            exchange.pieces.append((now_s, self._buffer))
            self._buffer = b""

    def _take_head(self, exchange: Exchange) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEADER_BYTES:
                self._finish("not an HTTP response")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        self._buffer = self._buffer[end + 4 :]
        words = first.split(" ", 2)
        if len(words) < 2 or not words[1].isdigit():
            self._finish("not an HTTP response")
            return False
        exchange.status = int(words[1])
        pairs = (line.partition(":") for line in lines)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if self._headers.get("connection", "").lower() == "close" or not _is_framed(self._headers):
            self.is_reusable = False
        return True

    def _take_chunks(self, exchange: Exchange, now_s: float) -> None:
        buffer = self._buffer
        at = 0
        while (line_end := buffer.find(b"\r\n", at)) >= 0:
            size = int(buffer[at:line_end].partition(b";")[0], 16)
            begin = line_end + 2
            if len(buffer) < begin + size + 2:
                break
            at = begin + size + 2
            if size == 0:
                self._buffer = buffer[at:]
                self._finish()
                return
            exchange.pieces.append((now_s, buffer[begin : begin + size]))
        self._buffer = buffer[at:]

    def _finish(self, failure: str = "") -> None:
        if self._exchange is not None and not self._exchange.ended_s:
            self._exchange.failure = failure
            self._exchange.ended_s = time.monotonic()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class HttpClient:
    """Exchanges with one server. keep_alive: whether connections are used again."""

    def __init__(self, url: str, *, keep_alive: bool = False, timeout_s: float = 600.0) -> None:
        """url: such as http://127.0.0.1:8000 or http://127.0.0.1:8000/v1. Raises `ValueError`."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// address")
        self._host = parts.hostname
        self._port = parts.port or 80
        self.prefix = parts.path.rstrip("/")
        self._keep_alive = keep_alive
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes) -> Exchange:
        """Sends JSON. What fails is told in the exchange."""
        return await self._run(f"POST {path}", b"content-type: application/json\r\n", body)

    async def get(self, path: str) -> Exchange:
        """The same for a look."""
        return await self._run(f"GET {path}", b"", b"")

    def close(self) -> None:
        """Drops the connections that are kept."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _run(self, line: str, headers: bytes, body: bytes) -> Exchange:
        head = f"{line} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-length: {len(body)}\r\n"
        kept = b"" if self._keep_alive else b"connection: close\r\n"
        started_s = time.monotonic()
        try:
            connection = await self._connection()
        except OSError as error:
            return Exchange(started_s, ended_s=time.monotonic(), failure=f"cannot connect: {error.strerror}")
        exchange = await connection.run(head.encode() + headers + kept + b"\r\n" + body, self._timeout_s)
        # Opening the connection is part of what a client waits for.
        exchange.sent_s = started_s
        if self._keep_alive and connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return exchange

    async def _connection(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).is_reusable:
                return connection
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(Connection, self._host, self._port)
        return connection


def _is_framed(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers or "content-length" in headers
