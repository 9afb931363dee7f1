"""What a worker tells of its memory: to its routers at every heartbeat, and to whoever audits it."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import NamedTuple

from kvferry.v1 import admin_pb2, common_pb2, registry_pb2
from scheduling.allocator import BlockAllocator
from scheduling.block_feed import BlockChanges


class Held(NamedTuple):
    """A request that is known here. arrived_s: on the event loop's clock. router_id: whose it is."""

    state: str
    arrived_s: float
    router_id: str


def load_report(
    allocator: BlockAllocator,
    changes: BlockChanges | None,
    counters: Mapping[str, float],
    *,
    num_waiting: int,
    num_running: int,
    num_pending_tokens: int = 0,
) -> registry_pb2.LoadReport:
    """`changes`: what has happened to cached blocks since the router was last told."""
    return registry_pb2.LoadReport(
        blocks=_block_counts(allocator),
        num_waiting=num_waiting,
        num_running=num_running,
        num_pending_tokens=num_pending_tokens,
        counters={**counters, "blocks_evicted": allocator.cache.num_evictions},
        block_changes=None if changes is None else registry_pb2.BlockChanges(**asdict(changes)),
    )


def audit(allocator: BlockAllocator, requests: Mapping[str, Held]) -> admin_pb2.AuditResponse:
    """Everything that is held, after the conservation law was checked.

    requests: those that are known. What is held by none of them is on its way back.
    """
    allocator.check()
    now_s = asyncio.get_running_loop().time()
    held = allocator.holdings()
    holdings = []
    for request_id in sorted({*held, *requests}):
        state, arrived_s, router_id = requests.get(request_id, Held("FREEING", now_s, ""))
        num_blocks = held[request_id][1] if request_id in held else 0
        holdings.append(
            admin_pb2.Holding(
                request_id=request_id,
                state=state,
                num_blocks=num_blocks,
                age_s=now_s - arrived_s,
                router_id=router_id,
            )
        )
    return admin_pb2.AuditResponse(blocks=_block_counts(allocator), holdings=holdings)


def _block_counts(allocator: BlockAllocator) -> common_pb2.BlockCounts:
    return common_pb2.BlockCounts(**asdict(allocator.counts))
