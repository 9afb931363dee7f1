"""On a CUDA device: flash attention over blocks, and the whole engine."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from engine.attention import choose_backend
from engine.batch import Batch
from engine.cache import BlockShape, KVCache
from engine.engine import Chunk
from engine.torch_attention import TorchAttention
from engine.torch_engine import TorchEngine
from kvferry.config import EngineConfig
from kvferry.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}
LENGTHS = [(700, 1), (5, 5), (300, 120), (33, 1), (257, 256), (1, 1)]


def attend(device, shape, seed, window, softcap):
    """The same random step on either device; on the CPU in float32 and plain torch."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [-(-end // shape.block_size) for end, _ in LENGTHS]
    if device == CPU:
        computed = BlockShape(
            shape.num_layers, shape.block_size, shape.num_kv_heads, shape.head_dim, torch.float32
        )
    else:
        computed = shape
    cache = KVCache(computed, sum(needed) + 2, device)
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=generator).to(shape.dtype))
    free = rng.sample(range(cache.num_blocks), cache.num_blocks)
    chunks = [
        Chunk(range(end), end - count, end, [free.pop() for _ in range(num)], end, None)
        for (end, count), num in zip(LENGTHS, needed, strict=True)
    ]
    batch = Batch.pack(chunks, shape.block_size, device)
    num_tokens = sum(count for _, count in LENGTHS)
    query, key, value = (
        torch.randn(1, num_tokens, heads, shape.head_dim, generator=generator)
        .to(shape.dtype)
        .to(device, computed.dtype)
        .transpose(1, 2)
        for heads in (3 * shape.num_kv_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    backend = TorchAttention() if device == CPU else choose_backend(shape, device, softcap > 0)
    out = backend.attend(
        query,
        key,
        value,
        cache.keys(1),
        cache.values(1),
        batch,
        scale=shape.head_dim**-0.5,
        window=window,
        softcap=softcap,
    )
    return backend.name, out.float().cpu()


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (64, 0.0), (64, 2.0)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attention_over_blocks_agrees_with_the_cpu(dtype, head_dim, window, softcap, block_size):
    shape = BlockShape(2, block_size, 2, head_dim, dtype)
    name, out = attend(CUDA, shape, head_dim, window, softcap)
    assert name == ("torch" if softcap or dtype == torch.float32 else "cuda")
    _, wanted = attend(CPU, shape, head_dim, window, softcap)
    assert (out - wanted).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_engine_generates_what_transformers_does_up_to_near_ties(tmp_path, dtype, kind, block_size):
    torch.manual_seed(1)
    config = kind(
        vocab_size=97,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        **({"sliding_window": 40} if kind is MistralConfig else {}),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    engine = TorchEngine.load(
        EngineConfig(device="cuda", dtype=dtype, block_size=block_size, num_blocks=64), tmp_path
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).cuda()
    tokens = [random.Random(1).randrange(97) for _ in range(150)]
    greedy = SamplingParams(temperature=0.0)
    end = 0
    while len(tokens) < 170:
        start, end = end, min(len(tokens), end + 64)
        sampling = greedy if end == len(tokens) else None
        [token] = engine.step([Chunk(tokens, start, end, list(range(40, 52)), 150, sampling)])
        if token is None:
            continue
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens], device=CUDA)).logits[0, -1].float()
        near = 1e-4 if dtype == "float32" else 0.05
        assert logits.max() - logits[token.token_id] <= near * logits.abs().max()
        tokens.append(int(logits.argmax()))


def test_the_cache_takes_a_share_of_what_the_weights_leave(tmp_path):
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    free, _ = torch.cuda.mem_get_info()
    engine = TorchEngine.load(EngineConfig(device="cuda", kv_cache_share=0.01), tmp_path)
    taken = engine.cache.num_blocks * engine.cache.shape.num_bytes
    assert 0.005 * free < taken < 0.011 * free
