"""S8: three classes at twice what one worker can do, first come first served and with fair shares."""

import statistics
from random import Random

from benchmarks.policies.prefill_clock import BLOCK_SIZE, NUM_BLOCKS, STEP_S, TOKEN_S, Arrival, run
from benchmarks.policies.row import Row
from scheduling.allocator import BlockAllocator
from scheduling.prefill import PrefillScheduler
from scheduling.queue_policies import QUEUE_POLICIES

NUM_TOKENS, MAX_STEP_TOKENS = 256, 512
LOAD = 2.0


def measure(quick: bool) -> list[Row]:
    """P99 TTFT of the high class."""
    until_s = 30.0 if quick else 120.0
    generator = Random(0)
    rate = LOAD * MAX_STEP_TOKENS / (STEP_S + MAX_STEP_TOKENS * TOKEN_S) / NUM_TOKENS
    arrivals, at_s = [], 0.0
    while (at_s := at_s + generator.expovariate(rate)) < until_s:
        arrivals.append(Arrival(at_s, NUM_TOKENS, generator.choice((-3, 0, 3))))

    def ttfts_s(policy: str, priority: int) -> list[float]:
        allocator = BlockAllocator(NUM_BLOCKS)
        make = QUEUE_POLICIES[policy]
        scheduler = PrefillScheduler(allocator, BLOCK_SIZE, MAX_STEP_TOKENS, 10**6, make())
        # What has no first token by the end has waited until then at least.
        return [
            until_s - arrival.at_s if ttft_s is None else ttft_s
            for arrival, ttft_s in zip(arrivals, run(scheduler, allocator, arrivals, until_s), strict=True)
            if arrival.priority == priority
        ]

    before, after = (statistics.quantiles(ttfts_s(policy, 3), n=100)[98] for policy in ("fcfs", "priority"))
    return [
        Row(
            "S8",
            "simulated",
            f"P99 TTFT of the high one of three classes at {LOAD:g}x load, s",
            before,
            after,
            "first come first served",
            "classes with fair shares",
        )
    ]
