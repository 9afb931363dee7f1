"""A worker's membership in its routers: one Join stream each, opened again whenever it breaks.

Over the stream go the registration, then load reports (which are also the heartbeat) and what the worker
has for that router: a decode worker's tokens. When the stream breaks, the worker is told, so that it drops
what it holds for a router that can no longer hear it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress

import grpc

from kvferry.v1 import registry_pb2 as pb
from kvferry.v1 import registry_pb2_grpc as pb_grpc
from rpc.channel import Channels

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.2
# The router answers a registration at once; longer means that it is gone or not a router.
WELCOME_TIMEOUT_S = 5.0
# Messages closer together than nobody can read are one: each costs the router as much as dozens of tokens.
MIN_STEP_INTERVAL_S = 0.004
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 1.0


class Membership:
    """Keeps a worker joined to its routers. Runs on the worker's event loop."""

    def __init__(
        self,
        registration: pb.Registration,
        load: Callable[[str], pb.LoadReport],
        take_step: Callable[[str], pb.StepUpdate | None],
        on_resend: Callable[[str], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """`load(router_id)` and `take_step(router_id)` give what has gathered for a router since they were
        last asked; `on_resend(router_id)` is called when it has lost block changes, `on_lost(router_id)`
        when its stream has ended."""
        self._registration = registration
        self._load = load
        self._take_step = take_step
        self._on_resend = on_resend
        self._on_lost = on_lost
        self._channels = Channels()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake: dict[str, asyncio.Event] = {}

    @property
    def router_ids(self) -> frozenset[str]:
        """The routers that hear this worker now."""
        return frozenset(self._wake)

    def set_routers(self, addresses: Iterable[str]) -> None:
        """Joins exactly the routers at these addresses."""
        wanted = set(addresses)
        for address in self._tasks.keys() - wanted:
            self._tasks.pop(address).cancel()
        for address in wanted - self._tasks.keys():
            self._tasks[address] = asyncio.create_task(self._stay_joined(address))

    def notify(self, router_id: str) -> None:
        """Says that `take_step(router_id)` has something."""
        if wake := self._wake.get(router_id):
            wake.set()

    async def stop(self) -> None:
        """Leaves all routers."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._channels.close()

    async def _stay_joined(self, address: str) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                await self._join(address)
                retry_s = FIRST_RETRY_S
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no answer"
                logger.info("not joined to router %s: %s", address, reason)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _join(self, address: str) -> None:
        """One stream, from registration to its end."""
        first = asyncio.Event()
        router_id = ""

        async def messages() -> AsyncIterator[pb.JoinRequest]:
            yield pb.JoinRequest(registration=self._registration)
            await first.wait()
            async for message in self._messages(router_id):
                yield message

        call = pb_grpc.RegistryServiceStub(self._channels.to(address)).Join(messages())
        try:
            welcome = await asyncio.wait_for(call.read(), WELCOME_TIMEOUT_S)
            if welcome is grpc.aio.EOF:  # type: ignore[attr-defined]
                raise TimeoutError
            router_id = welcome.router_id
            self._wake[router_id] = asyncio.Event()
            logger.info("joined router %s", address)
            _log_standing(address, welcome)
            first.set()
            # The deadline on this wait is the connection's: the router ends the stream when it stops hearing.
            while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                _log_standing(address, response)
                if response.resend_blocks:
                    self._on_resend(router_id)
        finally:
            call.cancel()
            if self._wake.pop(router_id, None):
                self._on_lost(router_id)

    async def _messages(self, router_id: str) -> AsyncIterator[pb.JoinRequest]:
        wake = self._wake[router_id]
        loop = asyncio.get_running_loop()
        next_report_s = loop.time()
        next_step_s = 0.0
        # gRPC may ask for messages after the stream has broken: what there is belongs to the next one.
        while self._wake.get(router_id) is wake:
            if loop.time() >= next_report_s:
                next_report_s = loop.time() + HEARTBEAT_S
                yield pb.JoinRequest(load=self._load(router_id))
            with suppress(TimeoutError):
                async with asyncio.timeout_at(next_report_s):
                    await wake.wait()
            wake.clear()
            if (early_s := next_step_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
            if self._wake.get(router_id) is not wake:
                return
            if (step := self._take_step(router_id)) is not None:
                next_step_s = loop.time() + MIN_STEP_INTERVAL_S
                yield pb.JoinRequest(step=step)


def _log_standing(address: str, response: pb.JoinResponse) -> None:
    if response.incompatible:
        logger.warning("router %s does not use this worker: %s", address, response.incompatible)
