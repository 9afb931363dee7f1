"""First come, first served."""

from scheduling.queue_policy import QueuePolicy, Ticket, Turn
from scheduling.ticket_heap import TicketHeap


class FirstCome(QueuePolicy):
    """In order of arrival, whatever the priority."""

    def __init__(self) -> None:
        self._tickets = TicketHeap(lambda ticket: ticket.age)

    def push(self, ticket: Ticket) -> None:
        """See `QueuePolicy`."""
        self._tickets.push(ticket)

    def first(self, now_s: float) -> Turn | None:
        """See `QueuePolicy`."""
        ticket = self._tickets.first()
        return None if ticket is None else Turn(ticket, ticket.num_tokens)

    def set_aside(self, request_id: str) -> None:
        """See `QueuePolicy`."""
        self._tickets.discard(request_id)

    def remove(self, request_id: str) -> None:
        """See `QueuePolicy`."""
        self._tickets.discard(request_id)

    def charge(self, ticket: Ticket, num_tokens: int) -> None:
        """See `QueuePolicy`."""
