"""Blocks that a decode worker holds for a request whose prompt is computed elsewhere.

    RESERVED --open--> FILLING --last block and first token--> COMPLETE --admitted to a step--> RUNNING
        ^                 |                                        |                              |
        +---stream lost---+            cancel, deadline, lost peer: from every state              |
                                                   v                                              |
                                                 FREED <------------------- the end --------------+

Who may write a block: in FILLING the holder of the lease, in RUNNING the decode loop, else nobody. A lease
carries a generation that is never used twice and a secret, so a late or foreign writer is refused even
where the blocks have gone to another request since. When a writer is given up, the next one shows the same
lease with a higher number: it takes over, and the former, which may only be slow, is refused.
"""

import hmac
import secrets
from dataclasses import dataclass, field
from enum import Enum, auto


class ReservationState(Enum):
    """Where a reservation stands; the drawing above says how it moves."""

    RESERVED = auto()
    FILLING = auto()
    COMPLETE = auto()
    RUNNING = auto()
    FREED = auto()


@dataclass(frozen=True, slots=True)
class Lease:
    """What a writer must show. The secret stays out of every log."""

    request_id: str
    epoch: int
    generation: int
    secret: bytes = field(repr=False)


class LeaseRefused(Exception):
    """A lease that gives no right to write; the message says why."""


@dataclass(slots=True, eq=False)
class Reservation:
    """One request's blocks on the decode worker.

    block_table: the reserved blocks; the first `num_prompt_blocks` are the prompt's.
    num_held_blocks: of these, how many leading ones have their content already and are nobody's to write.
    checksums: of each block that has landed, by its index.
    writing: the latest writer's.
    """

    lease: Lease
    block_table: list[int]
    num_prompt_blocks: int
    num_held_blocks: int = 0
    state: ReservationState = ReservationState.RESERVED
    checksums: dict[int, int] = field(default_factory=dict)
    first_token_id: int | None = None
    writing: "Writing | None" = None

    @property
    def num_blocks_to_fill(self) -> int:
        """Blocks that the writer is to send."""
        return self.num_prompt_blocks - self.num_held_blocks

    @property
    def is_filled(self) -> bool:
        """Every block and the first token are here."""
        return self.first_token_id is not None and len(self.checksums) == self.num_blocks_to_fill


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """One writer's right to fill a reservation, until it leaves or another one takes over."""

    reservation: Reservation
    number: int

    @property
    def is_current(self) -> bool:
        """Whether no other writer has taken over."""
        return self.reservation.writing is self

    @property
    def is_open(self) -> bool:
        """Whether blocks may be written."""
        return self.is_current and self.reservation.state is ReservationState.FILLING


class ReservationTable:
    """All reservations of one incarnation of a decode worker."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_generation = 1
        self._by_request: dict[str, Reservation] = {}

    def grant(
        self, request_id: str, block_table: list[int], num_prompt_blocks: int, num_held_blocks: int = 0
    ) -> Reservation:
        """A new reservation of blocks that the caller has allocated. One a request at a time."""
        if request_id in self._by_request:
            raise KeyError(f"{request_id} has a reservation already")
        lease = Lease(request_id, self._epoch, self._next_generation, secrets.token_bytes(16))
        self._next_generation += 1
        reservation = Reservation(lease, block_table, num_prompt_blocks, num_held_blocks)
        self._by_request[request_id] = reservation
        return reservation

    def open(self, lease: Lease, number: int = 0) -> Writing:
        """Lets the holder of `lease`, writer `number` of those who had it, fill its reservation.

        Raises `LeaseRefused`.
        """
        if lease.epoch != self._epoch:
            raise LeaseRefused("the lease is from another incarnation of this worker")
        reservation = self._by_request.get(lease.request_id)
        if reservation is None or not hmac.compare_digest(reservation.lease.secret, lease.secret):
            raise LeaseRefused("there is no such lease")
        if reservation.lease.generation != lease.generation:
            raise LeaseRefused("the lease is stale")
        if (last := reservation.writing) is not None and number < last.number:
            raise LeaseRefused("another writer has taken over")
        takes_over = reservation.state is ReservationState.FILLING and last and number > last.number
        if reservation.state is not ReservationState.RESERVED and not takes_over:
            raise LeaseRefused(f"the reservation is {reservation.state.name}")
        reservation.state = ReservationState.FILLING
        reservation.first_token_id = None
        reservation.writing = Writing(reservation, number)
        return reservation.writing

    def close(self, writing: Writing) -> None:
        """The writer has gone. What has landed stays; the lease may be used again."""
        if writing.is_open:
            writing.reservation.state = ReservationState.RESERVED

    def free(self, request_id: str) -> Reservation | None:
        """Ends a reservation, from any state. Its blocks are the caller's to give back."""
        reservation = self._by_request.pop(request_id, None)
        if reservation is not None:
            reservation.state = ReservationState.FREED
        return reservation

    def get(self, request_id: str) -> Reservation | None:
        """The request's reservation, if it has one."""
        return self._by_request.get(request_id)

    def __len__(self) -> int:
        return len(self._by_request)
