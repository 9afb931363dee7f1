"""Who holds what in a deployment, and the law that nothing is held but by a live request.

A router tells its requests and what each of its workers holds. A worker serves several routers, and knows
which one each request came from: what belongs to a router that was not asked is nobody's fault here.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvferry.v1 import admin_pb2

# Between a request's id and the number of a later attempt at it, in the names that workers know.
ATTEMPT_MARK = "~"
# What has just ended is on its way back for so long at most, and no culprit.
SETTLE_S = 1.0
ASK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request in a router: where it stands, and on which decode worker ("" before it has one)."""

    request_id: str
    stage: str
    age_s: float
    decode_worker_id: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Holding:
    """What a worker holds under one name. router_id: "" where the worker knows the request no more."""

    name: str
    state: str
    num_blocks: int
    age_s: float
    router_id: str

    @property
    def request_id(self) -> str:
        """The router's id of the request; a later attempt at it has a name of its own."""
        return self.name.partition(ATTEMPT_MARK)[0]


@dataclass(frozen=True, slots=True)
class WorkerAudit:
    """What one worker holds. error: why it did not say. num_lost_blocks: taken, and held by no name.

    num_requests: those that the router counts as being on it.
    """

    worker_id: str
    epoch: int
    holdings: tuple[Holding, ...]
    num_blocks: int
    num_free_blocks: int
    num_lost_blocks: int
    num_requests: int
    error: str


@dataclass(frozen=True, slots=True)
class RouterAudit:
    """One router's live requests and its workers' holdings, of one moment."""

    router_id: str
    requests: tuple[LiveRequest, ...]
    workers: tuple[WorkerAudit, ...]


@dataclass(frozen=True, slots=True)
class Culprit:
    """What is held by no live request: where, under which name, and what it is."""

    where: str
    name: str
    what: str


def to_router_audit(response: admin_pb2.AuditDeploymentResponse) -> RouterAudit:
    """The audit in a message."""
    requests = tuple(
        LiveRequest(r.request_id, r.stage, r.age_s, r.decode_worker_id, r.num_output_tokens)
        for r in response.requests
    )
    return RouterAudit(response.router_id, requests, tuple(_worker(w) for w in response.workers))


def _worker(audit: admin_pb2.WorkerAudit) -> WorkerAudit:
    blocks = audit.held.blocks
    holdings = tuple(
        Holding(h.request_id, h.state, h.num_blocks, h.age_s, h.router_id) for h in audit.held.holdings
    )
    num_taken = blocks.total - blocks.free - blocks.cached
    has_owner = any(h.num_blocks for h in holdings)
    return WorkerAudit(
        worker_id=audit.worker_id,
        epoch=audit.epoch,
        holdings=holdings,
        num_blocks=blocks.total,
        num_free_blocks=blocks.free + blocks.cached,
        num_lost_blocks=0 if has_owner else num_taken,
        num_requests=audit.num_requests,
        error=audit.error,
    )


def culprits(audits: Sequence[RouterAudit]) -> list[Culprit]:
    """All that breaks the law in these routers' audits, each once.

    What has just ended is on its way back: only what is there for a while is at fault, see `settled`.
    """
    found: dict[Culprit, None] = {}
    live = {router.router_id: {r.request_id for r in router.requests} for router in audits}
    for router in audits:
        for worker in router.workers:
            found |= dict.fromkeys(_of_worker(worker, live))
            if worker.num_requests and not router.requests:
                what = f"{worker.num_requests} requests are counted on {worker.worker_id}, and none is live"
                found[Culprit(router.router_id, "", what)] = None
    return list(found)


def _of_worker(worker: WorkerAudit, live: dict[str, set[str]]) -> Iterable[Culprit]:
    where = f"{worker.worker_id} (epoch {worker.epoch})"
    if worker.error:
        yield Culprit(where, "", f"does not answer: {worker.error}")
    if worker.num_lost_blocks:
        yield Culprit(where, "", f"{worker.num_lost_blocks} blocks are held under no name")
    for held in worker.holdings:
        is_others = bool(held.router_id) and held.router_id not in live
        if not is_others and held.request_id not in _live_of(held, live):
            whose = held.router_id or "no known router"
            yield Culprit(where, held.name, f"{held.num_blocks} blocks in state {held.state}, of {whose}")


def _live_of(held: Holding, live: dict[str, set[str]]) -> set[str]:
    """The live requests among which a holding's must be."""
    return live[held.router_id] if held.router_id else set()


def settled(
    ask: Callable[[], Sequence[RouterAudit]], settle_s: float
) -> tuple[Sequence[RouterAudit], list[Culprit]]:
    """The last of several audits, and what broke the law in each of them, over `settle_s` at least."""
    audits = ask()
    found = culprits(audits)
    end_s = time.monotonic() + settle_s
    while found and time.monotonic() < end_s:
        time.sleep(min(ASK_AGAIN_S, settle_s))
        audits = ask()
        found = lasting(found, culprits(audits))
    return audits, found


def lasting(earlier: Iterable[Culprit], now: Iterable[Culprit]) -> list[Culprit]:
    """Those that were there before, whatever their state has become."""
    known = {(culprit.where, culprit.name) for culprit in earlier}
    return [culprit for culprit in now if (culprit.where, culprit.name) in known]
