"""Tiny random models of each family, and what transformers itself says about them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 97
WINDOW = 7


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny_config(family: str) -> PreTrainedConfig:
    """Three layers, heads in groups; random weights large enough that tokens differ clearly."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    alternating = ["sliding_attention", "full_attention", "sliding_attention"]
    match family:
        case "llama":
            return LlamaConfig(**sizes)
        case "llama-yarn":
            rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
            return LlamaConfig(**sizes, head_dim=16, rope_parameters={"rope_theta": 10000.0, **rope})
        case "qwen2":
            return Qwen2Config(**sizes)
        case "qwen3":
            return Qwen3Config(**sizes, head_dim=24)
        case "mistral":
            return MistralConfig(**sizes, head_dim=8, sliding_window=WINDOW)
        case "gemma2":
            return Gemma2Config(
                **sizes,
                head_dim=16,
                query_pre_attn_scalar=16,
                sliding_window=WINDOW,
                layer_types=alternating,
                attn_logit_softcapping=5.0,
            )
        case "gemma3":
            return Gemma3TextConfig(
                **sizes, head_dim=16, query_pre_attn_scalar=12, sliding_window=WINDOW, layer_types=alternating
            )
    raise ValueError(family)


def save_random(config: PreTrainedConfig, folder: Path, **settings: object) -> Path:
    """A model with random weights, and a tokenizer file that only has a fingerprint."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@dataclass(frozen=True)
class Answer:
    """tokens: prompt and greedy output. logits: [num_output, vocab_size], from which each was chosen."""

    tokens: list[int]
    logits: torch.Tensor


class Reference:
    """transformers' own attention on one sequence at a time, without a cache."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        self._answers: dict[tuple[int, ...], Answer] = {}

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size]"""
        return self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()

    def greedy(self, prompt: list[int], num_output: int) -> Answer:
        key = (num_output, *prompt)
        if key not in self._answers:
            tokens = list(prompt)
            for _ in range(num_output):
                tokens.append(int(self.logits(tokens)[-1].argmax()))
            self._answers[key] = Answer(tokens, self.logits(tokens[:-1])[len(prompt) - 1 :])
        return self._answers[key]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By family, the folder of a tiny model."""
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in folders:
            folders[family] = save_random(tiny_config(family), tmp_path_factory.mktemp(family))
        return folders[family]

    return get


@pytest.fixture(scope="session")
def reference(model_folder: Callable[[str], Path]) -> Callable[[str], Reference]:
    """By family, the same model in transformers."""
    references: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in references:
            references[family] = Reference(model_folder(family))
        return references[family]

    return get


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Path]:
    return save_random


@pytest.fixture(scope="session")
def config_of() -> Callable[[str], PreTrainedConfig]:
    return tiny_config
