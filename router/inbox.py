"""Where one request's news meet: from its prefill call, and from its decode worker's stream."""

import asyncio
from dataclasses import dataclass

from kvferry.v1 import common_pb2, prefill_pb2, registry_pb2
from router.errors import RequestError


@dataclass(frozen=True, slots=True)
class NewToken:
    """Output token number `index` (from 0)."""

    index: int
    token_id: int
    logprobs: common_pb2.TokenLogprobs | None = None


News = NewToken | prefill_pb2.FirstToken | registry_pb2.Ended | RequestError
"""A RequestError ends the request."""


class Inbox:
    """A queue of news, bounded by the tokens that the request may generate."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[News] = asyncio.Queue()

    def put(self, news: News) -> None:
        """Adds to the end."""
        self._queue.put_nowait(news)

    async def take(self) -> list[News]:
        """All there is, oldest first; waits for the first. A slow reader so gets several tokens at once."""
        news = [await self._queue.get()]
        while not self._queue.empty():
            news.append(self._queue.get_nowait())
        return news
