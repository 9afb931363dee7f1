"""Which models cannot run here, told from their configuration before any weight is read."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# The frequencies of these follow the longest sequence of a batch, so requests would change one another.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class UnsupportedModel(ValueError):
    """A model that this engine cannot run; the message names it and says why."""


def refuse(config: PreTrainedConfig, reason: str) -> UnsupportedModel:
    """The exception to raise."""
    names = getattr(config, "architectures", None) or [config.model_type]
    return UnsupportedModel(f"{names[0]} cannot be served: {reason}")


def check_config(config: PreTrainedConfig, model_class: type[PreTrainedModel] | None) -> None:
    """Raises `UnsupportedModel`. `model_class`: None where it comes with the model and is not known yet."""
    for reason in _reasons(config, model_class):
        raise refuse(config, reason)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The causal language model that transformers has for `config`, if it has one."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def _reasons(config: PreTrainedConfig, model: type[PreTrainedModel] | None) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder model"
    if config.get_text_config() is not config:
        yield "it is a multimodal model; only plain causal text models are"
    if model is None and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        yield "transformers has no causal language model of this kind"
    if model is not None and model._is_stateful:
        yield "it has recurrent layers (state space or linear attention), whose state is not in the KV cache"
    layer_types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if layer_types:
        yield f"it has layers of type {', '.join(sorted(layer_types))}"
    if model is not None and not model._supports_attention_backend:
        yield "its attention does not go through transformers' attention interface"
    if getattr(config, "kv_lora_rank", None):
        yield "it has latent attention (MLA), with keys and values of different sizes"
    if getattr(config, "use_bidirectional_attention", None):
        yield "its attention is bidirectional"
    for kind in sorted(set(_rope_types(config)) & _BATCH_DEPENDENT_ROPE):
        yield f"its rotary embedding is of type {kind}, which depends on what else is in the batch"
    if not getattr(config, "max_position_embeddings", None):
        yield "its configuration states no context length (max_position_embeddings)"


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """Of the whole model, or of each layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters: Any = getattr(config, name, None)
        if not isinstance(parameters, Mapping):
            continue
        for part in (parameters, *parameters.values()):
            if isinstance(part, Mapping):
                yield str(part.get("rope_type") or part.get("type") or "default")
