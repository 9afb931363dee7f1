"""OpenAI's request bodies, with our extensions, and what becomes of them.

Beside OpenAI's fields all of `SamplingParams` can be set, `priority`, and `cache_salt` (vLLM's name). A field
set to null has its default. Fields of OpenAI's that are not supported may only ask for what happens anyway.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from kvferry.results import ChatMessage
from kvferry.sampling import MAX_TOP_LOGPROBS, SamplingParams
from router.errors import InvalidRequest
from router.events import RequestSpec
from router.validation import explain

# OpenAI's own default of /v1/completions; /v1/chat/completions takes what the context leaves.
DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool = False


class _Message(BaseModel):
    """One message of a chat; its content is text, or a list of text parts that are joined."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class _Body(SamplingParams):
    """What both kinds of request have in common."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "n": (1,),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
    }

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""
    priority: int = 0
    cache_salt: str = ""

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """A body as it came over the wire. Raises `InvalidRequest`."""
        try:
            values = from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise InvalidRequest("body", f"not valid JSON in UTF-8: {error}") from error
        if not isinstance(values, dict):
            raise InvalidRequest("body", "not a JSON object")
        try:
            body = cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, cls) from error
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options", "only together with stream")
        return body

    @model_validator(mode="before")
    @classmethod
    def _from_wire(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = {name: value for name, value in values.items() if value is not None}
        for name in cls.unsupported.keys() & values.keys():
            _check_unsupported(name, values.pop(name), cls.unsupported[name])
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        if isinstance(values.get("logit_bias"), dict):
            values["logit_bias"] = _by_token_id(values["logit_bias"])
        seed = values.get("seed")
        # OpenAI's seeds are signed; each is told apart as before.
        if type(seed) is int and -(2**63) <= seed < 0:
            values["seed"] = seed + 2**64
        return cls._translate(values)

    @classmethod
    def _translate(cls, values: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the count of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self, **changes: Any) -> SamplingParams:
        fields = {name: getattr(self, name) for name in SamplingParams.model_fields}
        return SamplingParams.model_validate(fields | changes)

    def spec(self) -> RequestSpec:
        """The request, free of OpenAI's shape."""
        raise NotImplementedError

    def in_clients_words(self, error: InvalidRequest) -> InvalidRequest:
        """A fault found later, under the name of the field in this body."""
        return _renamed(error, "user") if error.field == "label" else error


class ChatBody(_Body):
    """The body of /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_Body.unsupported,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "web_search_options": (),
    }

    messages: list[_Message] = Field(min_length=1)
    # OpenAI's newer name for max_tokens.
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)

    @classmethod
    def _translate(cls, values: dict[str, Any]) -> dict[str, Any]:
        if isinstance(values.get("messages"), list):
            values["messages"] = [_message(i, message) for i, message in enumerate(values["messages"])]
        if "max_tokens" in values and "max_completion_tokens" in values:
            raise InvalidRequest("max_tokens", "means the same as max_completion_tokens: give one of them")
        return values

    def spec(self) -> RequestSpec:
        """The request; `developer` is OpenAI's newer word for `system`."""
        roles = {"developer": "system"}
        messages = [ChatMessage(roles.get(m.role, m.role), m.content) for m in self.messages]
        max_tokens = self.max_completion_tokens or self.max_tokens
        sampling = self._sampling(max_tokens=max_tokens)
        return RequestSpec(
            messages, sampling, self.model, self.priority, self.user, cache_salt=self.cache_salt
        )

    def in_clients_words(self, error: InvalidRequest) -> InvalidRequest:
        """See `_Body`."""
        if error.field == "max_tokens" and self.max_completion_tokens is not None:
            return _renamed(error, "max_completion_tokens")
        return super().in_clients_words(error)


class CompletionBody(_Body):
    """The body of /v1/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_Body.unsupported,
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: str | list[int]

    @classmethod
    def _translate(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "top_logprobs" in values:
            raise InvalidRequest("top_logprobs", "unknown field; here logprobs is a number of alternatives")
        if "logprobs" in values:
            values["top_logprobs"] = _num_alternatives(values["logprobs"])
            values["logprobs"] = True
        if "prompt" in values:
            values["prompt"] = _prompt(values["prompt"])
        return values

    def spec(self) -> RequestSpec:
        """The request, of 16 tokens (or min_tokens, if more) where it does not say how many."""
        max_tokens = self.max_tokens or max(DEFAULT_COMPLETION_TOKENS, self.min_tokens)
        sampling = self._sampling(max_tokens=max_tokens)
        return RequestSpec(
            self.prompt, sampling, self.model, self.priority, self.user, cache_salt=self.cache_salt
        )


def _renamed(error: InvalidRequest, field: str) -> InvalidRequest:
    return InvalidRequest(field, str(error).removeprefix(f"{error.field}: "))


def _check_unsupported(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if any(type(value) is type(other) and value == other for other in allowed):
        return
    only = f"; only {' or '.join(map(repr, allowed))} is" if allowed else ""
    raise InvalidRequest(name, f"not supported here{only}")


def _by_token_id(biases: Mapping[str, object]) -> dict[int, object]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise InvalidRequest("logit_bias", f"{name[:40]!r} is not a token id")
    return {int(name): bias for name, bias in biases.items()}


def _message(index: int, message: object) -> object:
    if not isinstance(message, dict):
        return message
    # Answers come back with the fields that OpenAI's client gives them, such as `tool_calls`, set to null.
    message = {name: value for name, value in message.items() if value is not None}
    if isinstance(message.get("content"), list):
        field = f"messages[{index}].content"
        message["content"] = "".join(_part(f"{field}[{i}]", p) for i, p in enumerate(message["content"]))
    return message


def _part(field: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequest(field, 'only parts of type "text" are supported')
    if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise InvalidRequest(field, 'a text part has "type" and "text", a string, and nothing else')
    return part["text"]


def _num_alternatives(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidRequest("logprobs", f"not a number of alternatives from 0 to {MAX_TOP_LOGPROBS}")
    return value


def _prompt(value: object) -> str | list[int]:
    """A text or token ids; as one element of a list too, as OpenAI takes several prompts at once."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest("prompt", "neither a text nor a list of token ids")
    if value and all(isinstance(item, str | list) for item in value):
        raise InvalidRequest("prompt", f"{len(value)} prompts; one a request is supported")
    if not all(type(item) is int for item in value):
        raise InvalidRequest("prompt", "a list of anything but token ids")
    return value
