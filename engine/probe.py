"""Tries a loaded model out before it serves anyone: what its configuration cannot tell is seen here.

1. `measure` runs two tokens with a step that only writes down what each layer hands to attention.
2. `check` runs a few tokens over a cache of its own: two sequences in one batch, one of them in two
   chunks, and compares with the model's own attention on each sequence alone. State outside the KV
   cache, positions that leak between sequences and attention that we compute differently all show.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from engine.attention import NAME, AttentionBackend, PagedStep, Step, compute_logits
from engine.batch import Batch
from engine.cache import BlockShape, KVCache
from engine.engine import Chunk
from engine.refusal import UnsupportedModel, refuse
from kvferry.sampling import SamplingParams

_NUM_TOKENS = 12
# Largest difference of logits, relative to their size. In 16 bits other orders of summation show.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.25, torch.bfloat16: 0.25}


@dataclass(frozen=True, slots=True)
class LayerUse:
    """What one layer hands to attention."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int
    softcap: float


@dataclass(frozen=True, slots=True)
class _Recorder:
    layers: dict[int, LayerUse] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        del scale
        self.calls.append(layer)
        self.layers[layer] = LayerUse(
            key.shape[1], key.shape[3], value.shape[3], value.dtype, window, softcap
        )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def measure(model: PreTrainedModel, block_size: int) -> tuple[BlockShape, bool]:
    """The shape of a block for `model`, and whether it uses a softcap. Raises `UnsupportedModel`."""
    recorder = _Recorder()
    _forward(model, [_chunk(model, 0, 0, 2, [0, 1])], 1, recorder)
    num_layers = model.config.num_hidden_layers
    if sorted(recorder.calls) != list(range(num_layers)):
        raise refuse(
            model.config,
            f"of its {num_layers} layers {sorted(set(recorder.calls))} have attention that goes through "
            "transformers' attention interface once",
        )
    uses = {(use.num_kv_heads, use.key_dim, use.value_dim, use.dtype) for use in recorder.layers.values()}
    if len(uses) > 1:
        raise refuse(model.config, "its layers differ in their number or size of key heads")
    num_kv_heads, key_dim, value_dim, dtype = uses.pop()
    if key_dim != value_dim:
        raise refuse(model.config, f"its keys have {key_dim} elements a head, its values {value_dim}")
    _check_windows(model, [recorder.layers[layer].window for layer in range(num_layers)])
    softcap = any(use.softcap for use in recorder.layers.values())
    return BlockShape(num_layers, block_size, num_kv_heads, key_dim, dtype), softcap


def _check_windows(model: PreTrainedModel, windows: list[int]) -> None:
    """Some models put their window into the mask alone, which is not made for us."""
    config = model.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        wanted = [kind == "sliding_attention" for kind in layer_types]
    else:
        window = getattr(config, "sliding_window", None) or 0
        used = getattr(config, "use_sliding_window", True) and window < config.max_position_embeddings
        if not used:
            return
        wanted = [window > 0] * len(windows)
    if [window > 0 for window in windows] != wanted:
        raise refuse(config, "its layers do not tell attention of their sliding window")


def check(model: PreTrainedModel, backend: AttentionBackend, shape: BlockShape) -> None:
    """Raises `UnsupportedModel` where the model computes something else on the real path than alone."""
    num_blocks = -(-_NUM_TOKENS // shape.block_size)
    tables = [list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))]
    cache = KVCache(shape, 2 * num_blocks, model.device)

    def run(*chunks: Chunk) -> torch.Tensor:
        step = PagedStep(cache, backend, Batch.pack(chunks, shape.block_size, model.device))
        logits = _compute(model, step.batch, step)
        if sorted(step.layers) != list(range(shape.num_layers)):
            raise refuse(model.config, "its layers do not each attend once a step")
        return logits

    half = _NUM_TOKENS // 2
    whole, first = run(
        _chunk(model, 0, 0, _NUM_TOKENS, tables[0]),
        _chunk(model, 1, 0, half, tables[1]),
    )
    second = run(_chunk(model, 1, half, _NUM_TOKENS, tables[1]))[0]
    alone = [_own_logits(model, _tokens(model, number)) for number in (0, 1)]
    _compare(model, "packed with another sequence", whole, alone[0][-1])
    _compare(model, "packed with another sequence", first, alone[1][half - 1])
    _compare(model, "in two chunks against the cache", second, alone[1][-1])


def _compare(model: PreTrainedModel, how: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    difference = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    # Also refuses NaN.
    if not difference <= _TOLERANCE[model.dtype]:
        raise refuse(
            model.config,
            f"computed {how} its logits differ by {difference:.1%} from those it computes itself",
        )


def _own_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """[num_tokens, vocab_size] by the model's own attention."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
            logits: torch.Tensor = output.logits[0]
            return logits
    finally:
        model.set_attn_implementation(NAME)


def _tokens(model: PreTrainedModel, number: int) -> list[int]:
    """Any tokens will do, if the two sequences differ."""
    size = model.config.vocab_size
    return [(1 + 7919 * (i + 1) * (number + 1)) % size for i in range(_NUM_TOKENS)]


def _chunk(model: PreTrainedModel, number: int, start: int, end: int, table: Sequence[int]) -> Chunk:
    tokens = _tokens(model, number)
    return Chunk(tokens, start, end, table, num_prompt_tokens=len(tokens), sampling=SamplingParams())


def _forward(model: PreTrainedModel, chunks: Sequence[Chunk], block_size: int, step: Step) -> torch.Tensor:
    return _compute(model, Batch.pack(chunks, block_size, model.device), step)


def _compute(model: PreTrainedModel, batch: Batch, step: Step) -> torch.Tensor:
    try:
        with torch.inference_mode():
            return compute_logits(model, batch, step)
    except UnsupportedModel as error:
        raise refuse(model.config, str(error)) from error
    except TypeError as error:
        raise refuse(model.config, f"its forward does not take what a step needs: {error}") from error
