"""One prefill worker, whole: engine, loop, transport, servers. Knows no Ray, so a test can run one."""

from collections.abc import Iterable

from engine.engine import Engine
from kv_transfer import capabilities
from kv_transfer.grpc_transport import GrpcTransport
from kvferry.config import PrefillConfig
from kvferry.v1 import common_pb2, prefill_pb2_grpc, registry_pb2
from prefill_worker import server
from prefill_worker.loop import PrefillLoop
from rpc.server import GrpcServer
from scheduling import block_hash
from scheduling.allocator import BlockAllocator
from scheduling.block_feed import BlockFeeds
from scheduling.prefill import PrefillScheduler
from scheduling.queue_policies import QUEUE_POLICIES
from worker.host import WorkerHost, new_epoch


class PrefillWorker:
    """Computes prompts and ships their KV. Call it on one event loop."""

    def __init__(self, config: PrefillConfig, engine: Engine, worker_id: str, model_name: str) -> None:
        block_size = engine.cache.shape.block_size
        allocator = BlockAllocator(engine.cache.num_blocks)
        feeds = BlockFeeds(allocator.cache, engine.cache.num_blocks)
        scheduler = PrefillScheduler(
            allocator,
            block_size,
            config.max_step_tokens,
            config.max_waiting,
            QUEUE_POLICIES[config.policy](),
        )
        self._transport = GrpcTransport(engine.cache)
        self.loop = loop = PrefillLoop(engine, allocator, scheduler, self._transport)

        grpc_server = GrpcServer()
        grpc_server.add(
            "kvferry.v1.PrefillService",
            server.PrefillServicer(loop, engine.info, block_size),
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
        )
        self._host = WorkerHost(
            registry_pb2.Registration(
                worker_id=worker_id,
                epoch=new_epoch(),
                role=common_pb2.ROLE_PREFILL,
                capabilities=capabilities.describe(engine, model_name, block_hash.SCHEME),
            ),
            grpc_server,
            run=loop.run,
            load=lambda router_id: server.load_report(loop, allocator, feeds.take(router_id)),
            audit=lambda: server.audit(loop, allocator),
            take_step=lambda _: None,
            on_resend=feeds.resend,
            # A router's prompts end with its calls.
            on_router_lost=feeds.close,
        )

    async def start(self, host: str, routers: Iterable[str]) -> str:
        """Computes, serves on a free port and joins the routers; returns the address."""
        return await self._host.start(host, routers)

    def set_routers(self, routers: Iterable[str]) -> None:
        """Joins exactly these routers."""
        self._host.membership.set_routers(routers)

    def publish(self, address: str) -> None:
        """Peers reach the worker at this address, once it joins a router anew."""
        self._host.publish(address)

    async def wait(self) -> None:
        """Returns when the worker was stopped; raises what ended its loop otherwise."""
        await self._host.wait()

    async def stop(self) -> None:
        """Leaves the routers, ends all calls, lets the running step end."""
        await self._host.stop()
        await self.loop.close()
        await self._transport.close()
