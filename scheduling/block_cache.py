"""Which block holds which content, and in which order what nobody holds is given up.

A block gets the hash of its content (`block_hash.py`) once it is full and final, and keeps it until it is
evicted. Evicted is the least recently used block that nobody holds. Owners hold all of a sequence's blocks
or none, and let go of the later ones first; so a block goes before those that it is found through.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockCache:
    """The hashes of a worker's blocks. Says nothing of who holds them: that is the allocator's."""

    def __init__(self) -> None:
        self.num_evictions = 0
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()  # The next to be evicted first.
        self._on_hash: Callable[[bytes, bool], None] = lambda _hash, _is_here: None

    @property
    def num_unheld(self) -> int:
        """Blocks that can be evicted."""
        return len(self._unheld)

    @property
    def unheld(self) -> Iterable[int]:
        """Blocks that can be evicted, the next one first."""
        return self._unheld.keys()

    @property
    def hashes(self) -> Iterable[bytes]:
        """All contents that are here."""
        return self._block_of.keys()

    def watch(self, on_hash: Callable[[bytes, bool], None]) -> None:
        """From now on `on_hash(hash, is_here)` is told of each content that comes (True) or goes (False)."""
        self._on_hash = on_hash

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of as many of a sequence's leading hashes as are here."""
        blocks: list[int] = []
        for each in hashes:
            if (block := self._block_of.get(each)) is None:
                break
            blocks.append(block)
        return blocks

    def is_named(self, block: int) -> bool:
        """Whether a block has a hash, so that others may share it."""
        return block in self._hash_of

    def is_unheld(self, block: int) -> bool:
        """Whether a block can be evicted."""
        return block in self._unheld

    def name(self, block: int, block_hash: bytes) -> None:
        """Gives a full and final block its hash; where that content is here already, it stays where it is."""
        if block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block
            self._on_hash(block_hash, True)

    def hold(self, block: int) -> None:
        """Somebody holds the block: it stays."""
        self._unheld.pop(block, None)

    def let_go(self, block: int) -> bool:
        """Nobody holds the block any more. False, and it is not kept, where it has no hash."""
        if block not in self._hash_of:
            return False
        self._unheld[block] = None
        return True

    def used(self, block_hash: bytes) -> None:
        """A content was used just now, if only as another block's copy."""
        block = self._block_of[block_hash]
        if block in self._unheld:
            self._unheld.move_to_end(block)

    def evict(self) -> int:
        """Gives up the least recently used block and returns it. KeyError where all are held."""
        block, _ = self._unheld.popitem(last=False)
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self.num_evictions += 1
        self._on_hash(block_hash, False)
        return block

    def faults(self) -> list[str]:
        """What contradicts itself, in words."""
        faults = [
            f"block {block} has the hash of block {self._block_of.get(block_hash)}"
            for block, block_hash in self._hash_of.items()
            if self._block_of.get(block_hash) != block
        ]
        if len(self._hash_of) != len(self._block_of):
            faults.append(f"{len(self._hash_of)} blocks have {len(self._block_of)} hashes")
        return faults + [
            f"block {b} is cached without a hash" for b in self._unheld if b not in self._hash_of
        ]
