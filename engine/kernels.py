"""Builds, keeps and loads the C++ kernels of `csrc/`. `python -m engine.kernels` builds it ahead.

A build is kept under a name made of everything that went into it: sources, compiler command, torch, and
the processor's features, since it is compiled for the machine it runs on. It is written elsewhere and
renamed, so that it is there whole or not at all; of several processes that need it one builds.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kvferry.models import cache_dir

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    "-std=c++20 -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math "
    "-fopenmp -fPIC -shared"
)
_COMPILERS = ("c++", "g++", "clang++")


class BuildFailed(Exception):
    """The kernels could not be built here; the message says why."""


def load_kernels() -> bool:
    """Makes `torch.ops.kvferry` ready, building it if need be (about 10 s). If it cannot be had, warns
    once and returns False."""
    if hasattr(torch.ops.kvferry, "paged_attention"):
        return True
    try:
        torch.ops.load_library(build())  # type: ignore[no-untyped-call]
    except (BuildFailed, OSError) as error:
        logger.warning(
            "the CPU kernels are not available, attention runs in plain torch: decoding 8 sequences of 1,000 "
            "tokens takes 2.6 times as long, a prompt of 500 tokens 1.7 times. The reason: %s",
            error,
        )
        return False
    return True


def build() -> Path:
    """The kernels' library, which is built if it is not there yet. Raises `BuildFailed`, `OSError`."""
    compiler = _compiler()
    command = [*compiler, *_FLAGS.split()]
    target = cache_dir() / "kernels" / f"kernels-{_key(command)}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / "lock"):
        # Another process may have built it while this one waited; a killed one may have left its folder.
        for stale in target.parent.glob(".build-*"):
            shutil.rmtree(stale, ignore_errors=True)
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
                _compile(command, Path(folder) / target.name)
                (Path(folder) / target.name).rename(target)
    return target


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    for compiler in [named] if named else [[name] for name in _COMPILERS]:
        if shutil.which(compiler[0]):
            return compiler
    raise BuildFailed(f"no C++ compiler ({' '.join(named) or ', '.join(_COMPILERS)}) was found")


def _compile(command: list[str], target: Path) -> None:
    """All sources at once, then one library of them."""
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    objects = {source: target.with_name(f"{source.stem}.o") for source in sorted(_SOURCES.glob("*.cpp"))}
    _run([*command, *includes, "-c", str(source), "-o", str(built)] for source, built in objects.items())
    # OpenMP's own library is left out: torch has brought the one that its threads belong to.
    link = [flag for flag in command if flag != "-fopenmp"]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run([[*link, *map(str, objects.values()), "-o", str(target), *libraries]])


def _run(commands: Iterable[list[str]]) -> None:
    """All of them at once. Raises `BuildFailed` when one has failed and all have ended."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    messages = [process.communicate()[1] for process in running]
    for process, message in zip(running, messages, strict=True):
        if process.returncode != 0:
            lines = message.splitlines()
            errors = [line for line in lines if "error" in line] or lines
            raise BuildFailed(f"the compiler exited with {process.returncode}: {' '.join(errors[:3])}")


def _key(command: list[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(f"{source.name}\0".encode() + source.read_bytes())
    for part in (*command, torch.__version__, platform.machine(), _processor_features()):
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:24]


def _processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The system lets go of the lock when its holder dies.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Builds the kernels and says what it did. Without them the engine still runs, so that is no failure."""
    try:
        sys.stdout.write(f"CPU kernels: {build()}\n")
    except (BuildFailed, OSError) as error:
        sys.stdout.write(f"CPU kernels: not built, plain torch will be used ({error})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
