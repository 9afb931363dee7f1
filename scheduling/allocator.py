"""Who owns which block of a worker's KV cache.

    free --allocate(RESERVED)--> reserved --commit--> running --free--> free
    free --allocate(RUNNING)---------------------------^

An owner is a request; all its blocks are in one state, and it gives all of them back at once. The law
of conservation, free + reserved + running = total, holds after every call.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class BlockState(Enum):
    """What an owner's blocks are for."""

    RESERVED = "reserved"  # KV is on its way: only the lease holder may write.
    RUNNING = "running"  # Only this worker's own steps write.


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in which state; free + reserved + running = total."""

    free: int
    reserved: int
    running: int
    total: int


class ConservationError(AssertionError):
    """Blocks are lost or in two places; the message names them and their owners."""


@dataclass(slots=True)
class _Holding:
    state: BlockState
    blocks: list[int]


class BlockAllocator:
    """The blocks 0 to num_blocks - 1 and their owners. The last blocks freed are the first reused."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self._total = num_blocks
        self._free = list(reversed(range(num_blocks)))  # A stack: its end is taken first.
        self._holdings: dict[str, _Holding] = {}
        self._num_held = dict.fromkeys(BlockState, 0)

    @property
    def num_free(self) -> int:
        """Blocks held by nobody."""
        return len(self._free)

    @property
    def num_owners(self) -> int:
        """Owners that have allocated and not freed since."""
        return len(self._holdings)

    @property
    def counts(self) -> BlockCounts:
        """All blocks by state. Constant time."""
        return BlockCounts(
            free=len(self._free),
            reserved=self._num_held[BlockState.RESERVED],
            running=self._num_held[BlockState.RUNNING],
            total=self._total,
        )

    def holdings(self) -> Mapping[str, tuple[BlockState, int]]:
        """Every owner's state and number of blocks, as of now."""
        return {owner: (held.state, len(held.blocks)) for owner, held in self._holdings.items()}

    def holds(self, owner: str) -> bool:
        """Whether an owner has allocated and not freed since."""
        return owner in self._holdings

    def allocate(self, owner: str, num_blocks: int, state: BlockState) -> list[int] | None:
        """Takes blocks for an owner, beside those that it holds already.

        All or nothing: None, and nothing changes, where fewer are free. Returns the new blocks only.
        Raises ValueError where the owner's blocks are in another state, or for a negative number.
        """
        if num_blocks < 0:
            raise ValueError(f"{owner} asks for {num_blocks} blocks")
        held = self._holdings.get(owner)
        if held is not None and held.state is not state:
            raise ValueError(f"{owner} holds {held.state.value} blocks and asks for {state.value} ones")
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(num_blocks)]
        if held is None:
            self._holdings[owner] = _Holding(state, list(blocks))
        else:
            held.blocks += blocks
        self._num_held[state] += num_blocks
        return blocks

    def commit(self, owner: str) -> None:
        """Turns an owner's blocks from RESERVED to RUNNING. Raises KeyError where it holds no such blocks."""
        held = self._holdings.get(owner)
        if held is None:
            raise KeyError(f"{owner} holds no blocks to commit")
        if held.state is not BlockState.RESERVED:
            raise KeyError(f"{owner} holds {held.state.value} blocks, not reserved ones")
        held.state = BlockState.RUNNING
        self._num_held[BlockState.RESERVED] -= len(held.blocks)
        self._num_held[BlockState.RUNNING] += len(held.blocks)

    def free(self, owner: str) -> int:
        """Gives back all that an owner holds and returns how many blocks; 0 for one that holds nothing.

        The caller sees to it that nobody can still write them.
        """
        held = self._holdings.pop(owner, None)
        if held is None:
            return 0
        self._num_held[held.state] -= len(held.blocks)
        self._free.extend(reversed(held.blocks))
        return len(held.blocks)

    def check(self) -> None:
        """Counts every block afresh. Raises ConservationError; for idle moments and audits."""
        places: dict[int, list[str]] = {block: [] for block in range(self._total)}
        for block in self._free:
            places.setdefault(block, []).append("the free list")
        num_held = dict.fromkeys(BlockState, 0)
        for owner, held in self._holdings.items():
            num_held[held.state] += len(held.blocks)
            for block in held.blocks:
                places.setdefault(block, []).append(owner)
        faults = []
        for block, names in places.items():
            if not 0 <= block < self._total:
                faults.append(f"block {block} of {' and '.join(names)} does not exist")
            elif not names:
                faults.append(f"block {block} is lost")
            elif len(names) > 1:
                faults.append(f"block {block} is held by {' and '.join(names)}")
        faults += [
            f"{num_held[state]} blocks are {state.value}, {count} are counted"
            for state, count in self._num_held.items()
            if count != num_held[state]
        ]
        if faults:
            raise ConservationError("; ".join(faults))
