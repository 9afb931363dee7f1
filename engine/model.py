"""Loads a model with transformers, its attention replaced by ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine import attention
from engine.cpu_model import use_kernels
from engine.engine import ModelInfo
from engine.refusal import UnsupportedModel, check_config, model_class
from kvferry.config import EngineConfig
from kvferry.models import model_digest, tokenizer_digest


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device."""

    model: PreTrainedModel
    info: ModelInfo
    device: torch.device


def load_model(config: EngineConfig, folder: Path) -> LoadedModel:
    """Raises `UnsupportedModel`, or `ValueError` where the files or the device do not fit the settings."""
    device = choose_device(config)
    model_config = read_config(config, folder)
    check_config(model_config, model_class(model_config))
    attention.register()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config,
            dtype=config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
            attn_implementation=attention.NAME,
            # Never a pickle.
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ImportError) as error:
        raise ValueError(f"{folder}: {error}") from error
    model, report = loaded
    # transformers would go on with random weights.
    lacking = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if lacking:
        raise ValueError(f"{folder} lacks {len(lacking)} weights of {type(model).__name__}: {lacking[:3]}")
    model.eval().requires_grad_(False).to(device)
    if device.type == "cpu":
        use_kernels(model)
    return LoadedModel(model, _info(model, folder), device)


def choose_device(config: EngineConfig) -> torch.device:
    """Raises `ValueError` where CUDA is asked for and not there."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError("device: cuda, but torch finds no CUDA device")
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def read_config(config: EngineConfig, folder: Path) -> PreTrainedConfig:
    """The model's configuration. Raises `UnsupportedModel` where transformers knows no such model."""
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(
            f"{folder} cannot be read by transformers {transformers.__version__}: {error}"
        ) from error
    return found


def _info(model: PreTrainedModel, folder: Path) -> ModelInfo:
    return ModelInfo(
        model_digest=model_digest(folder),
        tokenizer_digest=tokenizer_digest(folder),
        vocab_size=model.config.vocab_size,
        max_context_tokens=model.config.max_position_embeddings,
        eos_token_ids=eos_token_ids(model),
    )


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """From the generation settings, else from the configuration; empty where neither says."""
    for source in (model.generation_config, model.config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset()
