"""The order in which the requests of a queue are served: one interface, a class for each order.

A queue hands out turns. Whoever holds it asks for the `first`, gives that request what it can, says with
`charge` what it has got, and pushes it again with what remains, or removes it.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

# A request of a class without a weight of its own: each step of priority doubles it, up to so many steps.
_MAX_DOUBLINGS = 10


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request in a queue.

    num_tokens: prompt tokens still to compute for it. priority: higher goes first. weight: of its class's
    share; None: by its priority. arrived_s, due_s: when it came, and when it should have its first token,
    on one clock.
    """

    request_id: str
    num_tokens: int
    arrived_s: float
    priority: int = 0
    weight: float | None = None
    due_s: float = math.inf

    @property
    def share_weight(self) -> float:
        """The weight that counts."""
        if self.weight is not None:
            return self.weight
        return float(2.0 ** max(-_MAX_DOUBLINGS, min(_MAX_DOUBLINGS, self.priority)))

    @property
    def age(self) -> tuple[float, str]:
        """Sorts older first; ids break ties, so that every order is total."""
        return self.arrived_s, self.request_id


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is, and how many tokens it may have before the others are looked at again."""

    ticket: Ticket
    max_tokens: int


class QueuePolicy(ABC):
    """Who is next. The order depends on nothing but the calls; each takes O(log n). Not thread-safe."""

    @abstractmethod
    def push(self, ticket: Ticket) -> None:
        """Adds a request, or puts it in its place again with what has changed of it."""

    @abstractmethod
    def first(self, now_s: float) -> Turn | None:
        """The next turn; the request stays in the queue. None where nobody is in the order."""

    @abstractmethod
    def set_aside(self, request_id: str) -> None:
        """Leaves a request out of the order until it is pushed again; its class still waits."""

    @abstractmethod
    def remove(self, request_id: str) -> None:
        """Forgets a request; one that is not here is passed by."""

    @abstractmethod
    def charge(self, ticket: Ticket, num_tokens: int) -> None:
        """The first has got so many tokens. Comes before it is pushed again or removed."""
