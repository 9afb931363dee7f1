"""A connection that can be cut, stalled and slowed: a small TCP proxy between two peers."""

import asyncio
from contextlib import suppress

_PIECE_BYTES = 16 * 2**10
_CONNECT_TIMEOUT_S = 5.0


class Link:
    """Takes connections on a port of its own and carries their bytes to `target` and back.

    bytes_per_s: pace of each direction of each connection; None carries on at full speed. A process that is
    stopped, or a cable that is pulled, is a `stall`: connections stay open and nothing passes.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._target: tuple[str, int] | None = None
        self._bytes_per_s: float | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self.address = ""

    async def listen(self) -> str:
        """Takes connections from now on; returns host:port."""
        self._server = await asyncio.start_server(self._carry, self._host, 0, limit=_PIECE_BYTES)
        self.address = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    def point_to(self, address: str) -> None:
        """Where connections made from now on lead to, as host:port."""
        host, _, port = address.rpartition(":")
        self._target = host, int(port)

    def cut(self) -> None:
        """Breaks all connections, with a reset; new ones may be made at once."""
        for end in list(self._ends):
            end.transport.abort()

    def stall(self) -> None:
        """Nothing passes until `heal`."""
        self._open.clear()

    def slow(self, bytes_per_s: float) -> None:
        """Paces what passes until `heal`."""
        self._bytes_per_s = bytes_per_s

    def heal(self) -> None:
        """As it was."""
        self._bytes_per_s = None
        self._open.set()

    async def close(self) -> None:
        """Ends it and all its connections."""
        if self._server is not None:
            self._server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._ends |= ends
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                far_reader, far_writer = await asyncio.open_connection(*(self._target or ("", 0)))
            ends.add(far_writer)
            self._ends |= ends
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._copy(reader, far_writer))
                directions.create_task(self._copy(far_reader, writer))
        except* (OSError, TimeoutError):
            pass
        finally:
            for end in ends:
                end.transport.abort()
            self._ends -= ends
            self._carrying.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            await self._open.wait()
            if self._bytes_per_s is not None:
                await asyncio.sleep(len(piece) / self._bytes_per_s)
            writer.write(piece)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()
