"""Two orders in one queue: one that goes first, and one that is owed a part, so that it never starves."""

import math
from abc import abstractmethod

from scheduling.queue_policy import QueuePolicy, Ticket, Turn
from scheduling.ticket_heap import TicketHeap

# The second order gets one token in so many.
SHARE = 4
# What it is owed is paid in pieces of at least so many tokens: a piece of a prompt costs a row of a step.
MIN_TURN_TOKENS = 16


class OwedShare(QueuePolicy):
    """Serves the first of one order; the first of another gets one token in `SHARE`."""

    def __init__(self, preferred: TicketHeap, owed: TicketHeap) -> None:
        self._preferred = preferred
        self._owed = owed
        self._owed_tokens = 0.0

    @abstractmethod
    def _sort(self, now_s: float) -> None:
        """Moves what time has moved from one order to the other."""

    def first(self, now_s: float) -> Turn | None:
        """See `QueuePolicy`."""
        self._sort(now_s)
        preferred, owed = self._preferred.first(), self._owed.first()
        if preferred is None:
            return None if owed is None else Turn(owed, owed.num_tokens)
        if owed is None or owed is preferred:
            return Turn(preferred, preferred.num_tokens)
        # A request that takes less than a turn need not wait until it is owed a whole one.
        if self._owed_tokens >= min(MIN_TURN_TOKENS, owed.num_tokens):
            return Turn(owed, math.ceil(self._owed_tokens))
        return Turn(preferred, preferred.num_tokens)

    def set_aside(self, request_id: str) -> None:
        """See `QueuePolicy`."""
        self._preferred.discard(request_id)
        self._owed.discard(request_id)

    def remove(self, request_id: str) -> None:
        """See `QueuePolicy`."""
        self.set_aside(request_id)

    def charge(self, ticket: Ticket, num_tokens: int) -> None:
        """See `QueuePolicy`."""
        owed = self._owed.first()
        if owed is None:
            self._owed_tokens = 0.0
        elif owed is self._preferred.first():
            return  # It was its turn in both orders.
        elif owed.request_id == ticket.request_id:
            self._owed_tokens = max(0.0, self._owed_tokens - num_tokens)
        else:
            self._owed_tokens += num_tokens / (SHARE - 1)
