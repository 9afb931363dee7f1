"""How this process's heap deals with large buffers that come and go many times a second."""

import ctypes
import sys

# glibc's mallopt parameters, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# The most that glibc allows: larger buffers still come from the system and go back to it.
_MAX_HEAP_BUFFER_BYTES = 32 * 2**20
# Free memory that the heap keeps. A worker's messages and activations of one step fit.
_MAX_FREE_BYTES = 256 * 2**20


def keep_freed_memory() -> None:
    """Lets the heap keep buffers of up to 32 MiB that were freed, instead of giving each back to the system.

    By default glibc maps a large buffer anew each time, and its first use then costs a page fault every
    4 KiB: half the time of receiving KV blocks. Where the C library is another one, nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAX_HEAP_BUFFER_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MAX_FREE_BYTES)
