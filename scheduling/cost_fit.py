"""Learns a worker's cost model from its own steps and transfers, as they happen."""

from collections.abc import Sequence

from scheduling.cost_model import CostModel, StepCost, TransferCost
from scheduling.online_fit import OnlineFit
from scheduling.sequence import Scheduled

# Pairs whose transfers are remembered: more decode workers than one prefill worker deals with at a time.
_MAX_PAIRS = 256


class CostFit:
    """One worker's. Steps that mix prompt chunks and decode rows tell neither's cost and are passed by."""

    def __init__(self) -> None:
        self._prefill = OnlineFit(3)
        self._decode = OnlineFit(3)
        self._transfers: dict[str, OnlineFit] = {}

    def observe_step(self, scheduled: Sequence[Scheduled], seconds: float) -> None:
        """A step of this work took so long."""
        num_rows = sum(is_decode_row(work) for work in scheduled)
        if num_rows == 0:
            num_tokens = sum(work.end - work.start for work in scheduled)
            squares = sum(work.end**2 - work.start**2 for work in scheduled)
            self._prefill.observe((1, num_tokens, squares), seconds)
        elif num_rows == len(scheduled):
            self._decode.observe((1, num_rows, sum(work.end for work in scheduled)), seconds)

    def observe_transfer(self, decode_id: str, num_bytes: int, seconds: float) -> None:
        """So many bytes took so long to reach a decode worker."""
        if decode_id not in self._transfers and len(self._transfers) >= _MAX_PAIRS:
            del self._transfers[next(iter(self._transfers))]
        self._transfers.setdefault(decode_id, OnlineFit(2)).observe((1, num_bytes), seconds)

    @property
    def model(self) -> CostModel:
        """As of now."""
        return CostModel(
            prefill=_step_cost(self._prefill),
            decode=_step_cost(self._decode),
            transfers={decode_id: _transfer_cost(fit) for decode_id, fit in self._transfers.items()},
        )


def is_decode_row(work: Scheduled) -> bool:
    """Whether it computes one token of output, and not a piece of a prompt."""
    return work.end - work.start == 1 and work.start >= work.sequence.num_prompt_tokens


def _step_cost(fit: OnlineFit) -> StepCost | None:
    if fit.num_observations == 0:
        return None
    base_s, unit_s, context_s = fit.coefficients
    return StepCost(base_s, unit_s, context_s, fit.error, fit.num_observations)


def _transfer_cost(fit: OnlineFit) -> TransferCost:
    latency_s, byte_s = fit.coefficients
    return TransferCost(latency_s, byte_s, fit.error, fit.num_observations)
