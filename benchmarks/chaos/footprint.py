"""What a process takes of the machine, and whether it takes more and more."""

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

# Allocators keep what they had at the peak of a load, and a channel to each former incarnation of a peer
# goes only when its next call fails; what grows with every request is past these within minutes.
_MAX_GROWTH_BYTES = 64 * 2**20
_MAX_GROWTH_SHARE = 0.1
_MAX_GROWTH_DESCRIPTORS = 24
_MAX_GROWTH_THREADS = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """One process. A restarted member is another process, and is compared with itself only."""

    pid: int
    resident_bytes: int
    num_descriptors: int
    num_threads: int


def footprints(processes: Mapping[str, psutil.Process]) -> dict[str, Footprint]:
    """Of each member's process."""
    return {
        name: Footprint(p.pid, p.memory_info().rss, p.num_fds(), p.num_threads())
        for name, p in processes.items()
    }


def growth(begin: Mapping[str, Footprint], end: Mapping[str, Footprint]) -> list[str]:
    """Each process that takes more at the end than the bounds above allow."""
    found = []
    for name, was in begin.items():
        now = end.get(name)
        if now is None or now.pid != was.pid:
            continue
        more_bytes = now.resident_bytes - was.resident_bytes
        if more_bytes > max(_MAX_GROWTH_BYTES, _MAX_GROWTH_SHARE * was.resident_bytes):
            found.append(f"{name} grew by {more_bytes / 2**20:.0f} MiB")
        if now.num_descriptors - was.num_descriptors > _MAX_GROWTH_DESCRIPTORS:
            found.append(f"{name}: {was.num_descriptors} file descriptors became {now.num_descriptors}")
        if now.num_threads - was.num_threads > _MAX_GROWTH_THREADS:
            found.append(f"{name}: {was.num_threads} threads became {now.num_threads}")
    return found
