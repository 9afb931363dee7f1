"""Which blocks each worker holds, so that a prompt can go where its beginning is."""

from collections.abc import Sequence

from kvferry.v1 import registry_pb2
from scheduling.block_hash import HASH_BYTES, SCHEME, BlockHashes


class PrefixIndex:
    """What one worker has told of its blocks, as of its last report.

    It may be wrong for a moment: a block may be evicted before a prompt comes. The worker computes then what
    the router thought it had, so a wrong index costs time and nothing else.
    """

    def __init__(self, max_blocks: int) -> None:
        """max_blocks: the worker's cache, which bounds what is kept here."""
        self._max_blocks = max_blocks
        self._held: set[bytes] = set()
        self._next_sequence: int | None = None

    def __len__(self) -> int:
        return len(self._held)

    def take(self, changes: registry_pb2.BlockChanges) -> bool:
        """Applies a message. False where one was lost before it: the worker has to tell all anew.

        From then on nothing is known until the snapshot comes, and what comes before it is passed over.
        """
        if changes.is_snapshot:
            self._held.clear()
        elif self._next_sequence is None:
            return True
        elif changes.sequence != self._next_sequence:
            return self._lose()
        self._next_sequence = changes.sequence + 1
        self._held.difference_update(_hashes(changes.removed))
        self._held.update(_hashes(changes.added))
        return len(self._held) <= self._max_blocks or self._lose()

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's leading blocks the worker holds."""
        return next((i for i, each in enumerate(hashes) if each not in self._held), len(hashes))

    def _lose(self) -> bool:
        self._held.clear()
        self._next_sequence = None
        return False


class PromptBlocks:
    """The blocks of one prompt, as workers name them."""

    def __init__(self, token_ids: Sequence[int], salt: str) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._hashes: dict[tuple[str, int], list[bytes]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._token_ids)

    def hashes(self, capabilities: registry_pb2.Capabilities) -> list[bytes]:
        """Of the full blocks, on such a worker; none where it names blocks in a way unknown here."""
        if capabilities.hash_scheme != SCHEME:
            return []
        key = (capabilities.model_digest, capabilities.block_size)
        if key not in self._hashes:
            self._hashes[key] = BlockHashes(key[0], self._salt, key[1]).of(self._token_ids)
        return self._hashes[key]


def _hashes(packed: bytes) -> list[bytes]:
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
