"""Classes of priority: the higher first, but each gets at least its share while it waits.

Each class has a virtual time: the tokens that it has got over its weight. The queue's own is that at which
the last turn began, so a class behind it has had less than its weight's part. Start-time fair queueing
(Goyal, Vin and Cheng, SIGCOMM'96) would always serve the class that is furthest behind. Here the highest
class goes first, and a lower one only when it is behind by `MAX_BEHIND_TOKENS`. So a burst of the high class
goes at once, and where it takes more than its share for long, the shares are as the weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduling.queue_policy import QueuePolicy, Ticket, Turn

# How far a waiting class may fall behind its share: a chunk or so. Less would cut the steps of the high
# class into pieces; more would let the low one wait longer and then take as much at once.
MAX_BEHIND_TOKENS = 256

_Key = tuple[int, float]


@dataclass(slots=True)
class _Class:
    """The requests of one priority and weight. request_ids: all that wait, in the order or set aside."""

    weight: float
    queue: QueuePolicy
    virtual_time: float = 0.0
    request_ids: set[str] = field(default_factory=set)


class FairShares(QueuePolicy):
    """Classes by priority and weight, each with a queue of its own."""

    def __init__(self, make_queue: Callable[[], QueuePolicy]) -> None:
        """`make_queue`: the order within a class."""
        self._make_queue = make_queue
        self._classes: dict[_Key, _Class] = {}
        # Highest first. Priorities and weights are few, so this is not counted in O(log n).
        self._ranking: list[_Key] = []
        self._key_of: dict[str, _Key] = {}
        self._virtual_time = 0.0

    def push(self, ticket: Ticket) -> None:
        """See `QueuePolicy`."""
        key = (ticket.priority, ticket.share_weight)
        if self._key_of.get(ticket.request_id, key) != key:
            self.remove(ticket.request_id)
        its_class = self._classes.get(key)
        if its_class is None:
            its_class = self._classes[key] = _Class(ticket.share_weight, self._make_queue())
            self._ranking = sorted(self._classes, reverse=True)
        if not its_class.request_ids:
            # Nothing is owed to it for the time that it was not there.
            its_class.virtual_time = max(its_class.virtual_time, self._virtual_time)
        its_class.request_ids.add(ticket.request_id)
        its_class.queue.push(ticket)
        self._key_of[ticket.request_id] = key

    def first(self, now_s: float) -> Turn | None:
        """See `QueuePolicy`."""
        highest: Turn | None = None
        for key in self._ranking:
            its_class = self._classes[key]
            turn = its_class.queue.first(now_s) if its_class.request_ids else None
            if turn is None:
                continue
            behind = its_class.weight * (self._virtual_time - its_class.virtual_time)
            if behind >= MAX_BEHIND_TOKENS and highest is not None:
                return Turn(turn.ticket, min(turn.max_tokens, math.ceil(behind)))
            highest = highest or turn
        return highest

    def set_aside(self, request_id: str) -> None:
        """See `QueuePolicy`."""
        if key := self._key_of.get(request_id):
            self._classes[key].queue.set_aside(request_id)

    def remove(self, request_id: str) -> None:
        """See `QueuePolicy`."""
        if key := self._key_of.pop(request_id, None):
            self._classes[key].request_ids.discard(request_id)
            self._classes[key].queue.remove(request_id)

    def charge(self, ticket: Ticket, num_tokens: int) -> None:
        """See `QueuePolicy`."""
        its_class = self._classes[self._key_of[ticket.request_id]]
        its_class.queue.charge(ticket, num_tokens)
        self._virtual_time = max(self._virtual_time, its_class.virtual_time)
        its_class.virtual_time += num_tokens / its_class.weight
