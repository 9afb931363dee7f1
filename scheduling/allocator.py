"""Who owns which block of a worker's KV cache.

    free --allocate(RESERVED)--> reserved --commit--> running --free--> free, or cached where it has a hash
    free --allocate(RUNNING)---------------------------^

    cached --allocate with its hash--> reserved or running
    cached --evict--> free

An owner is a request; all its blocks are in one state, and it gives all of them back at once. A block whose
content is full and final gets a hash (`publish`); sequences that begin alike share it, and nobody writes it
any more. A shared block counts once: as running where any of its owners runs. The law of conservation,
free + cached + reserved + running = total, holds after every call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from scheduling.block_cache import BlockCache


class BlockState(Enum):
    """What an owner's blocks are for."""

    RESERVED = "reserved"  # KV is on its way: only the lease holder may write.
    RUNNING = "running"  # Only this worker's own steps write.

    # Members are singletons; Enum's own hash is Python code, and is called several times a block.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in which state; free + cached + reserved + running = total.

    cached: held by nobody, with content that can be shared; evicted when others need the room.
    """

    free: int
    cached: int
    reserved: int
    running: int
    total: int

    @property
    def available(self) -> int:
        """Blocks that can be allocated."""
        return self.free + self.cached


class ConservationError(AssertionError):
    """Blocks are lost or in two places; the message names them and their owners."""


@dataclass(slots=True)
class _Holding:
    """num_shared: leading blocks that were here before. hashes: of the leading blocks that are final."""

    state: BlockState
    num_shared: int
    hashes: list[bytes]
    blocks: list[int] = field(default_factory=list)


class BlockAllocator:
    """The blocks 0 to num_blocks - 1 and their owners. The last blocks freed are the first reused."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.cache = BlockCache()
        self._total = num_blocks
        self._free = list(reversed(range(num_blocks)))  # A stack: its end is taken first.
        self._holdings: dict[str, _Holding] = {}
        # How many owners of each state hold each block.
        self._num_owners = {state: [0] * num_blocks for state in BlockState}
        self._num_running_owners = self._num_owners[BlockState.RUNNING]
        self._num_reserved_owners = self._num_owners[BlockState.RESERVED]
        self._num_held = dict.fromkeys(BlockState, 0)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: held by nobody, empty or with content."""
        return len(self._free) + self.cache.num_unheld

    @property
    def num_owners(self) -> int:
        """Owners that have allocated and not freed since."""
        return len(self._holdings)

    @property
    def counts(self) -> BlockCounts:
        """All blocks by state. Constant time."""
        return BlockCounts(
            free=len(self._free),
            cached=self.cache.num_unheld,
            reserved=self._num_held[BlockState.RESERVED],
            running=self._num_held[BlockState.RUNNING],
            total=self._total,
        )

    def holdings(self) -> Mapping[str, tuple[BlockState, int]]:
        """Every owner's state and number of blocks, as of now; a shared block counts for each owner."""
        return {owner: (held.state, len(held.blocks)) for owner, held in self._holdings.items()}

    def holds(self, owner: str) -> bool:
        """Whether an owner has allocated and not freed since."""
        return owner in self._holdings

    def num_shared(self, owner: str) -> int:
        """How many leading blocks an owner found here with their content. KeyError where it holds nothing."""
        return self._holdings[owner].num_shared

    def num_needed(self, num_blocks: int, hashes: Sequence[bytes] = ()) -> int:
        """By how much `num_available` falls when a newcomer allocates with the same arguments."""
        shared = self.cache.match(hashes)
        return num_blocks - sum(not self.cache.is_unheld(block) for block in shared)

    def allocate(
        self, owner: str, num_blocks: int, state: BlockState, hashes: Sequence[bytes] = ()
    ) -> list[int] | None:
        """Takes blocks for an owner, beside those that it holds already.

        `hashes` are a newcomer's, of its leading blocks: as many as are here are shared (`num_shared`), and
        the owner must not write these. All or nothing: None, and nothing changes, where fewer are available.
        Returns the new blocks only. Raises ValueError where the owner's blocks are in another state, for a
        negative number, for more hashes than blocks, or for hashes of one that holds blocks already.
        """
        if num_blocks < len(hashes):
            raise ValueError(f"{owner} asks for {num_blocks} blocks and names {len(hashes)}")
        held = self._holdings.get(owner)
        if held is not None and held.state is not state:
            raise ValueError(f"{owner} holds {held.state.value} blocks and asks for {state.value} ones")
        if held is not None and hashes:
            raise ValueError(f"{owner} holds blocks and asks to share others")
        if self.num_needed(num_blocks, hashes) > self.num_available:
            return None
        blocks = self.cache.match(hashes)
        if held is None:
            held = self._holdings[owner] = _Holding(state, len(blocks), list(hashes[: len(blocks)]))
        # The shared ones are held first: else they might be evicted for the others.
        for block in blocks:
            self._add_owner(block, state)
        num_owners = self._num_owners[state]
        num_new = num_blocks - len(blocks)
        for _ in range(num_new):
            block = self._free.pop() if self._free else self.cache.evict()
            num_owners[block] = 1  # Nobody held it.
            blocks.append(block)
        self._num_held[state] += num_new
        held.blocks += blocks
        return list(blocks)

    def publish(self, owner: str, hashes: Sequence[bytes]) -> None:
        """As many of a running owner's leading blocks are full and final, and these are their hashes.

        They may be shared from now on, and stay cached when they are freed. Raises KeyError where the owner
        holds nothing, ValueError where its blocks are still to be filled by another.
        """
        held = self._holdings[owner]
        if held.state is not BlockState.RUNNING:
            raise ValueError(f"{owner} holds {held.state.value} blocks: they are not final")
        for index in range(len(held.hashes), len(hashes)):
            held.hashes.append(hashes[index])
            self.cache.name(held.blocks[index], hashes[index])

    def commit(self, owner: str) -> None:
        """Turns an owner's blocks from RESERVED to RUNNING. Raises KeyError where it holds no such blocks."""
        held = self._holdings.get(owner)
        if held is None:
            raise KeyError(f"{owner} holds no blocks to commit")
        if held.state is not BlockState.RESERVED:
            raise KeyError(f"{owner} holds {held.state.value} blocks, not reserved ones")
        held.state = BlockState.RUNNING
        for block in held.blocks:
            self._count(block, BlockState.RUNNING, 1)
            self._count(block, BlockState.RESERVED, -1)

    def free(self, owner: str) -> int:
        """Gives back all that an owner holds and returns how many blocks; 0 for one that holds nothing.

        The caller sees to it that nobody can still write them.
        """
        held = self._holdings.pop(owner, None)
        if held is None:
            return 0
        # From the end: the next to be reused comes last, and the next to be evicted first.
        for index in reversed(range(len(held.blocks))):
            block = held.blocks[index]
            if index < len(held.hashes):
                # Its copy may be shared instead of this one, or may have been evicted.
                self.cache.name(block, held.hashes[index])
                self.cache.used(held.hashes[index])
            if self._count(block, held.state, -1) is None and not self.cache.let_go(block):
                self._free.append(block)
        return len(held.blocks)

    def _add_owner(self, block: int, state: BlockState) -> None:
        self.cache.hold(block)
        self._count(block, state, 1)

    def _count(self, block: int, state: BlockState, change: int) -> BlockState | None:
        """Returns what the block counts as from now on."""
        before = self._state(block)
        self._num_owners[state][block] += change
        after = self._state(block)
        if before is not after:
            if before is not None:
                self._num_held[before] -= 1
            if after is not None:
                self._num_held[after] += 1
        return after

    def _state(self, block: int) -> BlockState | None:
        """What a block counts as; None where nobody holds it."""
        if self._num_running_owners[block]:
            return BlockState.RUNNING
        return BlockState.RESERVED if self._num_reserved_owners[block] else None

    def check(self) -> None:
        """Counts every block afresh. Raises ConservationError; for idle moments and audits."""
        owners: dict[int, list[str]] = {block: [] for block in range(self._total)}
        states: dict[int, set[BlockState]] = {block: set() for block in range(self._total)}
        for owner, held in self._holdings.items():
            for block in held.blocks:
                owners.setdefault(block, []).append(owner)
                states.setdefault(block, set()).add(held.state)
        faults = self._place_faults(owners) + self.cache.faults()
        num_held = {
            BlockState.RUNNING: sum(BlockState.RUNNING in each for each in states.values()),
            BlockState.RESERVED: sum(each == {BlockState.RESERVED} for each in states.values()),
        }
        faults += [
            f"{num_held[state]} blocks are {state.value}, {count} are counted"
            for state, count in self._num_held.items()
            if count != num_held[state]
        ]
        faults += [
            f"block {block} has {len(names)} owners, {num} are counted"
            for block, names in owners.items()
            if block < self._total
            and len(names) != (num := sum(counts[block] for counts in self._num_owners.values()))
        ]
        if faults:
            raise ConservationError("; ".join(faults))

    def _place_faults(self, owners: Mapping[int, Sequence[str]]) -> list[str]:
        places = {block: list(names) for block, names in owners.items()}
        for name, blocks in (("the free list", self._free), ("the cache", self.cache.unheld)):
            for block in blocks:
                places.setdefault(block, []).append(name)
        faults = []
        for block, names in places.items():
            shares = self.cache.is_named(block) and names == owners.get(block)
            if not 0 <= block < self._total:
                faults.append(f"block {block} of {' and '.join(names)} does not exist")
            elif not names:
                faults.append(f"block {block} is lost")
            elif len(names) > 1 and not shares:
                faults.append(f"block {block} is held by {' and '.join(names)}")
        return faults
