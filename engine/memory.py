"""How many blocks the KV cache gets."""

import os
from pathlib import Path

import torch

from engine.cache import BlockShape
from kvferry.config import EngineConfig

_DEFAULT_SHARE = {"cuda": 0.9, "cpu": 0.1}
_CGROUP = Path("/sys/fs/cgroup")


def num_blocks(config: EngineConfig, shape: BlockShape, device: torch.device) -> int:
    """From the one setting that is given, or the default share of what is free now that the weights are
    loaded. Raises `ValueError` where not even one block fits."""
    free = free_bytes(device)
    if config.num_blocks is not None:
        return _checked(config.num_blocks, shape, free, f"num_blocks: {config.num_blocks}")
    if config.kv_cache_bytes is not None:
        num = config.kv_cache_bytes // shape.num_bytes
        return _checked(num, shape, free, f"kv_cache_bytes: {config.kv_cache_bytes}")
    share = config.kv_cache_share or _DEFAULT_SHARE[device.type]
    num = int(free * share) // shape.num_bytes
    return _checked(num, shape, free, f"kv_cache_share: {share:g} of {free} free bytes")


def _checked(num: int, shape: BlockShape, free: int, setting: str) -> int:
    if num < 1:
        raise ValueError(f"{setting} holds no block: a block takes {shape.num_bytes} bytes")
    if num * shape.num_bytes > free:
        raise ValueError(f"{setting}: {num * shape.num_bytes} bytes of KV cache, but only {free} are free")
    return num


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`; on a CPU within the container's limit, too."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([_free_on_machine(), *_free_in_container()])


def _free_on_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Systems without /proc: all there is.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> list[int]:
    """What the control groups (version 2, then 1) leave, where they limit memory."""
    found = []
    for folder, limit, usage in (
        (_CGROUP, "memory.max", "memory.current"),
        (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            # Pages of files that the system would give back.
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append(max(0, most - used + int(statistics.get("inactive_file", 0))))
        except (OSError, ValueError):
            continue
    return found
