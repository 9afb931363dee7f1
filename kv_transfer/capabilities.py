"""What a worker says of itself at registration: all that two workers must agree on to share a request."""

from engine.cache import LAYOUT
from engine.engine import Engine
from kvferry.v1 import registry_pb2 as pb

PROTOCOL_VERSION = 1


def describe(engine: Engine, model_name: str, hash_scheme: str) -> pb.Capabilities:
    """The capabilities of a worker with this engine, whose blocks are named by `hash_scheme`."""
    shape = engine.cache.shape
    return pb.Capabilities(
        model=model_name,
        model_digest=engine.info.model_digest,
        tokenizer_digest=engine.info.tokenizer_digest,
        dtype=str(shape.dtype).removeprefix("torch."),
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_layout=LAYOUT,
        tensor_parallel_size=1,
        hash_scheme=hash_scheme,
        codec="raw",
        protocol_version=PROTOCOL_VERSION,
        num_blocks=engine.cache.num_blocks,
    )
