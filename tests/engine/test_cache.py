"""The cache's bytes, and the shared memory that they lie in."""

import fcntl
import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from engine.cache import BlockShape, KVCache
from engine.segment import SEALS

SHAPE = BlockShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
CPU = torch.device("cpu")


def test_a_block_is_one_run_of_bytes_and_keys_and_values_are_the_same_memory():
    cache = KVCache(SHAPE, 5, CPU)
    assert cache.blocks.shape == (5, 3, 2, 4, 2, 8)
    assert not cache.blocks.any()
    cache.keys(1)[2, 3, 1] = 7
    cache.values(1)[2, 3, 1] = 9
    assert cache.blocks[2, 1, 0, 3, 1].tolist() == [7] * 8
    assert cache.blocks[2, 1, 1, 3, 1].tolist() == [9] * 8
    assert cache.read_block(2) == cache.blocks[2].view(torch.uint8).numpy().tobytes()
    assert len(cache.read_block(2)) == SHAPE.num_bytes


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_a_block_written_is_that_block_and_no_other(make):
    source, target = KVCache(SHAPE, 3, CPU), KVCache(SHAPE, 3, CPU)
    source.blocks.copy_(torch.randn(source.blocks.shape))
    target.blocks.fill_(1)
    target.write_block(1, make(source.read_block(2)))
    assert torch.equal(target.blocks[1], source.blocks[2])
    assert (target.blocks[[0, 2]] == 1).all()
    with pytest.raises(ValueError, match="different structures"):
        target.write_block(1, b"short")


def test_a_view_changes_with_the_block_and_a_copy_does_not():
    cache = KVCache(SHAPE, 2, CPU)
    view, copy = cache.view_block(1), cache.read_block(1)
    cache.blocks[1] = 1
    assert view == cache.read_block(1)
    assert not any(copy)


def test_another_opening_of_the_segment_sees_the_blocks_and_cannot_resize_it():
    cache = KVCache(SHAPE, 3, CPU)
    cache.blocks.copy_(torch.randn(cache.blocks.shape))
    segment = cache.segment
    assert segment is not None
    fd = os.open(f"/proc/{os.getpid()}/fd/{segment.fd}", os.O_RDWR)
    try:
        assert os.readlink(f"/proc/self/fd/{fd}") == f"/memfd:{segment.name} (deleted)"
        assert os.fstat(fd).st_size == segment.num_bytes == 3 * SHAPE.num_bytes
        memory = mmap.mmap(fd, segment.num_bytes, prot=mmap.PROT_READ)
        assert memory[2 * SHAPE.num_bytes :] == cache.read_block(2)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        for num_bytes in (0, 2 * segment.num_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, num_bytes)
    finally:
        os.close(fd)


def test_segments_have_names_of_their_own():
    caches = [KVCache(SHAPE, 1, CPU) for _ in range(3)]
    assert len({cache.segment.name for cache in caches}) == 3


def test_memory_lives_as_long_as_a_tensor_over_it_and_goes_then():
    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    cache = KVCache(SHAPE, 2, CPU)
    name = cache.segment.name
    blocks = cache.blocks
    del cache
    gc.collect()
    blocks.fill_(3)
    assert blocks.float().mean() == 3
    assert name in Path("/proc/self/maps").read_text()
    del blocks
    assert num_open() == before
    assert name not in Path("/proc/self/maps").read_text()


def test_a_system_without_room_for_segments_still_has_a_cache(monkeypatch, caplog):
    def refuse(*_: object) -> int:
        raise OSError("no")

    monkeypatch.setattr(os, "memfd_create", refuse)
    cache = KVCache(SHAPE, 2, CPU)
    assert cache.segment is None
    cache.write_block(1, bytes(range(256)) * (SHAPE.num_bytes // 256))
    assert cache.read_block(1)[:3] == b"\0\1\2"
    assert "not shared" in caplog.text
