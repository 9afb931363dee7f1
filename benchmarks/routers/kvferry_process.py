"""kvferry's router, or its workers with the fake engine, in a process of its own and without Ray.

python -m benchmarks.routers.kvferry_process router MODEL_DIR GRPC_PORT HTTP_PORT
python -m benchmarks.routers.kvferry_process workers MODEL_DIR ROUTER_GRPC_PORT
"""

import asyncio
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from kvferry import config as settings
from rpc.logs import log_to_stderr

HOST = "127.0.0.1"
MODEL_NAME = "mock"
_NUM_BLOCKS = 8192


async def serve_router(model_dir: Path, grpc_port: int, http_port: int) -> None:
    """Serves until cancelled, as `router.actor` does."""
    from router.http import HttpServer, build_app
    from router.router import Router
    from router.server import build_server

    config = settings.RouterConfig(grpc_port=grpc_port, http_port=http_port)
    router = Router(config, model_dir, MODEL_NAME)
    # A gRPC server stops when nothing refers to it.
    grpc_server = build_server(router, config.max_body_bytes)
    await grpc_server.start(HOST, grpc_port)
    await HttpServer(build_app(router, config), HOST, http_port).start()
    await asyncio.Event().wait()


async def serve_workers(model_dir: Path, router_port: int) -> None:
    """One prefill and one decode worker on one event loop, joined to the router until cancelled."""
    from decode_worker.worker import DecodeWorker
    from engine.fake import FakeEngine
    from prefill_worker.worker import PrefillWorker

    config = settings.EngineConfig(kind="fake", num_blocks=_NUM_BLOCKS)
    router = [f"{HOST}:{router_port}"]
    engine = FakeEngine.from_config(config, "prefill", model_dir)
    prefill = PrefillWorker(settings.PrefillConfig(), engine, "prefill-0", MODEL_NAME)
    await prefill.start(HOST, router)
    engine = FakeEngine.from_config(config, "decode", model_dir)
    decode = DecodeWorker(settings.DecodeConfig(), engine, "decode-0", MODEL_NAME)
    await decode.start(HOST, router)
    await asyncio.Event().wait()


def main() -> None:
    """See the module."""
    log_to_stderr()
    if find_spec("uvloop"):
        # As Ray does for its actors.
        asyncio.set_event_loop_policy(import_module("uvloop").EventLoopPolicy())
    role, model_dir, *ports = sys.argv[1:]
    if role == "router":
        grpc_port, http_port = map(int, ports)
        asyncio.run(serve_router(Path(model_dir), grpc_port, http_port))
    else:
        asyncio.run(serve_workers(Path(model_dir), int(ports[0])))


if __name__ == "__main__":
    main()
