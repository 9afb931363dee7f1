"""What a client sends and gets, as plain values, and how they stand in the protos."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from kvferry.sampling import SamplingParams
from kvferry.v1 import admin_pb2, common_pb2, inference_pb2

FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode"]

_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat; `role` is system, user or assistant."""

    role: str
    content: str


Prompt = str | Sequence[ChatMessage] | Sequence[int]
"""Plain text, a chat (turned into text by the model's chat template), or token ids."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one output position; `top` is (token id, value), likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What was generated since the last one. Text may lag behind the ids.

    logprobs: one entry a token where they were asked for, else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a request. num_cached_tokens: of the prompt, whose KV was reused."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in a request's life: `at_s` seconds after it was received; `worker_id` "" is the router."""

    name: str
    at_s: float
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A whole output."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage
    moments: tuple[Moment, ...]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker as the router sees it.

    incompatible: why it is not used, "" where it is. num_free_blocks: held by no request; they may have
    content that a later one can reuse.
    """

    worker_id: str
    role: Role
    address: str
    epoch: int
    incompatible: str
    num_waiting: int
    num_running: int
    num_pending_tokens: int
    num_free_blocks: int
    num_blocks: int
    report_age_s: float


@dataclass(frozen=True, slots=True)
class Pools:
    """The router and its workers."""

    model: str
    num_requests: int
    num_queued: int
    workers: tuple[WorkerInfo, ...]


class Collector:
    """Reads the events of one stream: passes deltas on and puts the result together."""

    def __init__(self) -> None:
        self.request_id = ""
        self.result: Result | None = None
        self._model = ""
        self._deltas: list[Delta] = []

    def take(self, event: inference_pb2.GenerateResponse) -> Delta | None:
        """The delta in an event, if that is what it is."""
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.request_id, self._model = event.accepted.request_id, event.accepted.model
        elif kind == "delta":
            self._deltas.append(_delta(event.delta))
            return self._deltas[-1]
        elif kind == "finished":
            self.result = self._finish(event.finished)
        return None

    def _finish(self, finished: inference_pb2.Finished) -> Result:
        usage = finished.usage
        return Result(
            request_id=self.request_id,
            model=self._model,
            text="".join(delta.text for delta in self._deltas),
            token_ids=tuple(i for delta in self._deltas for i in delta.token_ids),
            logprobs=tuple(entry for delta in self._deltas for entry in delta.logprobs),
            finish_reason=_FINISH_REASONS[finished.finish_reason],
            usage=Usage(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens),
            moments=tuple(Moment(m.name, m.at_s, m.worker_id) for m in finished.moments),
        )


def to_request(
    prompt: Prompt,
    sampling: SamplingParams | None,
    *,
    model: str,
    priority: int,
    label: str,
    cache_salt: str = "",
) -> inference_pb2.GenerateRequest:
    """The message for a request. Raises `ValueError` for what no message can hold."""
    try:
        request = inference_pb2.GenerateRequest(
            model=model, priority=priority, label=label, cache_salt=cache_salt
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"model, priority, label or cache_salt: {error}") from error
    request.sampling.CopyFrom(common_pb2.SamplingParams(**(sampling or SamplingParams()).to_fields()))
    try:
        _set_prompt(request, prompt)
    except (ValueError, TypeError) as error:
        raise ValueError(f"prompt: {error}") from error
    return request


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif not prompt:
        raise ValueError("empty")
    elif isinstance(prompt[0], ChatMessage):
        request.chat.messages.extend(_chat_message(message) for message in prompt)
    else:
        request.token_ids.ids.extend(cast(Sequence[int], prompt))


def _chat_message(message: ChatMessage | int) -> inference_pb2.ChatMessage:
    if not isinstance(message, ChatMessage):
        raise TypeError(f"a chat holds nothing but ChatMessage, not {message!r}")
    return inference_pb2.ChatMessage(role=message.role, content=message.content)


def _delta(delta: inference_pb2.Delta) -> Delta:
    logprobs = tuple(
        TokenLogprobs(token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
        for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False)
    )
    return Delta(delta.text, tuple(delta.token_ids), logprobs)


def to_pools(response: admin_pb2.ListWorkersResponse) -> Pools:
    """The pools in a message."""
    workers = tuple(_worker(status) for status in response.workers)
    return Pools(response.model, response.num_requests, response.num_queued, workers)


def _worker(status: admin_pb2.WorkerStatus) -> WorkerInfo:
    registration, load = status.registration, status.load
    return WorkerInfo(
        worker_id=registration.worker_id,
        role="prefill" if registration.role == common_pb2.ROLE_PREFILL else "decode",
        address=registration.address,
        epoch=registration.epoch,
        incompatible=status.incompatible,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_pending_tokens=load.num_pending_tokens,
        num_free_blocks=load.blocks.free + load.blocks.cached,
        num_blocks=load.blocks.total,
        report_age_s=status.report_age_s,
    )
