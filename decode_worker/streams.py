"""New tokens on their way to the routers: gathered for each router, sent as one message a step."""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.engine import SampledToken
from engine.finish import FinishReason


@dataclass(frozen=True, slots=True)
class End:
    """The request with this lease generation has ended: for `reason`, with so many output tokens in all, or
    because of `error`."""

    generation: int
    reason: FinishReason | None = None
    num_output_tokens: int = 0
    error: str = ""


@dataclass(slots=True)
class StepTokens:
    """What has gathered for one router. The first three lists run in parallel, one entry a token.

    logprobs: (row in the lists, token).
    """

    generations: list[int] = field(default_factory=list)
    output_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, SampledToken]] = field(default_factory=list)
    ended: list[End] = field(default_factory=list)


class TokenStreams:
    """One gathering a router. A router that reads slowly gets several steps in one message, so that what
    waits for it is bounded by what its own requests may generate."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        """`notify(router_id)` says that there is something to take."""
        self._notify = notify
        self._gathered: dict[str, StepTokens] = {}

    def add(self, router_id: str, generation: int, output_index: int, token: SampledToken) -> None:
        """A new token of the request with this lease generation."""
        tokens = self._gathered.setdefault(router_id, StepTokens())
        if token.logprob is not None:
            tokens.logprobs.append((len(tokens.token_ids), token))
        tokens.generations.append(generation)
        tokens.output_indices.append(output_index)
        tokens.token_ids.append(token.token_id)

    def end(self, router_id: str, end: End) -> None:
        """A request of this router has ended."""
        self._gathered.setdefault(router_id, StepTokens()).ended.append(end)

    def flush(self) -> None:
        """Tells every router that has something."""
        for router_id in self._gathered:
            self._notify(router_id)

    def take(self, router_id: str) -> StepTokens | None:
        """What has gathered since it was last taken."""
        return self._gathered.pop(router_id, None)
