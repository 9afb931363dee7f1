"""From settings to an engine."""

import os
from pathlib import Path
from typing import Literal

from engine.engine import Engine
from kvferry.config import EngineConfig


def load_engine(config: EngineConfig, model_dir: Path, role: Literal["prefill", "decode"]) -> Engine:
    """The engine that `config` asks for, ready to step. Takes seconds; raises `ValueError` with the reason
    for a model that cannot be served or a cache that cannot be had."""
    if config.kind == "fake":
        from engine.fake import FakeEngine

        return FakeEngine.from_config(config, role, model_dir)
    from engine.torch_engine import TorchEngine

    return TorchEngine.load(config, model_dir)


def default_num_threads(num_cpus: float) -> int:
    """Threads for a worker that was given so many CPUs (0: it shares the machine)."""
    return max(1, int(num_cpus) or os.cpu_count() or 1)
