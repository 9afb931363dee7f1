"""One decode worker, whole: engine, loop, reservations, servers. Knows no Ray, so a test can run one."""

from collections.abc import Iterable

from decode_worker import server
from decode_worker.loop import DecodeLoop
from decode_worker.streams import TokenStreams
from engine.engine import Engine
from kv_transfer import capabilities
from kv_transfer.byte_blocks import max_message_bytes
from kv_transfer.receiver import Receiver
from kv_transfer.reservation import ReservationTable
from kv_transfer.server import SERVICE_NAME, KvTransferServicer, add_to_server
from kvferry.config import DecodeConfig
from kvferry.v1 import common_pb2, decode_pb2_grpc, registry_pb2
from rpc.channel import DEFAULT_MAX_MESSAGE_BYTES
from rpc.server import GrpcServer
from scheduling import block_hash
from scheduling.allocator import BlockAllocator
from scheduling.block_feed import BlockFeeds
from scheduling.decode import DecodeScheduler
from worker.host import WorkerHost, new_epoch


class DecodeWorker:
    """Receives KV blocks and generates. Call it on one event loop."""

    def __init__(self, config: DecodeConfig, engine: Engine, worker_id: str, model_name: str) -> None:
        epoch = new_epoch()
        shape = engine.cache.shape
        allocator = BlockAllocator(engine.cache.num_blocks)
        feeds = BlockFeeds(allocator.cache, engine.cache.num_blocks)
        scheduler = DecodeScheduler(
            allocator,
            shape.block_size,
            config.max_batch_size,
            config.max_step_tokens,
            config.step_target_s,
        )
        reservations = ReservationTable(epoch)
        streams = TokenStreams(lambda router_id: self._host.membership.notify(router_id))
        self.loop = loop = DecodeLoop(engine, allocator, scheduler, reservations, streams)
        receiver = Receiver(engine.cache, reservations, loop.complete)

        grpc_server = GrpcServer(max(DEFAULT_MAX_MESSAGE_BYTES, max_message_bytes(shape.num_bytes)))
        grpc_server.add(
            "kvferry.v1.DecodeService",
            server.DecodeServicer(
                loop,
                allocator,
                engine.info,
                shape.block_size,
                lambda router: router in self._host.membership.router_ids,
            ),
            decode_pb2_grpc.add_DecodeServiceServicer_to_server,
        )
        grpc_server.add(
            SERVICE_NAME,
            KvTransferServicer(receiver),
            add_to_server,
        )

        def on_router_lost(router_id: str) -> None:
            loop.release_router(router_id)
            feeds.close(router_id)

        def take_step(router_id: str) -> registry_pb2.StepUpdate | None:
            tokens = streams.take(router_id)
            return None if tokens is None else server.step_update(tokens)

        self._host = WorkerHost(
            registry_pb2.Registration(
                worker_id=worker_id,
                epoch=epoch,
                role=common_pb2.ROLE_DECODE,
                capabilities=capabilities.describe(engine, model_name, block_hash.SCHEME),
            ),
            grpc_server,
            run=loop.run,
            load=lambda router_id: server.load_report(loop, allocator, receiver, feeds.take(router_id)),
            audit=lambda: server.audit(loop, allocator),
            take_step=take_step,
            on_resend=feeds.resend,
            on_router_lost=on_router_lost,
        )

    async def start(self, host: str, routers: Iterable[str]) -> str:
        """Decodes, serves on a free port and joins the routers; returns the address."""
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
        self.loop.close()
