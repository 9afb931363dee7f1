"""What a worker's steps and transfers cost, and what that means for a request.

    a prefill step   base + token * tokens + context * sum over chunks of (end^2 - start^2)
    a decode step    base + row * rows + context * context tokens of all rows
    a transfer       latency + bytes / bandwidth

A chunk of `n` tokens behind `start` others reads n * (start + end) = end^2 - start^2 keys, up to a factor
of two; over a prompt's chunks these add up to the square of its length. So chunks and whole prompts have one
form, which is the one that profiles were published in (DistServe: Zhong et al., OSDI'24).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class StepCost:
    """A kind of step. `unit`: a prompt token, or a decode row.

    error: mean of |predicted - measured| / measured of late. num_steps: measured so far; 0 for a cost that
    was given.
    """

    base_s: float
    unit_s: float
    context_s: float
    error: float = 0.0
    num_steps: int = 0

    def seconds(self, num_units: float, context: float) -> float:
        """How long a step takes. Published coefficients may be negative; a time is not."""
        return max(0.0, self.base_s + self.unit_s * num_units + self.context_s * context)


@dataclass(frozen=True, slots=True)
class TransferCost:
    """From one prefill worker to one decode worker."""

    latency_s: float
    byte_s: float
    error: float = 0.0
    num_transfers: int = 0

    def seconds(self, num_bytes: float) -> float:
        """How long so many bytes take."""
        return self.latency_s + self.byte_s * num_bytes


@dataclass(frozen=True, slots=True)
class CostModel:
    """One worker. None: it has not run such a step yet.

    large_decode: takes the place of `decode` from `large_batch` rows on. transfers: by decode worker.
    """

    prefill: StepCost | None = None
    decode: StepCost | None = None
    large_decode: StepCost | None = None
    large_batch: int = 0
    transfers: Mapping[str, TransferCost] = field(default_factory=dict)

    def prefill_s(self, num_tokens: int, num_cached: int = 0, max_step_tokens: int | None = None) -> float:
        """Seconds to compute a prompt behind its `num_cached` first tokens, alone, in chunks if so given.

        0 while nothing is known, as for the other times here.
        """
        if self.prefill is None or num_tokens <= num_cached:
            return 0.0
        num_new = num_tokens - num_cached
        num_steps = -(-num_new // max_step_tokens) if max_step_tokens else 1
        once_s = self.prefill.seconds(num_new, num_tokens**2 - num_cached**2)
        return once_s + (num_steps - 1) * max(0.0, self.prefill.base_s)

    def decode_s(self, num_rows: int, num_context_tokens: int) -> float:
        """Seconds of a step of so many rows that together read so many tokens; 0 for no rows."""
        if num_rows == 0:
            return 0.0
        is_large = self.large_decode is not None and num_rows >= self.large_batch
        cost = self.large_decode if is_large else self.decode
        return 0.0 if cost is None else cost.seconds(num_rows, num_context_tokens)

    def transfer_s(self, decode_id: str, num_bytes: int) -> float:
        """Seconds to move so many bytes to a decode worker; as to the others, where it is not known."""
        if cost := self.transfers.get(decode_id):
            return cost.seconds(num_bytes)
        known = [each.seconds(num_bytes) for each in self.transfers.values()]
        return sum(known) / len(known) if known else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From `as_dict`. Raises TypeError, ValueError or KeyError for what is none."""
        steps = {
            name: StepCost(**values[name]) if values.get(name) else None
            for name in ("prefill", "decode", "large_decode")
        }
        transfers = {name: TransferCost(**cost) for name, cost in values.get("transfers", {}).items()}
        return cls(**steps, large_batch=int(values.get("large_batch", 0)), transfers=transfers)


@dataclass(frozen=True, slots=True)
class PairLoad:
    """What a request would meet on a pair of workers.

    num_pending_tokens: prompt tokens before its own on the prefill worker. num_pending_requests: prompts
    they belong to. max_step_tokens: of a prefill step. num_rows, num_context_tokens: of the decode worker's
    batch without it. room_s: until the decode worker has blocks for it; 0 where it has them now.
    """

    num_pending_tokens: int = 0
    num_pending_requests: int = 0
    max_step_tokens: int | None = None
    num_rows: int = 0
    num_context_tokens: int = 0
    room_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """A request's times, in seconds. The first token comes from the prefill worker, before the transfer."""

    room_s: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_queue_s: float
    first_step_s: float
    tpot_s: float

    @property
    def ttft_s(self) -> float:
        """Until the client sees the first token."""
        return self.room_s + self.queue_s + self.prefill_s

    @property
    def second_token_s(self) -> float:
        """Until the second token, the decode worker's first."""
        return self.ttft_s + self.transfer_s + self.decode_queue_s + self.first_step_s


def predict(
    prefill: CostModel,
    decode: CostModel,
    decode_id: str,
    load: PairLoad,
    *,
    num_prompt_tokens: int,
    num_cached_tokens: int = 0,
    num_transfer_bytes: int = 0,
    num_output_tokens: int = 0,
) -> Prediction:
    """What a request comes to on a pair of workers, as far as their costs are known.

    num_transfer_bytes: what is still to go when the prompt is computed, its last chunk's. num_output_tokens:
    expected; the context grows by half of them in the mean. Prompts that wait count as of equal lengths.
    """
    context = load.num_context_tokens + num_prompt_tokens
    num_rows = load.num_rows + 1
    queue_s = 0.0
    if load.num_pending_tokens and prefill.prefill is not None:
        num_requests = max(1, load.num_pending_requests)
        mean_tokens = load.num_pending_tokens / num_requests
        num_steps = -(-load.num_pending_tokens // load.max_step_tokens) if load.max_step_tokens else 1
        queue_s = prefill.prefill.seconds(load.num_pending_tokens, num_requests * mean_tokens**2)
        queue_s += (num_steps - 1) * max(0.0, prefill.prefill.base_s)
    return Prediction(
        room_s=load.room_s,
        queue_s=queue_s,
        prefill_s=prefill.prefill_s(num_prompt_tokens, num_cached_tokens, load.max_step_tokens),
        transfer_s=prefill.transfer_s(decode_id, num_transfer_bytes),
        # It joins between two steps, so half of the one that runs is left.
        decode_queue_s=decode.decode_s(load.num_rows, load.num_context_tokens) / 2,
        first_step_s=decode.decode_s(num_rows, context),
        tpot_s=decode.decode_s(num_rows, context + num_rows * num_output_tokens // 2),
    )
