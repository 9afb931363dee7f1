"""The workers that have joined, which of them fit together, and how a pair is chosen for a request."""

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterator

from kvferry.v1 import common_pb2, registry_pb2
from router.errors import InvalidRequest, Unavailable, WorkerLost
from router.prefix_index import PromptBlocks
from router.worker import Worker, group_of
from rpc.channel import Channels
from scheduling import compatibility
from scheduling.placement import Need, Placement, fits_never

logger = logging.getLogger(__name__)


class Registry:
    """All workers by name. A worker that registers again replaces its former incarnation."""

    def __init__(self, model_name: str, tokenizer_digest: str, on_change: Callable[[], None]) -> None:
        """`on_change` is called whenever there may be more room than before."""
        self.channels = Channels()
        self._model_name = model_name
        self._tokenizer_digest = tokenizer_digest
        self._on_change = on_change
        self._placement = Placement()
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(sorted(self._workers.values(), key=lambda w: w.worker_id))

    def add(self, registration: registry_pb2.Registration) -> Worker:
        """Registers a worker."""
        worker = Worker(registration, group_of(registration.capabilities))
        worker.reported_s = asyncio.get_running_loop().time()
        if former := self._workers.get(worker.worker_id):
            self.remove(former, f"{worker.worker_id} was replaced by a newer incarnation")
        self._workers[worker.worker_id] = worker
        logger.info("%s joined at %s", worker.worker_id, registration.address)
        self._update_standings()
        return worker

    def remove(self, worker: Worker, why: str) -> None:
        """Forgets a worker whose stream has ended; its requests are told. Harmless when repeated."""
        if self._workers.get(worker.worker_id) is not worker:
            return
        del self._workers[worker.worker_id]
        logger.warning("%s left: %s", worker.worker_id, why)
        worker.lost = why
        worker.news_for_it.set()
        for inbox in worker.inboxes.values():
            inbox.put(WorkerLost(f"decode worker {worker.worker_id} was lost: {why}"))
        for call in worker.calls:
            call.cancel()
        self._update_standings()

    def report(self, worker: Worker, load: registry_pb2.LoadReport) -> None:
        """Takes a worker's newest load."""
        worker.take_report(load, asyncio.get_running_loop().time())
        self._on_change()

    def rank(self, need: Need, prompt: PromptBlocks) -> list[tuple[Worker, Worker]]:
        """The (prefill, decode) pairs to try for a request, best first.

        Raises `Unavailable` where no pair fits together, `InvalidRequest` where none can ever hold it.
        """
        if reason := self.why_no_pair():
            raise Unavailable(reason)
        prefills = [w.prefill_snapshot(prompt) for w in self._usable(prefill=True)]
        decodes = [w.decode_snapshot(prompt) for w in self._usable(prefill=False)]
        if fits_never(prefills, decodes, need):
            raise InvalidRequest(
                "max_tokens",
                f"the prompt and the tokens asked for take {need.num_max_blocks} KV blocks, more than any "
                "pair of workers has; ask for fewer tokens or shorten the prompt",
            )
        pairs = self._placement.rank(prefills, decodes, need)
        return [(self._workers[pair.prefill_id], self._workers[pair.decode_id]) for pair in pairs]

    def best_prefill(
        self, group: Hashable, need: Need, prompt: PromptBlocks, tried: set[str]
    ) -> Worker | None:
        """The prefill worker for a request that has its decode worker already."""
        candidates = [
            w.prefill_snapshot(prompt)
            for w in self._usable(prefill=True)
            if w.group == group and w.worker_id not in tried
        ]
        ranked = self._placement.rank_prefills(candidates, need)
        return self._workers[ranked[0].worker_id] if ranked else None

    def block_size(self) -> int | None:
        """Of the workers in use; None while there are none."""
        return next((w.registration.capabilities.block_size for w in self._usable(prefill=False)), None)

    def max_tokens(self) -> int | None:
        """Most tokens of prompt and output that a decode worker can hold; None while there are none."""
        sizes = [w.registration.capabilities for w in self._usable(prefill=False)]
        return max((c.num_blocks * c.block_size for c in sizes), default=None)

    def why_no_pair(self) -> str:
        """Empty when a compatible pair has joined, else the reason."""
        for prefill in self._usable(prefill=True):
            if any(d.group == prefill.group for d in self._usable(prefill=False)):
                return ""
        missing = [
            f"no {name} worker has joined"
            for name, is_prefill in (("prefill", True), ("decode", False))
            if not any(w.is_prefill == is_prefill for w in self)
        ]
        reasons = [f"{w.worker_id} is not used: {w.incompatible}" for w in self if w.incompatible]
        return "; ".join(missing + reasons)

    def _usable(self, *, prefill: bool) -> list[Worker]:
        return [w for w in self._workers.values() if w.is_prefill == prefill and not w.incompatible]

    def _update_standings(self) -> None:
        for worker in self._workers.values():
            reason = self._why_unusable(worker)
            if reason != worker.incompatible:
                worker.incompatible = reason
                worker.news_for_it.set()
                if reason:
                    logger.warning("%s is not used: %s", worker.worker_id, reason)
        self._on_change()

    def _why_unusable(self, worker: Worker) -> str:
        capabilities = worker.registration.capabilities
        if worker.registration.role not in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE):
            return f"role: {worker.registration.role} is neither prefill nor decode"
        for name, ours in (("model", self._model_name), ("tokenizer_digest", self._tokenizer_digest)):
            if getattr(capabilities, name) != ours:
                return f"{name}: {getattr(capabilities, name)} here, {ours} on the router"
        others = [w for w in self._workers.values() if w.is_prefill != worker.is_prefill]
        if not others or any(w.group == worker.group for w in others):
            return ""
        differences = [(compatibility.mismatches(worker.capabilities(), w.capabilities()), w) for w in others]
        fewest, nearest = min(differences, key=lambda difference: len(difference[0]))
        return ", ".join(fewest).replace("there", f"on {nearest.worker_id}")
