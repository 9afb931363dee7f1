"""Pushes one prompt's blocks to its decode worker while the prompt is still being computed."""

import asyncio
from collections.abc import Callable

from kv_transfer.transport import Target, TransferFailed, Transport


class Handoff:
    """One request's way out of this worker. Blocks are handed in as they fill; each is sent once."""

    def __init__(
        self,
        transport: Transport,
        target: Target,
        blocks: range,
        on_failed: Callable[[TransferFailed], None],
    ) -> None:
        """Opens the transfer of these blocks of the sequence: the last ones, which the receiver lacks.

        `on_failed` is told at once when it breaks, at whatever point.
        """
        self.started_s: float | None = None
        self._transfer = transport.open(target, len(blocks))
        self._num_blocks = len(blocks)
        self._num_ready = blocks.start
        self._first_token_id: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # Bounded by the prompt's blocks.
        self._ready: asyncio.Queue[list[tuple[int, int]]] = asyncio.Queue()
        self._on_failed = on_failed
        self._task = asyncio.create_task(self._push())

    @property
    def num_bytes(self) -> int:
        """Bytes of KV sent so far."""
        return self._transfer.num_bytes

    def blocks_ready(self, block_table: list[int], num_full: int) -> None:
        """The first `num_full` blocks of the sequence are full and final."""
        if num_full > self._num_ready:
            self._ready.put_nowait([(i, block_table[i]) for i in range(self._num_ready, num_full)])
        self._num_ready = max(self._num_ready, num_full)

    async def finish(self, first_token_id: int) -> float:
        """Sends the rest; returns, when the decode worker owns the sequence, the event loop's time then.

        Raises `TransferFailed`.
        """
        self._first_token_id.set_result(first_token_id)
        return await self._task

    async def abort(self) -> None:
        """Gives up, in any state; nothing is read from the cache afterwards."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _push(self) -> float:
        try:
            num_left = self._num_blocks
            while num_left:
                blocks = await self._ready.get()
                if self.started_s is None:
                    self.started_s = asyncio.get_running_loop().time()
                await self._transfer.send(blocks)
                num_left -= len(blocks)
            await self._transfer.finish(await self._first_token_id)
            return asyncio.get_running_loop().time()
        except TransferFailed as error:
            self._on_failed(error)
            raise
        finally:
            await self._transfer.abort()
