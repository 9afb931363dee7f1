"""One run of a deployment over a trace, in simulated time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.config import ConfigError, DeploymentConfig
from scheduling.allocator import BlockAllocator
from simulator.costs import Costs
from simulator.decode_worker import SimulatedDecodeWorker
from simulator.events import Events
from simulator.prefill_worker import SimulatedPrefillWorker
from simulator.request import SimulatedRequest
from simulator.router import SimulatedRouter
from simulator.traces import TraceRequest

# Requests between two words on how far it is.
_NUM_BETWEEN_WORDS = 1000


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it. requests: those that got all their tokens. The shares are over the whole run."""

    requests: list[SimulatedRequest]
    num_rejected: int
    span_s: float
    prefill_busy_share: float
    decode_busy_share: float
    num_preempted: int
    num_computed_tokens: int
    num_events: int


class Simulation:
    """A deployment as configured, before its first request. Runs once."""

    def __init__(
        self,
        config: DeploymentConfig,
        costs: Costs,
        *,
        max_steps_at_once: int = 2**31,
        progress: Callable[[str, float | None], None] = lambda _what, _share: None,
    ) -> None:
        """max_steps_at_once: as in `SimulatedDecodeWorker`. Raises ConfigError."""
        block_size = config.decode.engine.block_size
        if config.prefill.engine.block_size != block_size:
            raise ConfigError("prefill.engine.block_size: differs from decode.engine.block_size")
        self._events = Events()
        self._progress = progress
        self._requests: list[SimulatedRequest] = []
        self._block_size = block_size
        self._prefills = {
            f"prefill-{index}": SimulatedPrefillWorker(
                f"prefill-{index}",
                config.prefill,
                _num_blocks("prefill", config.prefill.engine.num_blocks),
                costs,
                self._events,
                lambda request: self._router.first_token(request),
                lambda request: self._router.landed(request),
            )
            for index in range(config.prefill.count)
        }
        self._decodes = {
            f"decode-{index}": SimulatedDecodeWorker(
                f"decode-{index}",
                config.decode,
                _num_blocks("decode", config.decode.engine.num_blocks),
                costs,
                self._events,
                lambda request: self._router.finished(request),
                max_steps_at_once=max_steps_at_once,
            )
            for index in range(config.decode.count)
        }
        self._router = SimulatedRouter(
            config.router, block_size, costs, self._events, self._prefills, self._decodes
        )

    def run(self, trace: Sequence[TraceRequest]) -> Result:
        """All requests, to the end of the last. `trace` is in order of arrival."""
        if trace:
            self._events.at(trace[0].at_s, lambda: self._arrive(trace, 0))
        self._events.run()
        for name, allocator in self._allocators():
            counts = allocator.counts
            assert counts.available == counts.total, f"{name} still holds {counts}"
        prefills, decodes = list(self._prefills.values()), list(self._decodes.values())
        done = [request for request in self._requests if request.finished_s < float("inf")]
        span_s = max((request.finished_s for request in done), default=0.0)
        whole_s = span_s or 1.0
        return Result(
            done,
            self._router.num_rejected,
            span_s,
            sum(worker.busy_s for worker in prefills) / len(prefills) / whole_s,
            sum(worker.busy_s for worker in decodes) / len(decodes) / whole_s,
            sum(worker.num_preempted for worker in decodes),
            sum(worker.num_computed_tokens for worker in prefills),
            self._events.num_handled,
        )

    def _allocators(self) -> Iterator[tuple[str, BlockAllocator]]:
        for prefill in self._prefills.values():
            yield prefill.worker_id, prefill.allocator
        for decode in self._decodes.values():
            yield decode.worker_id, decode.allocator

    def _arrive(self, trace: Sequence[TraceRequest], index: int) -> None:
        """One arrival is on the heap at a time, so that a long trace costs no more each."""
        if index % _NUM_BETWEEN_WORDS == 0:
            self._progress("simulating", index / len(trace))
        each = trace[index]
        request = SimulatedRequest(f"{index:09d}", each, each.hashes(self._block_size))
        self._requests.append(request)
        self._router.arrive(request)
        if index + 1 < len(trace):
            self._events.at(trace[index + 1].at_s, lambda: self._arrive(trace, index + 1))


def _num_blocks(pool: str, given: int | None) -> int:
    if given is None:
        raise ConfigError(f"{pool}.engine.num_blocks: a simulation needs it; no memory is measured")
    return given
