"""The door: what can be refused is refused here, with the field at fault, before any worker hears of it."""

import difflib
import math
import secrets
import time
import typing
import uuid
from collections.abc import Iterable, Iterator, Sequence

from pydantic import BaseModel, ValidationError

from kvferry.results import ChatMessage
from kvferry.sampling import SamplingParams
from router.errors import DeadlineExceeded, InvalidRequest, UnknownModel
from router.events import Request, RequestSpec
from router.model_spec import ModelSpec
from router.tokenizer import Tokenizer
from scheduling.block_hash import MAX_SALT_CHARS

MAX_PRIORITY = 100
MAX_LABEL_CHARS = 256
_MAX_ROLE_CHARS = 64
# Of a client's value, quoted in a message.
_MAX_QUOTED_CHARS = 80


def new_request_id() -> str:
    """An id that no other request ever has."""
    return f"req-{uuid.uuid4().hex}"


def validate(
    spec: RequestSpec, model: ModelSpec, tokenizer: Tokenizer, *, now_s: float, default_timeout_s: float
) -> Request:
    """A request that can be served: tokenised, with every default filled in.

    now_s: when it was received; `tokenised_s` and `deadline_s` are on the same clock. Long prompts take
    long: about half a second a MB, in which other threads run. Raises `InvalidRequest`, or
    `DeadlineExceeded` for a request that comes too late.
    """
    started_s = time.monotonic()
    if spec.model not in ("", model.name):
        raise UnknownModel("model", f"{_quoted(spec.model)} is not served here; {model.name!r} is")
    timeout_s = _timeout_s(spec.timeout_s, default_timeout_s)
    if abs(spec.priority) > MAX_PRIORITY:
        raise InvalidRequest("priority", f"{spec.priority} is not within -{MAX_PRIORITY} to {MAX_PRIORITY}")
    if len(spec.label) > MAX_LABEL_CHARS:
        raise InvalidRequest("label", f"{len(spec.label)} characters; at most {MAX_LABEL_CHARS} are taken")
    if len(spec.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequest("cache_salt", f"more than {MAX_SALT_CHARS} characters")
    _check_sampling(spec.sampling, model)
    field, prompt_token_ids = _tokenise(spec.prompt, model, tokenizer)
    max_tokens = _max_tokens(field, len(prompt_token_ids), spec.sampling, model)
    seed = spec.sampling.seed if spec.sampling.seed is not None else secrets.randbits(64)
    return Request(
        request_id=new_request_id(),
        prompt_token_ids=prompt_token_ids,
        sampling=spec.sampling.model_copy(update={"seed": seed, "max_tokens": max_tokens}),
        max_tokens=max_tokens,
        priority=spec.priority,
        label=spec.label,
        received_s=now_s,
        tokenised_s=now_s + time.monotonic() - started_s,
        deadline_s=now_s + timeout_s,
        cache_salt=spec.cache_salt,
    )


def explain(error: ValidationError, model: type[BaseModel] = SamplingParams) -> InvalidRequest:
    """The first fault that pydantic found in a `model`, in a client's words: the field, and why.

    An unknown field is met with the nearest known one.
    """
    fault = error.errors(include_url=False)[0]
    location = [part for part in fault["loc"] if part != "[key]"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if fault["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(
            str(location[-1]), _fields_at(model, location[:-1]), n=1, cutoff=0
        )
        return InvalidRequest(field, f"unknown field; the nearest known one is {nearest[0]!r}")
    if fault["type"] == "missing":
        return InvalidRequest(field, "required")
    return InvalidRequest(field or "body", f"{fault['msg']} (got {_quoted(fault['input'])})")


def _fields_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    for part in location:
        if isinstance(part, str):
            model = next(_models_in(model.model_fields[part].annotation))
    return list(model.model_fields)


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _timeout_s(timeout_s: float | None, default_timeout_s: float) -> float:
    if timeout_s is None:
        return default_timeout_s
    if not math.isfinite(timeout_s):
        raise InvalidRequest("timeout_s", f"{timeout_s} is not a number of seconds")
    if timeout_s <= 0:
        raise DeadlineExceeded("the deadline had passed when the request arrived")
    return timeout_s


def _check_sampling(sampling: SamplingParams, model: ModelSpec) -> None:
    """What the ranges in `SamplingParams` do not cover: the vocabulary and one field against another."""
    _check_vocabulary("stop_token_ids", sampling.stop_token_ids, model)
    _check_vocabulary("logit_bias", sampling.logit_bias, model)
    if sampling.top_logprobs and not sampling.logprobs:
        raise InvalidRequest("top_logprobs", "only together with logprobs")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            "min_tokens", f"{sampling.min_tokens} is more than max_tokens, which is {sampling.max_tokens}"
        )


def _check_vocabulary(field: str, token_ids: Iterable[int], model: ModelSpec) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                field, f"token id {token_id} is not in the vocabulary of {model.vocab_size} tokens"
            )


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field, f"not valid Unicode: a lone surrogate at character {error.start}"
        ) from error


