"""The least loaded workers of a pool, found without looking at all of them."""

import heapq
from collections.abc import Mapping

# Enough for placement to choose by more than the load that sorts them. A pool no larger is always whole.
MAX_SHORTLIST = 8


class Shortlist:
    """Kept up to date at each change of a worker's load; both calls take O(log n), amortised."""

    def __init__(self, loads: Mapping[str, float]) -> None:
        """loads: of all workers, on one scale."""
        self._loads: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._num_changes = 0
        for worker_id, load in loads.items():
            self.put(worker_id, load)

    def put(self, worker_id: str, load: float) -> None:
        """This is the worker's load from now on. Of equals, who has changed longest ago comes first."""
        self._num_changes += 1
        self._loads[worker_id] = load, self._num_changes
        heapq.heappush(self._heap, (load, self._num_changes, worker_id))

    def best(self) -> list[str]:
        """The `MAX_SHORTLIST` least loaded, the least first."""
        entries: list[tuple[float, int, str]] = []
        while self._heap and len(entries) < MAX_SHORTLIST:
            entry = heapq.heappop(self._heap)
            if self._loads[entry[2]] == entry[:2]:  # Others are of a former load.
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return [entry[2] for entry in entries]
