"""Earliest deadline first, and a part for those that are late already."""

import math

from scheduling.owed_share import OwedShare
from scheduling.queue_policy import Ticket
from scheduling.ticket_heap import TicketHeap

# A request without a target is due so long after it came. Any finite time keeps it from starving; this is
# longer than targets are.
PATIENCE_S = 30.0


class EarliestDeadline(OwedShare):
    """Whose first token is due first goes first, among those that can still be in time.

    Plain earliest deadline first breaks down under overload: the late ones go first and make all others
    late. So what is late steps aside, is served in order of arrival when nothing else waits, and gets one
    token in `SHARE`.
    """

    def __init__(self) -> None:
        super().__init__(
            preferred=TicketHeap(lambda ticket: (_due_s(ticket), *ticket.age)),
            owed=TicketHeap(lambda ticket: ticket.age),
        )

    def push(self, ticket: Ticket) -> None:
        """See `QueuePolicy`."""
        self.set_aside(ticket.request_id)
        self._preferred.push(ticket)

    def _sort(self, now_s: float) -> None:
        while (ticket := self._preferred.first()) is not None and _due_s(ticket) < now_s:
            self._preferred.discard(ticket.request_id)
            self._owed.push(ticket)


def _due_s(ticket: Ticket) -> float:
    return ticket.arrived_s + PATIENCE_S if ticket.due_s == math.inf else ticket.due_s
