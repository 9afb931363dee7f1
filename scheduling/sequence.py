"""A request's tokens on one worker, and the piece of them that one step computes."""

import math
from dataclasses import dataclass, field

from scheduling.block_hash import BlockHashes


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one request and the blocks that hold their KV. Two are equal only if they are the same.

    request_id: also the owner of its blocks in the allocator.
    tokens: the prompt, then the output so far.
    num_prompt_tokens: how many of them are the prompt.
    priority: higher goes first.
    arrived_s: when it came, on any clock that only moves forward; older goes first.
    block_table: its blocks in order; entry i holds tokens i * block_size and following.
    num_computed: tokens whose KV is in the cache, from the first.
    hashes: names its full blocks; None where they are shared with nobody.
    num_passed_over: decode steps that had no row for it since its last.
    weight: of its class's share of a queue; None: by its priority.
    due_s: when its first token should be there, on the clock of `arrived_s`.
    """

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    priority: int
    arrived_s: float
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    hashes: BlockHashes | None = None
    num_passed_over: int = 0
    weight: float | None = None
    due_s: float = math.inf

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    def block_hashes(self, max_blocks: int) -> list[bytes]:
        """The hashes of its full blocks, of the first `max_blocks` at most."""
        return [] if self.hashes is None else self.hashes.of(self.tokens)[:max_blocks]

    @property
    def age(self) -> tuple[float, str]:
        """Sorts older first; ids break ties, so that the order is total."""
        return self.arrived_s, self.request_id

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sorts higher priority first, then older first."""
        return -self.priority, self.arrived_s, self.request_id


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One step computes the KV of sequence.tokens[start:end]; its block table covers `end` tokens."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether nothing remains after it, so that the next token is to be sampled."""
        return self.end == len(self.sequence.tokens)

    def fills_block(self, block_size: int) -> bool:
        """Whether at least one more block is full afterwards."""
        return self.end // block_size > self.start // block_size


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the KV of so many tokens."""
    return -(-num_tokens // block_size)
