"""A router, its prefill workers and its decode workers: brought up together, kept up, ended together."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from deploy.cluster import Cluster
from deploy.member import Lost, Member, Plan, Say, StartFailed
from kvferry.config import DeploymentConfig

SLOW_START_REPORT_S = 10.0
READY_POLL_S = 0.05
# Workers join within a second of their start; longer means that they do not fit.
UNREADY_REPORT_S = 5.0
WATCH_S = 0.5
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
STOP_TIMEOUT_S = 2.0


def _router_actor() -> type:
    from router.actor import RouterActor

    return RouterActor


def _prefill_actor() -> type:
    from prefill_worker.actor import PrefillActor

    return PrefillActor


def _decode_actor() -> type:
    from decode_worker.actor import DecodeActor

    return DecodeActor


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the router listens, each as host:port."""

    grpc: str
    http: str


class Deployment:
    """What the launcher holds of a deployment. Use it within one event loop."""

    def __init__(self, cluster: Cluster, config: DeploymentConfig, say: Say) -> None:
        self.addresses: Addresses | None = None
        self._say = say
        self._routed = asyncio.Event()
        if cluster.is_local and Path(config.model).is_dir():
            # The actors' working directory is not ours.
            config = config.model_copy(update={"model": str(Path(config.model).absolute())})
        router = Plan("router", _router_actor, (config,), None)
        self.router = Member(router, cluster, say)
        pools = (("prefill", _prefill_actor, config.prefill), ("decode", _decode_actor, config.decode))
        self.workers = [
            Member(Plan(name, load, (config, name), pool.resources), cluster, say)
            for role, load, pool in pools
            for name in (f"{role}-{i}" for i in range(pool.count))
        ]

    @property
    def members(self) -> list[Member]:
        """The router, then the workers."""
        return [self.router, *self.workers]

    async def start(self) -> Addresses:
        """Starts all members at once; returns when the router is ready to serve. Raises `StartFailed`."""
        starts = [asyncio.create_task(self._bring_up(member)) for member in self.members]
        patience = asyncio.create_task(self._report_slow_starts())
        try:
            await asyncio.gather(*starts)
            await self._wait_until_ready()
        except Lost as error:
            raise StartFailed(str(error)) from error
        finally:
            for task in (patience, *starts):
                task.cancel()
        assert self.addresses is not None
        return self.addresses

    async def supervise(self) -> NoReturn:
        """Starts again what Ray restarted, and wires it up again. Runs until cancelled."""
        await asyncio.gather(*(self._watch(member) for member in self.members))
        raise AssertionError("the watches ended")

    async def stop(self) -> None:
        """Ends all members: well within two seconds, or at once."""
        stops = [asyncio.create_task(member.stop()) for member in self.members]
        await asyncio.wait(stops, timeout=STOP_TIMEOUT_S)
        for stop in stops:
            stop.cancel()
        # How they ended does not matter any more, but has to be looked at.
        await asyncio.gather(*stops, return_exceptions=True)
        for member in self.members:
            member.kill()

    async def _bring_up(self, member: Member) -> None:
        address = await member.start()
        if member is self.router:
            await self._rewire(Addresses(*address))
        else:
            self._say(f"{member.name}: at {address}")
            await self._routed.wait()
            assert self.addresses is not None
            await self.join(member, address, self.addresses.grpc)

    async def join(self, member: Member, address: str, router: str) -> None:
        """Has a worker, which listens at `address`, join the router. Raises `Lost`."""
        await member.call("set_routers", [router])

    async def _report_slow_starts(self) -> NoReturn:
        while True:
            await asyncio.sleep(SLOW_START_REPORT_S)
            states = (f"{m.name} ({m.state})" for m in self.members if m.state != "ready")
            self._say(f"still to come: {', '.join(states) or 'nothing'}")

    async def _rewire(self, addresses: Addresses) -> None:
        """Tells the workers where the router is. Those that are down now are told when they are back."""
        self.addresses = addresses
        self._routed.set()
        self._say(f"router: at {addresses.grpc} (gRPC) and http://{addresses.http}")
        up = [(worker, worker.address) for worker in self.workers if worker.state == "ready"]
        calls = (self.join(worker, address, addresses.grpc) for worker, address in up)
        await asyncio.gather(*calls, return_exceptions=True)

    async def _wait_until_ready(self) -> None:
        waited_s, report_s = 0.0, UNREADY_REPORT_S
        while reason := await self.router.call("why_not_ready"):
            if waited_s >= report_s:
                report_s += UNREADY_REPORT_S
                self._say(f"router: not ready: {reason}")
            await asyncio.sleep(READY_POLL_S)
            waited_s += READY_POLL_S

    async def _watch(self, member: Member) -> NoReturn:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                if await member.call("address") is not None:
                    continue
                self._say(f"{member.name}: restarted by Ray")
            except (Lost, StartFailed) as error:
                self._say(str(error))
            await self._revive(member)

    async def _revive(self, member: Member) -> None:
        retry_s, said = FIRST_RETRY_S, ""
        while True:
            try:
                await self._bring_up(member)
                return
            except (Lost, StartFailed) as error:
                if str(error) != said:
                    said = str(error)
                    self._say(f"{said}; trying again")
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)
