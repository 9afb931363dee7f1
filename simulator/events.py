"""What happens when, in simulated time."""

import heapq
from collections.abc import Callable


class Events:
    """A clock that jumps from one event to the next. Those of one moment come in the order they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_handled = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_set = 0

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Calls `action` when it is `at_s`, or now where that has passed."""
        self._num_set += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._num_set, action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now_s, _, action = heapq.heappop(self._heap)
            self.num_handled += 1
            action()
