"""What simulated workers cost: a file of fitted cost models, or a published profile."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from scheduling.cost_model import CostModel, StepCost

# DistServe's simulator adds so much to a prefill step for each pipeline stage, and there is one.
_PUBLISHED_STAGE_S = 0.001


class CostsError(ValueError):
    """A file of costs that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Every worker of a pool costs the same.

    token_bytes: of KV, for the transfer. dispatch_s: from a request's arrival at the router until its prompt
    is in the prefill worker's queue. return_s: from the end of a step until the client has its token.
    """

    prefill: CostModel
    decode: CostModel
    token_bytes: int = 0
    dispatch_s: float = 0.0
    return_s: float = 0.0

    def __post_init__(self) -> None:
        if self.prefill.prefill is None:
            raise CostsError("prefill.prefill: what a prefill step costs is missing")
        if self.decode.decode is None:
            raise CostsError("decode.decode: what a decode step costs is missing")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From a file's content. Raises CostsError."""
        try:
            rest = {name: value for name, value in values.items() if name not in ("prefill", "decode")}
            prefill, decode = (CostModel.from_dict(values[name]) for name in ("prefill", "decode"))
            return cls(prefill, decode, **rest)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CostsError(f"no costs of prefill and decode workers: {error}") from error


def load(path: Path, model: str | None = None, prefill_tp: int = 1, decode_tp: int = 1) -> Costs:
    """Reads costs. With `model`, from a profile in DistServe's form, at these tensor-parallel degrees.

    Raises CostsError.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CostsError(f"{path}: {error}") from error
    try:
        if model is None:
            return Costs.from_dict(values)
        return Costs(_published(values, model, prefill_tp), _published(values, model, decode_tp))
    except CostsError as error:
        raise CostsError(f"{path}: {error}") from error


def _published(values: Mapping[str, Any], model: str, tensor_parallel: int) -> CostModel:
    """Milliseconds of [step, token, squared length], and of [step, context token, row]."""
    try:
        profile = values[model][str(tensor_parallel)]
        prefill, small, large = (
            profile[name] for name in ("prefill", "decoding_smallbs", "decoding_largebs")
        )
        return CostModel(
            StepCost(prefill[0] / 1000 + _PUBLISHED_STAGE_S, prefill[1] / 1000, prefill[2] / 1000),
            StepCost(small[0] / 1000, small[2] / 1000, small[1] / 1000),
            StepCost(large[0] / 1000, large[2] / 1000, large[1] / 1000),
            int(profile["decoding_large_small_bs_threshold"]),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise CostsError(f"no profile of {model} at TP {tensor_parallel}: {error} is missing") from error
