"""One prefill worker's scheduler under a clock of formulas: the very object that serves, and no engine."""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduling.allocator import BlockAllocator
from scheduling.prefill import PrefillScheduler
from scheduling.sequence import Scheduled, Sequence

BLOCK_SIZE = 16
NUM_BLOCKS = 8192
# About what a small model takes on one CPU core: for a step, for a token, and for a token of a thousand
# tokens of context.
STEP_S = 0.01
TOKEN_S = 0.0005
TOKEN_PER_1000_CONTEXT_S = 0.0001


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt that comes at a time."""

    at_s: float
    num_tokens: int
    priority: int = 0


def step_time_s(scheduled: Iterable[Scheduled]) -> float:
    """How long a step takes."""
    duration_s = STEP_S
    for chunk in scheduled:
        num_tokens = chunk.end - chunk.start
        context = (chunk.start + chunk.end) / 2
        duration_s += num_tokens * (TOKEN_S + TOKEN_PER_1000_CONTEXT_S * context / 1000)
    return duration_s


def run(
    scheduler: PrefillScheduler, allocator: BlockAllocator, arrivals: Iterable[Arrival], until_s: float
) -> list[float | None]:
    """TTFT of each arrival in order, in seconds; None where it had none by `until_s`."""
    waiting = sorted(enumerate(arrivals), key=lambda item: item[1].at_s)
    ttfts_s: list[float | None] = [None] * len(waiting)
    now_s = 0.0
    while now_s < until_s:
        while waiting and waiting[0][1].at_s <= now_s:
            number, arrival = waiting.pop(0)
            tokens = [0] * arrival.num_tokens
            scheduler.add(Sequence(str(number), tokens, len(tokens), arrival.priority, arrival.at_s))
        scheduled = scheduler.schedule(now_s)
        if not scheduled:
            if not waiting:
                break
            now_s = waiting[0][1].at_s
            continue
        now_s += step_time_s(scheduled)
        scheduler.advance(scheduled)
        for chunk in scheduled:
            if chunk.is_last:
                request_id = chunk.sequence.request_id
                allocator.free(request_id)
                ttfts_s[int(request_id)] = now_s - chunk.sequence.arrived_s
    return ttfts_s
