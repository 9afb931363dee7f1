"""The receiving half of every transport: checks a block against its reservation and writes it in place.

Check and copy run without an await between them, on the event loop that also frees reservations. So a
block can never land after its reservation was freed: that is the fence.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import xxhash

from engine.cache import BlockShape, KVCache
from kv_transfer.reservation import Reservation, ReservationState, ReservationTable, Writing


class Refusal(Enum):
    """Why a block was not written."""

    CHECKSUM = auto()
    GENERATION = auto()
    SHAPE = auto()
    DUPLICATE = auto()


def checksum(data: bytes | memoryview) -> int:
    """xxh3-64: catches what the wire, a driver or a faulty memory changed; not a defence against forgery."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass(slots=True)
class BlockPart:
    """A block on its way: which one, whose, which layers and heads, and its bytes.

    is_shared: `data` is memory of the sender's, which may change at any time.
    """

    index: int
    generation: int
    checksum: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    data: bytes | memoryview
    is_shared: bool = False


class Receiver:
    """Fills reservations from whatever transport brings the blocks."""

    def __init__(
        self, cache: KVCache, table: ReservationTable, on_complete: Callable[[Reservation], None]
    ) -> None:
        """`on_complete` takes over a reservation whose last block has landed; it is COMPLETE then."""
        self.table = table
        self.refused: Counter[Refusal] = Counter()
        self.num_blocks_received = 0
        self._cache = cache
        self._on_complete = on_complete
        shape = cache.shape
        self._block_bytes = shape.num_bytes
        self._whole = (0, shape.num_layers), (0, shape.num_kv_heads)

    @property
    def shape(self) -> BlockShape:
        """The shape of the blocks that it takes."""
        return self._cache.shape

    def put(self, writing: Writing, part: BlockPart) -> Refusal | None:
        """Writes a block. None when it was taken."""
        refusal = self._write(writing, part)
        if refusal is None:
            self.num_blocks_received += 1
            self._complete_if_filled(writing.reservation)
        else:
            self.refused[refusal] += 1
        return refusal

    def end(self, writing: Writing, first_token_id: int) -> None:
        """The writer has sent all it had; `first_token_id` is where decode carries on."""
        if writing.is_open:
            writing.reservation.first_token_id = first_token_id
            self._complete_if_filled(writing.reservation)

    def _write(self, writing: Writing, part: BlockPart) -> Refusal | None:
        reservation = writing.reservation
        if not writing.is_open or part.generation != reservation.lease.generation:
            return Refusal.GENERATION
        is_whole = (part.layers, part.heads) == self._whole and len(part.data) == self._block_bytes
        if not is_whole or part.index >= reservation.num_prompt_blocks:
            return Refusal.SHAPE
        if part.index < reservation.num_held_blocks or part.index in reservation.checksums:
            return Refusal.DUPLICATE
        block = reservation.block_table[part.index]
        if not part.is_shared and checksum(part.data) != part.checksum:
            return Refusal.CHECKSUM
        self._cache.write_block(block, part.data)
        # Only the copy tells what was copied. Damaged, it has not landed, and the next one replaces it.
        if part.is_shared and checksum(self._cache.view_block(block)) != part.checksum:
            return Refusal.CHECKSUM
        reservation.checksums[part.index] = part.checksum
        return None

    def _complete_if_filled(self, reservation: Reservation) -> None:
        if reservation.state is ReservationState.FILLING and reservation.is_filled:
            reservation.state = ReservationState.COMPLETE
            self._on_complete(reservation)
