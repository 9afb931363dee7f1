"""The queue policies by the names that a configuration gives them."""

from collections.abc import Callable, Mapping

from scheduling.earliest_deadline import EarliestDeadline
from scheduling.fair_shares import FairShares
from scheduling.first_come import FirstCome
from scheduling.queue_policy import QueuePolicy
from scheduling.shortest_first import ShortestFirst

QUEUE_POLICIES: Mapping[str, Callable[[], QueuePolicy]] = {
    "priority": lambda: FairShares(ShortestFirst),
    "fcfs": FirstCome,
    "shortest": ShortestFirst,
    "deadline": EarliestDeadline,
}
