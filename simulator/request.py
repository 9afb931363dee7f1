"""A request on its way through the simulated deployment."""

from dataclasses import dataclass, field

from scheduling.block_hash import BlockHashes
from simulator.traces import TraceRequest


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Its moments, in simulated seconds; infinite for those that have not come."""

    request_id: str
    trace: TraceRequest
    hashes: BlockHashes | None
    reserved_s: float = field(default=float("inf"))
    prefill_started_s: float = field(default=float("inf"))
    first_token_s: float = field(default=float("inf"))
    transfer_ended_s: float = field(default=float("inf"))
    decode_started_s: float = field(default=float("inf"))
    finished_s: float = field(default=float("inf"))

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.trace.at_s

    @property
    def tpot_s(self) -> float:
        """Between tokens after the first, in the mean; 0 where there are none."""
        num_gaps = self.trace.num_output_tokens - 1
        return (self.finished_s - self.first_token_s) / num_gaps if num_gaps else 0.0

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self.finished_s - self.trace.at_s
