"""When requests are due in an open loop: at random at a rate, or as a trace says."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load.outcome import Job
from benchmarks.load.prompts import Prompts

# Of a Mooncake trace.
TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the seconds after the load's beginning at which it is due."""

    at_s: float
    job: Job


def poisson_times_s(rate: float, duration_s: float, max_requests: int, seed: int = 0) -> list[float]:
    """Times of a Poisson process of `rate` a second, from 0 to `duration_s`, at most `max_requests`."""
    source = random.Random(f"{seed} arrivals")
    times_s: list[float] = []
    at_s = source.expovariate(rate)
    while at_s < duration_s and len(times_s) < max_requests:
        times_s.append(at_s)
        at_s += source.expovariate(rate)
    return times_s


@dataclass(frozen=True, slots=True)
class Trace:
    """A Mooncake trace and how it is scaled to a model and a machine.

    length_scale: factor on all lengths, the blocks' included. time_scale: factor on the times between
    requests. max_tokens: of prompt and output together; a longer prompt loses its end.
    """

    path: Path
    length_scale: float
    time_scale: float
    max_tokens: int

    def arrivals(self, prompts: Prompts, duration_s: float, max_requests: int) -> Iterator[Arrival]:
        """Its requests until `duration_s`, at most so many. Equal block ids make equal texts.

        Raises `OSError`, `ValueError` or `KeyError` for a file that is no such trace.
        """
        block_tokens = max(1, round(TRACE_BLOCK_TOKENS * self.length_scale))
        first_ms: float | None = None
        with self.path.open(encoding="utf-8") as lines:
            for _, line in zip(range(max_requests), lines, strict=False):
                row = json.loads(line)
                first_ms = row["timestamp"] if first_ms is None else first_ms
                at_s = (row["timestamp"] - first_ms) / 1000 * self.time_scale
                if at_s >= duration_s:
                    return
                yield Arrival(at_s, self._job(prompts, row, block_tokens))

    def _job(self, prompts: Prompts, row: dict[str, Sequence[int]], block_tokens: int) -> Job:
        num_input, num_output = (self._scaled(row[name]) for name in ("input_length", "output_length"))
        num_output = min(num_output, self.max_tokens // 2)
        # With what an API adds, the shortest prompts would have no room.
        num_input = min(max(num_input, prompts.min_tokens), self.max_tokens - num_output)
        text = prompts.from_blocks(row["hash_ids"], block_tokens, num_input)
        return Job(text, num_input, num_output)

    def _scaled(self, length: object) -> int:
        assert isinstance(length, int)
        return max(1, round(length * self.length_scale))
