"""The router in simulated time: the real placement, and the real order of those that wait for room."""

from collections.abc import Mapping

from kvferry.config import RouterConfig
from scheduling.placement import Need, Placement
from scheduling.queue_policies import QUEUE_POLICIES
from scheduling.queue_policy import Ticket
from scheduling.sequence import blocks_for
from scheduling.shortlist import Shortlist
from simulator.costs import Costs
from simulator.decode_worker import SimulatedDecodeWorker
from simulator.events import Events
from simulator.prefill_worker import SimulatedPrefillWorker
from simulator.request import SimulatedRequest


class SimulatedRouter:
    """Places each request as it comes or queues it. Room is known at once; live it may take a heartbeat."""

    def __init__(
        self,
        config: RouterConfig,
        block_size: int,
        costs: Costs,
        events: Events,
        prefills: Mapping[str, SimulatedPrefillWorker],
        decodes: Mapping[str, SimulatedDecodeWorker],
    ) -> None:
        self.num_rejected = 0
        self._max_queued = config.max_queued
        self._queue_timeout_s = config.queue_timeout_s
        self._queue = QUEUE_POLICIES[config.policy]()
        self._waiting: dict[str, tuple[SimulatedRequest, Ticket]] = {}
        self._placement = Placement()
        self._block_size = block_size
        self._costs = costs
        self._events = events
        self._prefills = prefills
        self._decodes = decodes
        self._least_prefills = Shortlist(dict.fromkeys(prefills, 0.0))
        self._least_decodes = Shortlist(dict.fromkeys(decodes, 0.0))
        # By request: its workers, and the tokens that it counts for on the first.
        self._placed: dict[str, tuple[SimulatedPrefillWorker, SimulatedDecodeWorker, int]] = {}

    def arrive(self, request: SimulatedRequest) -> None:
        """A request has come."""
        trace = request.trace
        num_tokens = trace.num_prompt_tokens + trace.num_output_tokens
        fits = any(d.holds_ever(num_tokens) for d in self._decodes.values()) and any(
            blocks_for(trace.num_prompt_tokens, self._block_size) <= p.num_blocks
            for p in self._prefills.values()
        )
        if not fits:
            self.num_rejected += 1
            return
        if not self._waiting and self._place(request):
            return
        if len(self._waiting) >= self._max_queued:
            self.num_rejected += 1
            return
        ticket = Ticket(request.request_id, trace.num_prompt_tokens, self._events.now_s)
        self._queue.push(ticket)
        self._waiting[request.request_id] = request, ticket
        self._events.at(self._events.now_s + self._queue_timeout_s, lambda: self._give_up(request))

    def first_token(self, request: SimulatedRequest) -> None:
        """The prefill worker has computed a prompt."""
        prefill, decode, num_tokens = self._placed[request.request_id]
        request.first_token_s = self._events.now_s + self._costs.return_s
        prefill.num_dispatched_tokens -= num_tokens
        if request.trace.num_output_tokens == 1:
            request.finished_s = request.first_token_s
            prefill.num_requests -= 1
            decode.release(request)
            self._leave(request, decode)
        self._least_prefills.put(prefill.worker_id, prefill.num_dispatched_tokens)

    def landed(self, request: SimulatedRequest) -> None:
        """The decode worker has all blocks of a prompt."""
        prefill, decode, _ = self._placed[request.request_id]
        request.transfer_ended_s = self._events.now_s
        prefill.num_requests -= 1
        decode.complete(request)

    def finished(self, request: SimulatedRequest) -> None:
        """The decode worker has made the last token."""
        request.finished_s = self._events.now_s + self._costs.return_s
        self._leave(request, self._placed[request.request_id][1])

    def _leave(self, request: SimulatedRequest, decode: SimulatedDecodeWorker) -> None:
        del self._placed[request.request_id]
        decode.num_requests -= 1
        self._least_decodes.put(decode.worker_id, decode.num_requests / decode.num_blocks)
        while (turn := self._queue.first(self._events.now_s)) is not None:
            waiting, ticket = self._waiting[turn.ticket.request_id]
            if not self._place(waiting):
                return
            self._queue.charge(ticket, ticket.num_tokens)
            self._forget(ticket)

    def _give_up(self, request: SimulatedRequest) -> None:
        if request.request_id in self._waiting:
            self.num_rejected += 1
            self._forget(self._waiting[request.request_id][1])

    def _forget(self, ticket: Ticket) -> None:
        self._queue.remove(ticket.request_id)
        del self._waiting[ticket.request_id]

    def _place(self, request: SimulatedRequest) -> bool:
        """Asks the decode workers in order of placement. False: no room anywhere now."""
        num_tokens = request.trace.num_prompt_tokens
        hashes = request.hashes.of(range(num_tokens)) if request.hashes else []
        prefills = [self._prefills[name] for name in self._least_prefills.best()]
        decodes = [self._decodes[name] for name in self._least_decodes.best()]
        cached = {p.worker_id: p.num_cached_tokens(hashes, num_tokens) if hashes else 0 for p in prefills}
        pairs = self._placement.rank(
            [p.snapshot(cached[p.worker_id]) for p in prefills],
            [d.snapshot(len(d.allocator.cache.match(hashes)) if hashes else 0) for d in decodes],
            Need(
                num_tokens,
                blocks_for(num_tokens, self._block_size),
                blocks_for(num_tokens + request.trace.num_output_tokens, self._block_size),
            ),
        )
        for pair in pairs:
            decode = self._decodes[pair.decode_id]
            if decode.reserve(request, hashes):
                self._dispatch(
                    request, self._prefills[pair.prefill_id], decode, num_tokens - cached[pair.prefill_id]
                )
                return True
        return False

    def _dispatch(
        self,
        request: SimulatedRequest,
        prefill: SimulatedPrefillWorker,
        decode: SimulatedDecodeWorker,
        num_tokens: int,
    ) -> None:
        request.reserved_s = self._events.now_s
        decode.num_requests += 1
        prefill.num_requests += 1
        prefill.num_dispatched_tokens += num_tokens
        self._least_decodes.put(decode.worker_id, decode.num_requests / decode.num_blocks)
        self._least_prefills.put(prefill.worker_id, prefill.num_dispatched_tokens)
        self._placed[request.request_id] = prefill, decode, num_tokens

        def submit() -> None:
            if prefill.submit(request):
                return
            # Live the router would try the others, whose queues are no shorter: it chose the shortest.
            self.num_rejected += 1
            prefill.num_requests -= 1
            prefill.num_dispatched_tokens -= num_tokens
            self._least_prefills.put(prefill.worker_id, prefill.num_dispatched_tokens)
            decode.release(request)
            self._leave(request, decode)

        if self._costs.dispatch_s:
            self._events.at(self._events.now_s + self._costs.dispatch_s, submit)
        else:
            submit()