def _tokenise(
    prompt: str | Sequence[ChatMessage] | Sequence[int], model: ModelSpec, tokenizer: Tokenizer
) -> tuple[str, list[int]]:
    """The prompt's field and its token ids; at least one."""
    if not prompt:
        raise InvalidRequest("prompt", "empty: give a text, messages or token ids")
    if isinstance(prompt, str):
        _check_text("prompt", prompt, model, tokenizer)
        token_ids = tokenizer.encode(prompt)
        if not token_ids:
            raise InvalidRequest("prompt", "empty: it has no tokens")
        return "prompt", token_ids
    messages = [item for item in prompt if isinstance(item, ChatMessage)]
    if messages:
        return "messages", _tokenise_chat(messages, model, tokenizer)
    token_ids = [item for item in prompt if isinstance(item, int)]
    _check_vocabulary("prompt", token_ids, model)
    return "prompt", token_ids


def _tokenise_chat(messages: Sequence[ChatMessage], model: ModelSpec, tokenizer: Tokenizer) -> list[int]:
    for index, message in enumerate(messages):
        if not message.role or len(message.role) > _MAX_ROLE_CHARS:
            raise InvalidRequest(f"messages[{index}].role", f"1 to {_MAX_ROLE_CHARS} characters")
        _check_unicode(f"messages[{index}].role", message.role)
        _check_text(f"messages[{index}].content", message.content, model, tokenizer)
    text = tokenizer.render_chat(messages)
    _check_text("messages", text, model, tokenizer)
    return tokenizer.encode(text, add_special_tokens=False)


def _check_text(field: str, text: str, model: ModelSpec, tokenizer: Tokenizer) -> None:
    """Refuses at once what would take long to tokenise and then not fit."""
    _check_unicode(field, text)
    if tokenizer.max_chars_per_token is None:
        return
    max_chars = model.context_length * tokenizer.max_chars_per_token
    if len(text) > max_chars:
        raise InvalidRequest(
            field,
            f"{len(text)} characters cannot fit the context length of {model.context_length} tokens",
        )


def _max_tokens(field: str, num_prompt_tokens: int, sampling: SamplingParams, model: ModelSpec) -> int:
    """The most tokens to generate: what was asked for, else what the context leaves."""
    left = model.context_length - num_prompt_tokens
    if left < 1:
        raise InvalidRequest(
            field,
            f"{num_prompt_tokens} tokens leave no room for output in the context length of"
            f" {model.context_length}",
        )
    if sampling.max_tokens is None:
        if sampling.min_tokens > left:
            raise InvalidRequest(
                "min_tokens",
                f"{sampling.min_tokens} do not fit: {num_prompt_tokens} tokens of prompt leave {left} in"
                f" the context length of {model.context_length}",
            )
        return left
    if sampling.max_tokens > left:
        raise InvalidRequest(
            "max_tokens",
            f"{num_prompt_tokens} tokens of prompt and {sampling.max_tokens} of output make"
            f" {num_prompt_tokens + sampling.max_tokens}, over the context length of {model.context_length}",
        )
    return sampling.max_tokens


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."
