"""What the command line shows as tables."""

from collections.abc import Sequence

from rich.table import Table

from kvferry.audit import RouterAudit
from kvferry.results import Moment, Pools, WorkerInfo


def moments_table(moments: Sequence[Moment]) -> Table:
    """The moments of a request: where each happened, when, and how long after the one before."""
    table = Table("moment", "worker")
    for heading in ("at", "took"):
        table.add_column(heading, justify="right")
    before_s = 0.0
    for moment in moments:
        took_ms = (moment.at_s - before_s) * 1000
        worker = moment.worker_id or "router"
        table.add_row(moment.name, worker, f"{moment.at_s * 1000:.1f} ms", f"{took_ms:.1f} ms")
        before_s = moment.at_s
    return table


def pools_table(pools: Pools) -> Table:
    """The workers of both pools."""
    title = f"{pools.model}: {pools.num_requests} requests, {pools.num_queued} of them queued"
    table = Table("worker", "role", title=title, title_justify="left")
    table.add_column("address", no_wrap=True)
    table.add_column("state", overflow="fold")
    for heading in ("waiting", "running", "blocks used"):
        table.add_column(heading, justify="right")
    for worker in sorted(pools.workers, key=_prefill_first):
        table.add_row(
            worker.worker_id,
            worker.role,
            worker.address,
            f"incompatible: {worker.incompatible}" if worker.incompatible else "ready",
            str(worker.num_waiting),
            str(worker.num_running),
            f"{worker.num_blocks - worker.num_free_blocks} of {worker.num_blocks}",
        )
    return table


def audit_table(audits: Sequence[RouterAudit]) -> Table:
    """Every live request of the routers, then what each worker holds and for whom."""
    table = Table("where", "request", "stage")
    table.add_column("held", overflow="fold")
    table.add_column("since", justify="right")
    for router in audits:
        for request in router.requests:
            on = f" on {request.decode_worker_id}" if request.decode_worker_id else ""
            tokens = f"{request.num_output_tokens} tokens{on}"
            since = f"{request.age_s:.1f} s"
            table.add_row(router.router_id, request.request_id, request.stage, tokens, since)
    # Routers over the same pools have the same workers.
    workers = {worker.worker_id: worker for router in audits for worker in router.workers}
    for name, worker in sorted(workers.items()):
        table.add_row(name, "", worker.error, f"{worker.num_free_blocks} of {worker.num_blocks} free", "")
        for held in worker.holdings:
            table.add_row(name, held.name, held.state, f"{held.num_blocks} blocks", f"{held.age_s:.1f} s")
    return table


def _prefill_first(worker: WorkerInfo) -> tuple[bool, str]:
    return worker.role != "prefill", worker.worker_id
