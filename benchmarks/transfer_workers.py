"""A prefill worker and a decode worker, each in a process of its own, and what stands in for the router.

Measured is the time that a handoff adds: from the end of the prefill worker's last step to the start of the
decode worker's first. By then decode has every block, has acknowledged and has admitted the sequence, so it
is a little more than the transfer alone. Both ends read the same clock (CLOCK_MONOTONIC).
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from benchmarks.transfer_ends import DEMO_SHAPE, HOST
from decode_worker.worker import DecodeWorker
from engine.cache import KVCache
from engine.engine import Chunk, Engine, ModelInfo, SampledToken
from engine.loading import load_engine
from kvferry import models
from kvferry.config import DEMO_MODEL, DecodeConfig, EngineConfig, PrefillConfig
from kvferry.sampling import SamplingParams
from kvferry.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, registry_pb2
from kvferry.v1 import registry_pb2_grpc as registry_grpc
from prefill_worker.worker import PrefillWorker
from rpc.server import GrpcServer

# Blocks for the longest prompt, twice.
NUM_BLOCKS = 600
ROUTER_ID = "benchmark"
# What the demo model's prefill takes on one core of the machine in benchmarks/README.md.
STAND_IN_TOKEN_S = 0.0007
REQUEST_TIMEOUT_S = 120.0


class StandInEngine:
    """Has the demo model's KV and keeps a core as busy as its prefill would; for where it is not pulled."""

    def __init__(self) -> None:
        self.info = ModelInfo("stand-in", "stand-in", 49152, 8192, frozenset())
        self.cache = KVCache(DEMO_SHAPE, NUM_BLOCKS, torch.device("cpu"))
        self._matrix = torch.rand(256, 256)

    def step(self, chunks: Sequence[Chunk]) -> list[SampledToken | None]:
        """Computes for a while, then fills the blocks."""
        end_s = time.monotonic() + STAND_IN_TOKEN_S * sum(c.end - c.start for c in chunks)
        while time.monotonic() < end_s:
            self._matrix @ self._matrix
        size = self.cache.shape.block_size
        for chunk in chunks:
            for ordinal in range(chunk.start // size, -(-chunk.end // size)):
                self.cache.blocks[chunk.block_table[ordinal]] = ordinal
        return [None if chunk.sampling is None else SampledToken(7) for chunk in chunks]


class TimedEngine:
    """An engine that notes when each of its steps began and ended."""

    def __init__(self, engine: Engine) -> None:
        self.info = engine.info
        self.cache = engine.cache
        self.steps: list[tuple[float, float]] = []
        self._engine = engine

    def step(self, chunks: Sequence[Chunk]) -> list[SampledToken | None]:
        """As `Engine.step`."""
        start_s = time.monotonic()
        result = self._engine.step(chunks)
        self.steps.append((start_s, time.monotonic()))
        return result


def engine_name() -> str:
    """What the workers will compute with."""
    try:
        models.resolve(DEMO_MODEL)
    except models.ModelNotFound:
        return f"stand-in, {STAND_IN_TOKEN_S * 1000} ms a token"
    return DEMO_MODEL


def _engine(role: Any) -> TimedEngine:
    try:
        model_dir = models.resolve(DEMO_MODEL)
    except models.ModelNotFound:
        return TimedEngine(StandInEngine())
    return TimedEngine(load_engine(EngineConfig(num_blocks=NUM_BLOCKS, num_threads=1), model_dir, role))


class WorkerHost:
    """One worker, driven by a benchmark. `role` is prefill or decode."""

    def __init__(self, role: str, is_shared: bool) -> None:
        self._engine = _engine(role)
        self._worker: PrefillWorker | DecodeWorker
        if role == "prefill":
            if not is_shared:
                self._segment, self._engine.cache.segment = self._engine.cache.segment, None
            self._worker = PrefillWorker(PrefillConfig(), self._engine, "prefill-0", DEMO_MODEL)
        else:
            self._worker = DecodeWorker(DecodeConfig(), self._engine, "decode-0", DEMO_MODEL)

    async def start(self, router: str) -> str:
        """Serves and joins the router; returns the address."""
        return await self._worker.start(HOST, [router])

    async def stop(self) -> None:
        """Ends all calls."""
        await self._worker.stop()

    async def take_steps(self) -> list[tuple[float, float]]:
        """The steps since the last call: when they began and ended."""
        steps, self._engine.steps = self._engine.steps, []
        return steps


class RouterStandIn(registry_grpc.RegistryServiceServicer):
    """Lets workers join and takes requests through both of them."""

    def __init__(self) -> None:
        self._joined = asyncio.Semaphore(0)
        self._server = GrpcServer()
        self._server.add(
            "kvferry.v1.RegistryService", self, registry_grpc.add_RegistryServiceServicer_to_server
        )
        self._ended = asyncio.Event()

    async def start(self) -> str:
        """Serves; returns the address."""
        return f"{HOST}:{await self._server.start(HOST, 0)}"

    async def stop(self) -> None:
        """Ends all calls."""
        await self._server.stop(0)

    async def Join(  # noqa: N802 - named by its proto
        self, request_iterator: AsyncIterator[registry_pb2.JoinRequest], context: Any
    ) -> AsyncIterator[registry_pb2.JoinResponse]:
        """RegistryService.Join, as far as workers need it."""
        await anext(request_iterator)
        yield registry_pb2.JoinResponse(router_id=ROUTER_ID)
        self._joined.release()
        async for message in request_iterator:
            if message.HasField("step") and message.step.ended:
                self._ended.set()

    async def wait_for_workers(self) -> None:
        """Returns when both workers have joined."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            for _ in range(2):
                await self._joined.acquire()

    async def run(self, prefill: str, decode: str, request_id: str, num_tokens: int) -> None:
        """One request with a prompt of random tokens: two output tokens, the second from decode."""
        self._ended.clear()
        prompt = random.Random(request_id).choices(range(1000, 40000), k=num_tokens)
        sampling = common_pb2.SamplingParams(
            **SamplingParams(temperature=0, max_tokens=2, seed=1, ignore_eos=True).to_fields()
        )
        common: dict[str, Any] = {"request_id": request_id, "prompt_token_ids": prompt, "sampling": sampling}
        async with (
            grpc.aio.insecure_channel(prefill) as prefill_channel,
            grpc.aio.insecure_channel(decode) as decode_channel,
            asyncio.timeout(REQUEST_TIMEOUT_S),
        ):
            reserve = decode_pb2.ReserveRequest(**common, router_id=ROUTER_ID, deadline_s=REQUEST_TIMEOUT_S)
            reserved = await decode_pb2_grpc.DecodeServiceStub(decode_channel).Reserve(reserve)
            target = prefill_pb2.HandoffTarget(address=decode, lease=reserved.lease)
            request = prefill_pb2.PrefillRequest(**common, deadline_s=REQUEST_TIMEOUT_S, target=target)
            async for _ in prefill_pb2_grpc.PrefillServiceStub(prefill_channel).Prefill(request):
                pass
            await self._ended.wait()


@dataclass(frozen=True, slots=True)
class Handoff:
    """One request's times in seconds: of its prefill, and from its end to decode's first step."""

    prefill_s: float
    exposed_s: float
