"""S1: a short prompt behind a long one, with and without chunks."""

import statistics

from benchmarks.policies.prefill_clock import BLOCK_SIZE, NUM_BLOCKS, Arrival, run
from benchmarks.policies.row import Row
from scheduling.allocator import BlockAllocator
from scheduling.prefill import PrefillScheduler

CHUNK = 256
LONG, SHORT = 8000, 100


def measure(quick: bool) -> list[Row]:
    """Mean TTFT of short prompts that come while a long one runs."""
    num_rounds = 2 if quick else 10
    arrivals = [Arrival(30.0 * i, LONG) for i in range(num_rounds)]
    arrivals += [Arrival(30.0 * i + 0.3 * j, SHORT) for i in range(num_rounds) for j in range(1, 10)]

    def short_ttft_s(max_step_tokens: int) -> float:
        allocator = BlockAllocator(NUM_BLOCKS)
        scheduler = PrefillScheduler(allocator, BLOCK_SIZE, max_step_tokens, max_waiting=10**6)
        ttfts_s = run(scheduler, allocator, arrivals, until_s=60.0 * num_rounds)
        return statistics.fmean(ttft_s for ttft_s in ttfts_s[num_rounds:] if ttft_s is not None)

    return [
        Row(
            "S1",
            "simulated",
            f"mean TTFT of {SHORT}-token prompts beside one of {LONG}, s",
            short_ttft_s(LONG + SHORT),
            short_ttft_s(CHUNK),
            "whole prompts",
            f"chunks of {CHUNK}",
        )
    ]
