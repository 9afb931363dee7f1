"""Memory that another process of the same user on this host can map, and that leaves nothing behind.

It is an anonymous file (memfd): it has no path of its own and ends with the last process that has it open or
mapped, however that process ended. A peer opens it as /proc/<pid>/fd/<fd>.
"""

import fcntl
import mmap
import os
import secrets
import weakref

NAME_PREFIX = "kvferry-"
# What a reader must find set before it maps: a file that shrinks under a mapping kills who reads it.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Segment:
    """An anonymous file of a fixed size, filled with zeros, mapped here for reading and writing.

    name: random, so that it tells this segment from any other of any process; fd: its descriptor here.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises `OSError` where the system has no room or no such files."""
        self.name = NAME_PREFIX + secrets.token_hex(16)
        self.num_bytes = num_bytes
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
        # All pages are made now, about a second a GB: made at first use they would delay a transfer.
        self.memory = mmap.mmap(self.fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)


def segments_supported() -> bool:
    """Whether this system has such files (Linux)."""
    return hasattr(os, "memfd_create")
