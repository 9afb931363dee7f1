"""Large buffers that come and go must not be made anew by the system each time."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from engine.heap import keep_freed_memory

def use_buffers():
    for _ in range(20):
        buffers = [bytearray(8 * 2**20) for _ in range(4)]

if sys.argv[1] == "kept":
    keep_freed_memory()
use_buffers()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use_buffers()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_page_faults(how: str) -> int:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60
    )
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_buffers_are_used_again():
    assert num_page_faults("kept") < num_page_faults("as it is") / 10
