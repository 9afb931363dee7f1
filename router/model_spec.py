"""What the router must know of a model to tell which requests it can serve."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A served model.

    name: what clients call it. context_length: most tokens of prompt and output together.
    vocab_size: token ids are below it.
    """

    name: str
    context_length: int
    vocab_size: int

    @classmethod
    def load(cls, model_dir: Path, name: str) -> Self:
        """Reads config.json. Raises `FileNotFoundError`, or `ValueError` that names what is missing."""
        path = model_dir / "config.json"
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        # Models with several kinds of input keep the text's settings apart.
        config = config | (config.get("text_config") or {})
        for key in ("max_position_embeddings", "vocab_size"):
            if not isinstance(config.get(key), int):
                raise ValueError(f"{path}: {key} is missing or no number")
        return cls(name, config["max_position_embeddings"], config["vocab_size"])
