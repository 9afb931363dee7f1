"""Where a model's files are, and the fingerprints by which workers compare them. Imports no torch."""

import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO

from kvferry.config import DEMO_MODEL

_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 * 2**20

# What is fetched from a hub: weights as safetensors and text, never a pickle. Python files are text
# too; they run only where `engine.trust_remote_code` is set.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.py", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
# Folders and `consolidated` files hold the same weights once more.
_UNWANTED = ["*/*", "consolidated*"]


class ModelNotFound(Exception):
    """A model whose files are not here and could not be fetched; the message says what to do."""


def cache_dir() -> Path:
    """The folder for what is fetched and built: `KVFERRY_CACHE`, by default `~/.cache/kvferry`."""
    return Path(os.environ.get("KVFERRY_CACHE") or "~/.cache/kvferry").expanduser().absolute()


def demo_model_dir() -> Path:
    """Where the demo model lies once it is pulled. It appears there complete or not at all."""
    return cache_dir() / "models" / DEMO_MODEL


def resolve(model: str) -> Path:
    """The folder of a model given as a local folder, the demo model's name or a hub id.

    A hub id is fetched where it is not in the hub's own cache yet. Raises `ModelNotFound`.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _checked(folder.absolute())
    if model == DEMO_MODEL:
        if not demo_model_dir().is_dir():
            raise ModelNotFound(
                f"the demo model is not in {demo_model_dir()} on this machine: run `kvferry model pull`"
            )
        return demo_model_dir()
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelNotFound(f"{model}: no such directory")
    return _checked(_fetch(model))


def _fetch(model: str) -> Path:
    # Here, because it takes a third of a second that a local model need not wait for.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    # A ValueError is an id that no hub can have; an OSError covers an unreachable hub.
    except (HfHubHTTPError, OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{model!r} is no directory, not {DEMO_MODEL!r}, and no hub id that could be fetched: {cause}"
        ) from error


def _checked(folder: Path) -> Path:
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise ModelNotFound(f"{folder} holds no {pattern}: not a model in Hugging Face safetensors form")
    return folder


def model_digest(folder: Path) -> str:
    """A fingerprint of a model's configuration and weights: a sha256 in hex.

    Covers config.json and, of each safetensors file, its name, size and header, and the first, middle
    and last 4 KiB of every tensor: replaced, retrained or merged weights show, and a file of 100 GB
    is read in seconds. A change inside a tensor, away from its samples, does not show: it tells
    models apart and is no proof against tampering.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            _add_weights(digest, file, path)
    return digest.hexdigest()


def _add_weights(digest: "hashlib._Hash", file: BinaryIO, path: Path) -> None:
    # The format: 8 bytes with the header's length, the header as JSON, then the tensors' bytes.
    num_header_bytes = int.from_bytes(file.read(8), "little")
    if num_header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"{path} is not a safetensors file")
    header = file.read(num_header_bytes)
    try:
        tensors = json.loads(header)
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file") from error
    digest.update(header)
    tensors.pop("__metadata__", None)
    for begin, end in sorted(tuple(tensor["data_offsets"]) for tensor in tensors.values()):
        last = max(begin, end - _SAMPLE_BYTES)
        for at in sorted({begin, (begin + last) // 2, last}):
            file.seek(8 + num_header_bytes + at)
            digest.update(file.read(min(_SAMPLE_BYTES, end - at)))


def tokenizer_digest(folder: Path) -> str:
    """A fingerprint of what turns text into token ids: the sha256 of tokenizer.json, in hex."""
    try:
        return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise ModelNotFound(f"{folder} holds no tokenizer.json (a fast tokenizer's file)") from error
