"""What a transport is: a way to push one request's blocks into another worker's cache.

One gRPC stream a request: `grpc_transport.py` sends and `server.py` receives. On it blocks travel as bytes
(`byte_blocks.py`) or, on one host, as their places in the sender's memory (`shared_blocks.py`). Either way
they end in `kv_transfer.receiver.Receiver`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.reservation import Lease

# Longest silence of a peer in a transfer. Blocks come a chunk apart, and a chunk takes well under this.
IDLE_TIMEOUT_S = 30.0


class TransferFailed(Exception):
    """The receiver is gone, refused the lease, or would not take a block; the message says which."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request's blocks go, and by what right: `address` is host:port.

    writer: counts those who were given the lease, from 0.
    """

    address: str
    lease: Lease
    writer: int = 0


class Transfer(Protocol):
    """One request's blocks on their way. Every method raises `TransferFailed`."""

    num_bytes: int

    async def send(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Sends full and final blocks: of each its place in the sequence and its number in the local cache.

        They may be freed once `finish` or `abort` has returned, not before.
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
