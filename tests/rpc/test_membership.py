"""A worker stays joined to its routers, and knows when it is not."""

import asyncio

import pytest

from kvferry.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from rpc.membership import Membership
from rpc.server import GrpcServer


class Router(registry_pb2_grpc.RegistryServiceServicer):
    """Welcomes every worker and keeps what it says."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[registry_pb2.JoinRequest] = asyncio.Queue()
        self.num_joins = 0

    async def Join(self, request_iterator, context):
        self.num_joins += 1
        yield registry_pb2.JoinResponse(router_id=f"router-{self.num_joins}")
        async for message in request_iterator:
            self.messages.put_nowait(message)


class Proxy:
    """Carries bytes between worker and router until it is told to fall silent."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.partition(":")
        self._port = int(port)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def silence(self) -> None:
        """Nothing is closed, and nothing comes through: a stopped process or a cut cable."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _connect(self, reader, writer):
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)

    async def _carry(self, source, sink) -> None:
        try:
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()
            await asyncio.gather(sink.wait_closed(), return_exceptions=True)


@pytest.fixture
async def router():
    server, servicer = GrpcServer(), Router()
    server.add(
        "kvferry.v1.RegistryService", servicer, registry_pb2_grpc.add_RegistryServiceServicer_to_server
    )
    servicer.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    yield servicer
    await server.stop(0)


class Worker:
    """A worker's membership, and what it is asked and told."""

    def __init__(self) -> None:
        self.step: registry_pb2.StepUpdate | None = None
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        registration = registry_pb2.Registration(worker_id="decode-0", role=common_pb2.ROLE_DECODE)
        self.membership = Membership(
            registration,
            load=lambda router_id: registry_pb2.LoadReport(num_running=1),
            take_step=self._take,
            on_lost=self.lost.put_nowait,
            on_resend=lambda router_id: None,
        )

    def _take(self, router_id: str) -> registry_pb2.StepUpdate | None:
        step, self.step = self.step, None
        return step

    async def joined(self, router_id: str) -> None:
        async with asyncio.timeout(10):
            while router_id not in self.membership.router_ids:
                await asyncio.sleep(0.01)


@pytest.fixture
async def worker():
    worker = Worker()
    yield worker
    await worker.membership.stop()


async def test_registration_comes_first_then_reports_and_steps(router, worker):
    worker.membership.set_routers([router.address])
    await worker.joined("router-1")
    assert (await router.messages.get()).registration.worker_id == "decode-0"
    assert (await router.messages.get()).load.num_running == 1
    worker.step = registry_pb2.StepUpdate(token_ids=[5])
    worker.membership.notify("router-1")
    async with asyncio.timeout(5):
        while not (message := await router.messages.get()).HasField("step"):
            assert message.HasField("load")
    assert list(message.step.token_ids) == [5]


async def test_a_router_that_comes_late_is_joined(router, worker):
    worker.membership.set_routers(["127.0.0.1:1", router.address])
    await worker.joined("router-1")
    worker.membership.set_routers([])
    assert await asyncio.wait_for(worker.lost.get(), 5) == "router-1"


async def test_a_router_that_falls_silent_is_lost_and_joined_again_when_it_speaks(router, worker):
    """Its connections stay open: only the pings tell."""
    proxy = Proxy(router.address)
    worker.membership.set_routers([await proxy.start()])
    await worker.joined("router-1")
    proxy.silence()
    assert await asyncio.wait_for(worker.lost.get(), 15) == "router-1"
    assert not worker.membership.router_ids
    proxy.resume()
    await worker.joined("router-2")
    await proxy.stop()
