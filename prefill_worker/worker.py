"""One prefill worker, whole: engine, loop, transport, servers. Knows no Ray, so a test can run one."""

import asyncio
from collections.abc import Iterable

from engine.engine import Engine
from engine.heap import keep_freed_memory
from kv_transfer import capabilities
from kv_transfer.grpc_transport import GrpcTransport
from kvferry.config import PrefillConfig
from kvferry.v1 import common_pb2, prefill_pb2_grpc, registry_pb2
from prefill_worker import server
from prefill_worker.loop import PrefillLoop
from rpc.server import GrpcServer
from rpc.worker import WorkerServer, new_epoch
from scheduling import block_hash
from scheduling.allocator import BlockAllocator
from scheduling.block_feed import BlockFeeds
from scheduling.prefill import PrefillScheduler


class PrefillWorker:
    """Computes prompts and ships their KV. Call it on one event loop."""

    def __init__(self, config: PrefillConfig, engine: Engine, worker_id: str, model_name: str) -> None:
        block_size = engine.cache.shape.block_size
        allocator = BlockAllocator(engine.cache.num_blocks)
        feeds = BlockFeeds(allocator.cache, engine.cache.num_blocks)
        scheduler = PrefillScheduler(allocator, block_size, config.max_step_tokens, config.max_waiting)
        self._transport = GrpcTransport(engine.cache)
        self.loop = loop = PrefillLoop(engine, allocator, scheduler, self._transport)

        grpc_server = GrpcServer()
        grpc_server.add(
            "kvferry.v1.PrefillService",
            server.PrefillServicer(loop, engine.info.model_digest, block_size),
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
        )
        self._server = WorkerServer(
            registry_pb2.Registration(
                worker_id=worker_id,
                epoch=new_epoch(),
                role=common_pb2.ROLE_PREFILL,
                capabilities=capabilities.describe(engine, model_name, block_hash.SCHEME),
            ),
            grpc_server,
            load=lambda router_id: server.load_report(loop, allocator, feeds.take(router_id)),
            audit=lambda: server.audit(loop, allocator),
            take_step=lambda _: None,
            on_resend=feeds.resend,
            # A router's prompts end with its calls.
            on_router_lost=feeds.close,
        )
        self._running: asyncio.Task[None] | None = None

    async def start(self, host: str, routers: Iterable[str]) -> str:
        """Computes, serves on a free port and joins the routers; returns the address."""
        keep_freed_memory()
        self._running = asyncio.create_task(self.loop.run())
        return await self._server.start(host, routers)

    def set_routers(self, routers: Iterable[str]) -> None:
        """Joins exactly these routers."""
        self._server.membership.set_routers(routers)

    async def wait(self) -> None:
        """Returns when the worker was stopped; raises what ended its loop otherwise."""
        assert self._running is not None
        await asyncio.wait([self._running])
        if not self._running.cancelled():
            self._running.result()

    async def stop(self) -> None:
        """Leaves the routers, ends all calls, lets the running step end."""
        await self._server.stop()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        await self.loop.close()
        await self._transport.close()
