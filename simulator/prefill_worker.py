"""A prefill worker in simulated time: the real scheduler and blocks; a step takes what its cost says."""

from collections.abc import Callable

from kvferry.config import PrefillConfig
from scheduling.allocator import BlockAllocator
from scheduling.cost_model import TransferCost
from scheduling.placement import PrefillSnapshot
from scheduling.prefill import PrefillScheduler
from scheduling.queue_policies import QUEUE_POLICIES
from scheduling.sequence import Scheduled, Sequence
from simulator.costs import Costs
from simulator.events import Events
from simulator.request import SimulatedRequest

OnMoment = Callable[[SimulatedRequest], None]


class SimulatedPrefillWorker:
    """Its blocks leave over one link, a chunk's as soon as it is computed, one chunk after another.

    num_requests, num_dispatched_tokens: as the router counts them.
    """

    def __init__(
        self,
        worker_id: str,
        config: PrefillConfig,
        num_blocks: int,
        costs: Costs,
        events: Events,
        on_first_token: OnMoment,
        on_landed: OnMoment,
    ) -> None:
        assert costs.prefill.prefill is not None
        self.worker_id = worker_id
        self.busy_s = 0.0
        self.num_computed_tokens = 0
        self.num_requests = 0
        self.num_dispatched_tokens = 0
        self.num_blocks = num_blocks
        self.allocator = BlockAllocator(num_blocks)
        self._block_size = config.engine.block_size
        self.scheduler = PrefillScheduler(
            self.allocator,
            self._block_size,
            config.max_step_tokens,
            config.max_waiting,
            QUEUE_POLICIES[config.policy](),
        )
        self._cost = costs.prefill.prefill
        transfers = list(costs.prefill.transfers.values())
        self._transfer = TransferCost(
            sum(each.latency_s for each in transfers) / max(1, len(transfers)),
            sum(each.byte_s for each in transfers) / max(1, len(transfers)),
        )
        self._token_bytes = costs.token_bytes
        self._events = events
        self._on_first_token = on_first_token
        self._on_landed = on_landed
        self._requests: dict[str, SimulatedRequest] = {}
        self._step: list[Scheduled] = []
        self._link_free_s = 0.0

    def num_cached_tokens(self, hashes: list[bytes], num_prompt_tokens: int) -> int:
        """Of a prompt, which it would not have to compute; the last one it always does."""
        num_held = len(self.allocator.cache.match(hashes))
        return min(num_held, (num_prompt_tokens - 1) // self._block_size) * self._block_size

    def snapshot(self, num_cached_tokens: int) -> PrefillSnapshot:
        """Its load for placement, as the router knows it."""
        return PrefillSnapshot(
            self.worker_id,
            None,
            self.num_dispatched_tokens,
            self.num_requests,
            self.num_blocks,
            num_cached_tokens,
        )

    def submit(self, request: SimulatedRequest) -> bool:
        """Queues a prompt. False: the queue is full."""
        num_tokens = request.trace.num_prompt_tokens
        sequence = Sequence(
            request.request_id, [0] * num_tokens, num_tokens, 0, self._events.now_s, hashes=request.hashes
        )
        if not self.scheduler.add(sequence):
            return False
        self._requests[request.request_id] = request
        self._start_step()
        return True

    def _start_step(self) -> None:
        if self._step:
            return
        now_s = self._events.now_s
        self._step = self.scheduler.schedule(now_s)
        if not self._step:
            return
        num_tokens = squares = 0
        for chunk in self._step:
            num_tokens += chunk.end - chunk.start
            squares += chunk.end**2 - chunk.start**2
            request = self._requests[chunk.sequence.request_id]
            request.prefill_started_s = min(request.prefill_started_s, now_s)
        seconds = self._cost.seconds(num_tokens, squares)
        self.busy_s += seconds
        self.num_computed_tokens += num_tokens
        self._events.at(now_s + seconds, self._end_step)

    def _end_step(self) -> None:
        step, self._step = self._step, []
        self.scheduler.advance(step)
        for chunk in step:
            num_bytes = (chunk.end - chunk.start) * self._token_bytes
            begins_s = max(self._link_free_s, self._events.now_s)
            self._link_free_s = begins_s + self._transfer.byte_s * num_bytes
            if chunk.is_last:
                self._finish(self._requests.pop(chunk.sequence.request_id))
        self._start_step()

    def _finish(self, request: SimulatedRequest) -> None:
        self._on_first_token(request)
        if request.trace.num_output_tokens == 1:
            self.allocator.free(request.request_id)
            return

        def landed() -> None:
            self.allocator.free(request.request_id)
            self._on_landed(request)
            self._start_step()

        self._events.at(self._link_free_s + self._transfer.latency_s, landed)
