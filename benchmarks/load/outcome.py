"""What one request of a load came to, as its client saw it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

TAIL_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """A request to send: the prompt's text, its length with all special tokens, and the output's length."""

    prompt: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, times on the monotonic clock.

    started_s: when it was sent; in an open loop, when it was due. event_times_s: arrivals of text, an event
    holding one token or several. num_output_tokens: as the server counted them. num_prompt_tokens_off: how
    many more prompt tokens the server counted than were meant. error: why it does not count as served;
    empty when it does.
    """

    started_s: float
    ended_s: float
    event_times_s: Sequence[float]
    num_output_tokens: int
    num_prompt_tokens_off: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.event_times_s[0] - self.started_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.event_times_s[-1] - self.started_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 for one token."""
        return (self.event_times_s[-1] - self.event_times_s[0]) / max(1, self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between events that follow each other."""
        return [later - earlier for earlier, later in pairwise(self.event_times_s)]

    @property
    def tail_tbt_s(self) -> float:
        """Tail time between tokens; see `tail_mean`."""
        return tail_mean(self.gaps_s)

    def num_tokens_between(self, begin_s: float, end_s: float) -> float:
        """Output tokens that arrived in [begin_s, end_s), an event counting as its share of the output."""
        if not self.event_times_s:
            return 0.0
        num_events = sum(begin_s <= at_s < end_s for at_s in self.event_times_s)
        return num_events * self.num_output_tokens / len(self.event_times_s)


def tail_mean(gaps_s: Sequence[float]) -> float:
    """The mean of the longest 10 % of gaps, of one at least; 0 where there are none."""
    if not gaps_s:
        return 0.0
    # Rounded first: 0.1 * 30 is a little more than 3.
    num = math.ceil(round(TAIL_SHARE * len(gaps_s), 9))
    return sum(sorted(gaps_s)[-num:]) / num


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets that one request must both meet. `str()` is for tables."""

    ttft_s: float
    tpot_s: float

    def is_met(self, outcome: Outcome) -> bool:
        """Whether it was served in time; what failed was not."""
        if outcome.error:
            return False
        return outcome.ttft_s <= self.ttft_s and outcome.tpot_s <= self.tpot_s

    def __str__(self) -> str:
        return f"TTFT {self.ttft_s * 1000:g} ms, TPOT {self.tpot_s * 1000:g} ms"
