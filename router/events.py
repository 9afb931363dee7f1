"""What the router knows of a request and tells its client, free of gRPC and HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvferry.results import ChatMessage, FinishReason, Moment, TokenLogprobs
from kvferry.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a client asks for, not yet validated beyond its types.

    prompt: text, a chat, or token ids. timeout_s: None where the client brings no deadline. cache_salt: KV
    is reused only among requests with the same one.
    """

    prompt: str | Sequence[ChatMessage] | Sequence[int]
    sampling: SamplingParams
    model: str = ""
    priority: int = 0
    label: str = ""
    timeout_s: float | None = None
    cache_salt: str = field(default="", repr=False)

    @property
    def num_chars(self) -> int:
        """Characters to tokenise."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(item.content) for item in self.prompt if isinstance(item, ChatMessage))


@dataclass(frozen=True, slots=True)
class Request:
    """A request that can be served: validated, tokenised, every default filled in."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    priority: int
    label: str
    received_s: float
    tokenised_s: float
    deadline_s: float
    cache_salt: str = field(default="", repr=False)

    def bounded(self, max_tokens: int) -> "Request":
        """The same request for at most so many tokens, but at least one."""
        max_tokens = max(1, min(max_tokens, self.max_tokens))
        sampling = self.sampling.model_copy(update={"max_tokens": max_tokens})
        return replace(self, sampling=sampling, max_tokens=max_tokens)


@dataclass(frozen=True, slots=True)
class Delta:
    """What was generated since the last one. Text may lag behind the ids."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request that ended well. num_cached_tokens: of the prompt, whose KV was reused."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    moments: list[Moment]
    num_cached_tokens: int = 0
