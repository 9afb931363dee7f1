"""Shortest remaining prompt first, and a part for the oldest."""

from scheduling.owed_share import OwedShare
from scheduling.queue_policy import Ticket
from scheduling.ticket_heap import TicketHeap


class ShortestFirst(OwedShare):
    """The fewest remaining tokens first, which gives the smallest mean wait.

    A prompt ages into the oldest, which gets one token in `SHARE`: so a long prompt advances however many
    short ones come, and a short one still waits for at most a part of a long one.
    """

    def __init__(self) -> None:
        super().__init__(
            preferred=TicketHeap(lambda ticket: (ticket.num_tokens, *ticket.age)),
            owed=TicketHeap(lambda ticket: ticket.age),
        )

    def push(self, ticket: Ticket) -> None:
        """See `QueuePolicy`."""
        self._preferred.push(ticket)
        self._owed.push(ticket)

    def _sort(self, now_s: float) -> None:
        """Time moves nothing here."""
