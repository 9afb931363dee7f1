"""A worker as the router knows it: what it said of itself, its load, and what was sent to it since."""

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.v1 import common_pb2, registry_pb2
from router.inbox import Inbox, NewToken
from router.prefix_index import PrefixIndex, PromptBlocks
from scheduling import compatibility
from scheduling.placement import DecodeSnapshot, PrefillSnapshot


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation of a worker, from its registration until its stream ends.

    Work is counted from its dispatch, because a report is up to a heartbeat old: placement would else send
    a whole burst to the worker that was idle when it last reported.

    inboxes: of the requests that it decodes, by generation. calls: those to it that run and must not be
    waited for once it is lost. lost: why it is; empty while it is not. num_messages: heard from it so far.
    """

    registration: registry_pb2.Registration
    group: Hashable
    load: registry_pb2.LoadReport = field(default_factory=registry_pb2.LoadReport)
    reported_s: float = 0.0
    incompatible: str = ""
    num_requests: int = 0
    num_dispatched_tokens: int = 0
    num_dispatched_blocks: int = 0
    inboxes: dict[int, Inbox] = field(default_factory=dict)
    calls: set[Any] = field(default_factory=set)
    lost: str = ""
    num_messages: int = 0
    has_lost_blocks: bool = False
    news_for_it: asyncio.Event = field(default_factory=asyncio.Event)
    index: PrefixIndex = field(init=False)

    def __post_init__(self) -> None:
        self.index = PrefixIndex(self.num_blocks)

    @property
    def worker_id(self) -> str:
        """Its name in the deployment."""
        return self.registration.worker_id

    @property
    def is_prefill(self) -> bool:
        """Which pool it is in."""
        return self.registration.role == common_pb2.ROLE_PREFILL

    @property
    def num_blocks(self) -> int:
        """Blocks in its cache."""
        return self.registration.capabilities.num_blocks

    def capabilities(self) -> Mapping[str, object]:
        """All it said of itself, by field name."""
        message = self.registration.capabilities
        return {f.name: getattr(message, f.name) for f in message.DESCRIPTOR.fields}

    def take_report(self, load: registry_pb2.LoadReport, now_s: float) -> None:
        """Its newest load: what was dispatched before is in it."""
        if load.HasField("block_changes") and not self.index.take(load.block_changes):
            self.has_lost_blocks = True
            self.news_for_it.set()
        load.ClearField("block_changes")
        self.load = load
        self.reported_s = now_s
        self.num_dispatched_blocks = 0

    def take_step(self, step: registry_pb2.StepUpdate) -> None:
        """Hands each token and each end to the request that it is for; the router may have dropped it."""
        logprobs = {entry.row: entry.logprobs for entry in step.logprobs}
        rows = zip(step.generations, step.output_indices, step.token_ids, strict=True)
        for row, (generation, index, token_id) in enumerate(rows):
            if inbox := self.inboxes.get(generation):
                inbox.put(NewToken(index, token_id, logprobs.get(row)))
        for ended in step.ended:
            if inbox := self.inboxes.get(ended.generation):
                inbox.put(ended)

    def num_held_blocks(self, prompt: PromptBlocks) -> int:
        """Leading full blocks of a prompt that it holds, as far as is known."""
        return self.index.num_leading(prompt.hashes(self.registration.capabilities))

    def num_cached_tokens(self, prompt: PromptBlocks) -> int:
        """Tokens of a prompt that it would not have to compute; the last one it always does."""
        block_size = self.registration.capabilities.block_size
        return min(self.num_held_blocks(prompt), (prompt.num_tokens - 1) // block_size) * block_size

    def prefill_snapshot(self, prompt: PromptBlocks) -> PrefillSnapshot:
        """Its load for the placement of a prompt."""
        return PrefillSnapshot(
            self.worker_id,
            self.group,
            num_pending_tokens=max(self.load.num_pending_tokens, self.num_dispatched_tokens),
            num_requests=max(self.load.num_waiting + self.load.num_running, self.num_requests),
            num_blocks=self.num_blocks,
            num_cached_tokens=self.num_cached_tokens(prompt),
        )

    def decode_snapshot(self, prompt: PromptBlocks) -> DecodeSnapshot:
        """Its load for the placement of a prompt."""
        blocks = self.load.blocks
        return DecodeSnapshot(
            self.worker_id,
            self.group,
            num_requests=max(self.load.num_waiting + self.load.num_running, self.num_requests),
            num_free_blocks=max(0, blocks.free + blocks.cached - self.num_dispatched_blocks),
            num_blocks=self.num_blocks,
            num_held_blocks=self.num_held_blocks(prompt),
        )


def group_of(capabilities: Any) -> Hashable:
    """The compatibility group of a Capabilities message."""
    return compatibility.group({name: getattr(capabilities, name) for name in compatibility.FIELDS})
