"""A whole deployment in one event loop: real gRPC, real HTTP, no Ray."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode_worker.worker import DecodeWorker
from engine.engine import Chunk, Engine, SampledToken
from engine.fake import FakeEngine
from engine.finish import finish_reason
from engine.torch_engine import TorchEngine
from kvferry import models
from kvferry.client import AsyncClient, SamplingParams
from kvferry.config import DecodeConfig, EngineConfig, PrefillConfig, RouterConfig
from kvferry.v1 import admin_pb2, admin_pb2_grpc
from prefill_worker.worker import PrefillWorker
from router.http import HttpServer, build_app
from router.router import Router
from router.server import build_server

HOST = "127.0.0.1"
MODEL = "tiny"

PROMPT = [45, 300, 12, 7, 77, 130, 299, 8, 45, 300, 12, 7, 200, 201, 202]
END_TOKEN = 2

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.8},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {17: 8.0, 23: -100.0}},
    "stop_token_ids": {"stop_token_ids": list(range(0, 400, 9))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(0, 400, 7))},
    "max_tokens 1": {"max_tokens": 1},
    "ends allowed": {"ignore_eos": False, "logit_bias": {END_TOKEN: 6.0}},
    "everything": {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 2.0},
        "min_tokens": 4,
        "stop_token_ids": [11, 13],
    },
}


class System:
    """A router with its workers, by name. Everything in it is stopped at the end of the test."""

    def __init__(
        self, model_dir: Path, router_config: RouterConfig, make_engine: Callable[..., Engine]
    ) -> None:
        self._model_dir = model_dir
        self._router_config = router_config
        self._make_engine = make_engine
        self._stack = AsyncExitStack()
        self.workers: dict[str, PrefillWorker | DecodeWorker] = {}
        self.addresses: dict[str, str] = {}
        self.client: AsyncClient

    async def __aenter__(self) -> "System":
        self.router = Router(self._router_config, self._model_dir, MODEL)
        server = build_server(self.router, self._router_config.max_body_bytes)
        self.grpc_address = f"{HOST}:{await server.start(HOST, 0)}"
        http = HttpServer(build_app(self.router, self._router_config), HOST, 0)
        self.http_address = f"http://{HOST}:{await http.start()}"
        self._stack.push_async_callback(self.router.close)
        self._stack.push_async_callback(server.stop, 0)
        self._stack.push_async_callback(http.stop)
        self.client = AsyncClient(self.grpc_address)
        self._stack.push_async_callback(self.client.close)
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._stack.aclose()

    async def add_prefill(
        self, name: str = "prefill-0", *, engine: Any = None, over: str = "shared memory", **config: Any
    ) -> PrefillWorker:
        """Starts a prefill worker; `engine`: settings of its engine, or an engine.

        over: "bytes" for one that has no memory to share, as if it were on another host.
        """
        made = self._engine("prefill", engine)
        if over == "bytes":
            made.cache.segment = None
        worker = PrefillWorker(PrefillConfig(**config), made, name, MODEL)
        return await self._add(name, worker)

    async def add_decode(self, name: str = "decode-0", *, engine: Any = None, **config: Any) -> DecodeWorker:
        """The same for a decode worker."""
        made = self._engine("decode", engine)
        worker = DecodeWorker(DecodeConfig(**config), made, name, MODEL)
        return await self._add(name, worker)

    def _engine(self, role: str, engine: Any) -> Engine:
        return (
            engine if hasattr(engine, "step") else self._make_engine(self._model_dir, role, **(engine or {}))
        )

    async def _add(self, name: str, worker: Any) -> Any:
        self.workers[name] = worker
        self.addresses[name] = await worker.start(HOST, [self.grpc_address])
        self._stack.push_async_callback(self.stop, name)
        async with asyncio.timeout(5):
            while name not in {w.worker_id for w in self.router.registry}:
                await asyncio.sleep(0.005)
        return worker

    async def stop(self, name: str) -> None:
        """Stops a worker in good order; harmless when repeated."""
        if worker := self.workers.pop(name, None):
            await worker.stop()

    async def audit(self, name: str) -> admin_pb2.AuditResponse:
        """What the worker says that it holds, over gRPC."""
        async with grpc.aio.insecure_channel(self.addresses[name]) as channel:
            return await admin_pb2_grpc.WorkerServiceStub(channel).Audit(admin_pb2.AuditRequest(), timeout=5)

    async def all_free(self, within_s: float = 1.0) -> None:
        """Fails unless no worker holds anything within `within_s`, which is the promise for a cancel."""
        held: dict[str, Any] = {}
        deadline_s = asyncio.get_running_loop().time() + within_s
        while True:
            held = {}
            for name in self.workers:
                audit = await self.audit(name)
                counts = audit.blocks
                assert counts.free + counts.cached + counts.reserved + counts.running == counts.total
                if audit.holdings or counts.reserved or counts.running:
                    held[name] = audit
            if not held:
                return
            assert asyncio.get_running_loop().time() < deadline_s, held
            await asyncio.sleep(0.02)


def make_fake(model_dir: Path, role: str, **settings: Any) -> FakeEngine:
    """A fake engine with a small cache, for the model directory's tokenizer."""
    config = json.loads((model_dir / "config.json").read_text())
    defaults = {
        "num_blocks": 64,
        "block_size": 4,
        "vocab_size": config["vocab_size"],
        "max_context_tokens": config["max_position_embeddings"],
        "tokenizer_digest": models.tokenizer_digest(model_dir),
    }
    return FakeEngine(role, **defaults | settings)


