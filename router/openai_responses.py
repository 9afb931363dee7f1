"""OpenAI's response objects: one class for each of the two APIs."""

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

from kvferry.results import TokenLogprobs
from router.events import Delta, Finished
from router.tokenizer import Tokenizer

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

# OpenAI's stand-in for the logarithm of a probability too small to tell.
_MIN_LOGPROB = -9999.0
# Marks where an event's text goes; a model's name cannot hold it.
_TEXT_PLACE = "\0text\0"


class ResponseFormat(Protocol):
    """How one request's output looks to its client. Holds state: one object a response."""

    def whole(self, delta: Delta, finished: Finished) -> dict[str, Any]:
        """The response in one piece."""
        ...

    def opening(self) -> bytes:
        """What a stream starts with."""
        ...

    def chunk(self, delta: Delta) -> bytes:
        """New text, as server-sent events; empty where there is nothing to show."""
        ...

    def closing(self, finished: Finished, include_usage: bool) -> bytes:
        """What a stream that ended well ends with."""
        ...


class _Format:
    """What both APIs share. `created` is a Unix time."""

    id_prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(
        self, request_id: str, model: str, created: int, tokenizer: Tokenizer, include_usage: bool
    ) -> None:
        self._id = self.id_prefix + request_id.removeprefix("req-")
        self._model = model
        self._created = created
        self._tokenizer = tokenizer
        # Clients that asked for usage find the field in every chunk, empty until the last.
        self._chunk_extra: dict[str, Any] = {"usage": None} if include_usage else {}
        self._around_text = tuple(self._plain_chunk(_TEXT_PLACE).split(_encode(_TEXT_PLACE).encode()))

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _whole(self, choice: dict[str, Any], finished: Finished) -> dict[str, Any]:
        choice = {"index": 0, **choice, "finish_reason": finished.reason}
        return {**self._head(self.whole_kind), "choices": [choice], "usage": _usage(finished)}

    def _plain_chunk(self, text: str) -> bytes:
        """The event for text without log probabilities."""
        raise NotImplementedError

    def _text_event(self, text: str) -> bytes:
        """As `_plain_chunk`, which differs in the text alone: most of a router's work is these events."""
        before, after = self._around_text
        return before + _encode(text).encode() + after

    def _event(self, choice: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, **choice, "finish_reason": finish_reason}
        return event({**self._head(self.chunk_kind), "choices": [choice], **self._chunk_extra})

    def _end(self, finished: Finished, include_usage: bool) -> bytes:
        usage = {**self._head(self.chunk_kind), "choices": [], "usage": _usage(finished)}
        return (event(usage) if include_usage else b"") + b"data: [DONE]\n\n"


class ChatFormat(_Format):
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, delta: Delta, finished: Finished) -> dict[str, Any]:
        """See `ResponseFormat`."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._whole({"message": message, "logprobs": self._logprobs(delta.logprobs)}, finished)

    def opening(self) -> bytes:
        """See `ResponseFormat`."""
        return self._event({"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def chunk(self, delta: Delta) -> bytes:
        """See `ResponseFormat`."""
        if not delta.logprobs:
            return self._text_event(delta.text) if delta.text else b""
        return self._event({"delta": {"content": delta.text}, "logprobs": self._logprobs(delta.logprobs)})

    def _plain_chunk(self, text: str) -> bytes:
        return self._event({"delta": {"content": text}, "logprobs": None})

    def closing(self, finished: Finished, include_usage: bool) -> bytes:
        """See `ResponseFormat`."""
        last = self._event({"delta": {}, "logprobs": None}, finished.reason)
        return last + self._end(finished, include_usage)

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not tokens:
            return None
        content = [
            {
                **self._token(token.token_id, token.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        value = self._tokenizer.token_bytes(token_id)
        return {
            "token": value.decode("utf-8", "replace"),
            "logprob": max(logprob, _MIN_LOGPROB),
            "bytes": list(value),
        }


class CompletionFormat(_Format):
    """/v1/completions."""

    id_prefix = "cmpl-"
    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self, request_id: str, model: str, created: int, tokenizer: Tokenizer, include_usage: bool
    ) -> None:
        super().__init__(request_id, model, created, tokenizer, include_usage)
        # A token's offset is the number of characters that were complete before it.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def whole(self, delta: Delta, finished: Finished) -> dict[str, Any]:
        """See `ResponseFormat`."""
        return self._whole({"text": delta.text, "logprobs": self._logprobs(delta.logprobs)}, finished)

    def opening(self) -> bytes:
        """See `ResponseFormat`."""
        return b""

    def chunk(self, delta: Delta) -> bytes:
        """See `ResponseFormat`."""
        if not delta.logprobs:
            return self._text_event(delta.text) if delta.text else b""
        return self._event({"text": delta.text, "logprobs": self._logprobs(delta.logprobs)})

    def _plain_chunk(self, text: str) -> bytes:
        return self._event({"text": text, "logprobs": None})

    def closing(self, finished: Finished, include_usage: bool) -> bytes:
        """See `ResponseFormat`."""
        return self._event({"text": "", "logprobs": None}, finished.reason) + self._end(
            finished, include_usage
        )

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not tokens:
            return None
        return {
            "tokens": [self._tokenizer.token_text(token.token_id) for token in tokens],
            "token_logprobs": [max(token.logprob, _MIN_LOGPROB) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
            "text_offset": [self._next_offset(token.token_id) for token in tokens],
        }

    def _alternatives(self, token: TokenLogprobs) -> dict[str, float]:
        values: dict[str, float] = {}
        # The chosen token is always among them. Of tokens that look alike the likeliest is shown.
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            values.setdefault(self._tokenizer.token_text(token_id), max(logprob, _MIN_LOGPROB))
        return values

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value).encode() + b"\n\n"


def _usage(finished: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": finished.num_prompt_tokens,
        "completion_tokens": finished.num_output_tokens,
        "total_tokens": finished.num_prompt_tokens + finished.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.num_cached_tokens},
    }
