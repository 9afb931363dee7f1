"""All systems by name."""

from pathlib import Path

from benchmarks.peers.kvferry_system import Kvferry
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.peer import Peer
from benchmarks.peers.vllm import Vllm
from benchmarks.peers.vllm_split import VllmSplit, VllmSplitAsShipped

OTHERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Vllm, VllmSplit, VllmSplitAsShipped, LlamaCpp)}
DEFAULT = ("kvferry", "vllm", "vllm-split", "llama.cpp")


def make(name: str, model_dir: Path, config: Path | None) -> Peer:
    """The system of that name. config: kvferry's. Raises `KeyError`."""
    return Kvferry(model_dir, config) if name == Kvferry.name else OTHERS[name](model_dir)
