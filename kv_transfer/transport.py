"""What a transport is: a way to push one request's blocks into another worker's cache.

One file a transport. The receiving half of each ends in `kv_transfer.receiver.Receiver`.
"""

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.reservation import Lease


class TransferFailed(Exception):
    """The receiver is gone, refused the lease, or would not take a block; the message says which."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request's blocks go, and by what right: `address` is host:port."""

    address: str
    lease: Lease


class Transfer(Protocol):
    """One request's blocks on their way. Every method raises `TransferFailed`."""

    num_bytes: int

    async def send(self, index: int, block: int) -> None:
        """Sends a full and final block of the local cache as number `index` of the sequence.

        The block may be freed once `finish` or `abort` has returned, not before.
        """
        ...

    async def finish(self, first_token_id: int) -> None:
        """Says that all is sent; returns when the receiver has every block and owns the sequence."""
        ...

    async def abort(self) -> None:
        """Gives up, in any state. Nothing is read from the cache afterwards."""
        ...


class Transport(Protocol):
    """Opens transfers from this worker's cache."""

    def open(self, target: Target, num_blocks: int) -> Transfer:
        """A transfer of `num_blocks` blocks. Does not wait."""
        ...
