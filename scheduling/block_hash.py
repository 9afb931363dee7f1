"""The identity of a KV block: a hash of everything that its content depends on.

    root        = H(model digest and tenant salt, each after its length)
    hash of i   = H(hash of i - 1, or the root, then block i's token ids as little-endian uint32)

H is BLAKE2b with 16 bytes of output. So a block's hash names the model, the tenant and all tokens up to the
block's end, and is the same in every process and on every host. Only full blocks have one. Two tenants with
different salts never share a block, and neither can tell from another's hashes what was asked.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

# Workers share blocks only where they name them alike.
SCHEME = "blake2b-128"
HASH_BYTES = 16

# A salt is a tenant's name or a key, not a document.
MAX_SALT_CHARS = 256


class BlockHashes:
    """The hashes of one sequence's full blocks, made as the sequence grows."""

    def __init__(self, model_digest: str, salt: str, block_size: int) -> None:
        parts = [part.encode() for part in (model_digest, salt)]
        framed = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        self._root = _hash(framed)
        self._block_size = block_size
        self._hashes: list[bytes] = []

    def of(self, tokens: Sequence[int]) -> list[bytes]:
        """One hash for each full block of `tokens`, which continue the tokens of the last call.

        The list is this object's own and grows with the next call. An id is 0 to 2**32 - 1.
        """
        size = self._block_size
        previous = self._hashes[-1] if self._hashes else self._root
        for start in range(len(self._hashes) * size, len(tokens) - size + 1, size):
            block = struct.pack(f"<{size}I", *tokens[start : start + size])
            previous = _hash(previous + block)
            self._hashes.append(previous)
        return self._hashes


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()
