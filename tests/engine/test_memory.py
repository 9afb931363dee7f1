"""How large the KV cache becomes."""

import pytest
import torch

from engine import memory
from engine.cache import BlockShape
from kvferry.config import EngineConfig

CPU = torch.device("cpu")
SHAPE = BlockShape(num_layers=2, block_size=16, num_kv_heads=2, head_dim=8, dtype=torch.float16)
BLOCK_BYTES = 2 * 2 * 16 * 2 * 8 * 2


@pytest.fixture
def free(monkeypatch):
    """Sets what is free."""

    def set_free(num_bytes):
        monkeypatch.setattr(memory, "free_bytes", lambda device: num_bytes)

    set_free(100 * BLOCK_BYTES)
    return set_free


def test_each_setting_sizes_the_cache(free):
    assert SHAPE.num_bytes == BLOCK_BYTES
    assert memory.num_blocks(EngineConfig(num_blocks=7), SHAPE, CPU) == 7
    assert memory.num_blocks(EngineConfig(kv_cache_bytes=3 * BLOCK_BYTES + 1), SHAPE, CPU) == 3
    assert memory.num_blocks(EngineConfig(kv_cache_share=0.5), SHAPE, CPU) == 50


def test_by_default_it_is_a_tenth_on_a_cpu_and_nine_tenths_on_cuda(free):
    assert memory.num_blocks(EngineConfig(), SHAPE, CPU) == 10
    assert memory.num_blocks(EngineConfig(), SHAPE, torch.device("cuda")) == 90


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_bytes": BLOCK_BYTES - 1}, f"kv_cache_bytes: .* a block takes {BLOCK_BYTES} bytes"),
        ({"kv_cache_share": 0.001}, "kv_cache_share: .* holds no block"),
        ({}, None),
        ({"num_blocks": 101}, "num_blocks: .* but only"),
        ({"kv_cache_bytes": 101 * BLOCK_BYTES}, "kv_cache_bytes: .* but only"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(free, settings, message):
    if message is None:
        free(BLOCK_BYTES)
        message = "kv_cache_share: .* holds no block"
    with pytest.raises(ValueError, match=message):
        memory.num_blocks(EngineConfig(**settings), SHAPE, CPU)


def test_what_is_free_stays_within_the_containers_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    whole = memory.free_bytes(CPU)
    assert whole > 2**20
    (tmp_path / "memory.max").write_text("2000\n")
    (tmp_path / "memory.current").write_text("1500\n")
    (tmp_path / "memory.stat").write_text("anon 900\ninactive_file 100\n")
    assert memory.free_bytes(CPU) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) > 2**20
