"""What a worker tells its routers of the blocks that prompts can share: changes, and snapshots where due.

Each reader has its own feed. It starts with all there is, then gets the net changes since it last took. A
reader that falls far behind, or says that it has lost something, is told all anew.
"""

from dataclasses import dataclass, field

from scheduling.block_cache import BlockCache

# 256 KiB of hashes: a small part of a message's limit, and at one message a heartbeat (0.2 s) far more
# blocks than a worker can fill.
MAX_CHANGES = 16_384


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """One message: hashes packed one after the other. `sequence` counts a feed's messages from 0."""

    sequence: int
    is_snapshot: bool
    added: bytes
    removed: bytes


@dataclass(slots=True)
class _Feed:
    """pending: hash -> whether it is here now, oldest change first. is_void: all is to be told anew."""

    sequence: int = 0
    is_void: bool = True
    pending: dict[bytes, bool] = field(default_factory=dict)


class BlockFeeds:
    """The feeds of all readers of one cache."""

    def __init__(self, cache: BlockCache, num_blocks: int) -> None:
        self._cache = cache
        self._feeds: dict[str, _Feed] = {}
        # A snapshot, and as many changes while it is told in pieces. More take more memory than the cache.
        self._max_pending = 2 * num_blocks
        cache.watch(self._note)

    def take(self, reader: str) -> BlockChanges | None:
        """What the reader does not know yet, or the first part of it; None where that is nothing."""
        feed = self._feeds.setdefault(reader, _Feed())
        is_snapshot = feed.is_void
        if feed.is_void:
            feed.pending = dict.fromkeys(self._cache.hashes, True)
            feed.is_void = False
        elif not feed.pending:
            return None
        told = list(feed.pending.items())[:MAX_CHANGES]
        for block_hash, _ in told:
            del feed.pending[block_hash]
        changes = BlockChanges(
            feed.sequence,
            is_snapshot,
            b"".join(block_hash for block_hash, is_here in told if is_here),
            b"".join(block_hash for block_hash, is_here in told if not is_here),
        )
        feed.sequence += 1
        return changes

    def resend(self, reader: str) -> None:
        """The reader is told all anew."""
        if feed := self._feeds.get(reader):
            feed.is_void = True

    def close(self, reader: str) -> None:
        """The reader has gone."""
        self._feeds.pop(reader, None)

    def _note(self, block_hash: bytes, is_here: bool) -> None:
        for feed in self._feeds.values():
            if feed.is_void:
                continue
            feed.pending[block_hash] = is_here
            if len(feed.pending) > self._max_pending:
                feed.is_void = True
                feed.pending.clear()
