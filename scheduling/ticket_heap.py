"""Tickets sorted by a key, any of which can leave."""

import heapq
from collections.abc import Callable
from typing import Any

from scheduling.queue_policy import Ticket

# Entries of tickets that have left stay in the heap until they come up, or until they are more than those
# that are here and this many.
_MAX_STALE = 32


class TicketHeap:
    """A priority queue of tickets by name; every operation takes O(log n), amortised."""

    def __init__(self, key: Callable[[Ticket], tuple[Any, ...]]) -> None:
        """`key` must be total: end it with the id."""
        self._key = key
        self._tickets: dict[str, Ticket] = {}
        self._heap: list[tuple[tuple[Any, ...], int, Ticket]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, ticket: Ticket) -> None:
        """Adds a ticket, or replaces the one of the same request."""
        self._tickets[ticket.request_id] = ticket
        self._num_pushed += 1  # Tickets themselves have no order.
        heapq.heappush(self._heap, (self._key(ticket), self._num_pushed, ticket))
        if len(self._heap) > 2 * len(self._tickets) + _MAX_STALE:
            self._heap = [
                (self._key(each), number, each) for number, each in enumerate(self._tickets.values())
            ]
            heapq.heapify(self._heap)

    def discard(self, request_id: str) -> None:
        """Takes a request's ticket out, if it is here."""
        self._tickets.pop(request_id, None)

    def first(self) -> Ticket | None:
        """The ticket with the smallest key, which stays; None where there is none."""
        while self._heap:
            ticket = self._heap[0][-1]
            if self._tickets.get(ticket.request_id) is ticket:
                return ticket
            heapq.heappop(self._heap)
        return None