@pytest.fixture
async def start_system(byte_level_dir: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts a System: a number of prefill and decode workers, each with the engine settings given."""
    async with AsyncExitStack() as stack:

        async def start(
            num_prefill: int = 1,
            num_decode: int = 1,
            *,
            router: dict[str, Any] | None = None,
            prefill: dict[str, Any] | None = None,
            decode: dict[str, Any] | None = None,
            model_dir: Path = byte_level_dir,
            make_engine: Callable[..., Engine] = make_fake,
        ) -> System:
            system = await stack.enter_async_context(
                System(model_dir, RouterConfig(**(router or {})), make_engine)
            )
            for index in range(num_prefill):
                await system.add_prefill(f"prefill-{index}", **(prefill or {}))
            for index in range(num_decode):
                await system.add_decode(f"decode-{index}", **(decode or {}))
            return system

        yield start


class TinyModel:
    """A random float32 Llama with the test tokenizer, and what one engine alone makes of a prompt."""

    prompt = PROMPT

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.settings = {"model_dir": model_dir, "make_engine": self.make_engine}
        self._engine = self.make_engine(model_dir, "both")

    @staticmethod
    def make_engine(model_dir: Path, role: str, **settings: object) -> TorchEngine:
        """An engine of it."""
        defaults = {"dtype": "float32", "block_size": 4, "num_blocks": 64, "num_threads": 1}
        return TorchEngine.load(EngineConfig(**defaults | settings), model_dir)

    def generate(self, sampling: SamplingParams) -> list[SampledToken]:
        """The plainest loop there is: one sequence, one step a token."""
        tokens, output, start = list(PROMPT), [], 0
        while True:
            chunk = Chunk(tokens, start, len(tokens), list(range(60)), len(PROMPT), sampling)
            (token,) = self._engine.step([chunk])
            start = len(tokens)
            tokens.append(token.token_id)
            output.append(token)
            if finish_reason(
                sampling,
                self._engine.info.eos_token_ids,
                token_id=token.token_id,
                num_output_tokens=len(output),
                num_tokens=len(tokens),
                max_context_tokens=256,
            ):
                return output


@pytest.fixture(params=OPTIONS)
def option(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The fields of each sampling option."""
    return OPTIONS[request.param]


@pytest.fixture(scope="module")
def tiny(byte_level_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The model on disk, and one engine of it."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    for file in byte_level_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=402,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        # Wide enough that no two tokens are near a tie.
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=END_TOKEN,
        pad_token_id=END_TOKEN,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return TinyModel(folder)
