"""Token ids to text, a few at a time: only text that later tokens can no longer change comes out."""

import codecs
from collections.abc import Iterable, Sequence

from router.tokenizer import Tokenizer


class Detokenizer:
    """The text of one output as it grows.

    All that `push` and `flush` return, put together, is the text of the whole output without special
    tokens. An output that goes on from a prompt's text keeps its leading space; one that starts after a
    special token, or after nothing, starts a text of its own and loses it where the tokenizer says so.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = (
            _ByteLevel(tokenizer)
            if tokenizer.is_byte_level
            else _Window(tokenizer, _context(tokenizer, prompt_token_ids))
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that is certain by now and was not returned yet."""
        return self._decoder.push([i for i in token_ids if not self._tokenizer.is_special(i)])

    def flush(self) -> str:
        """The rest, U+FFFD for characters that stayed incomplete. Nothing may be pushed afterwards."""
        return self._decoder.flush()


class _ByteLevel:
    """Tokens are bytes; an incomplete character waits for the rest of its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: list[int]) -> str:
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """A token's text depends on being first or not, and a byte token's on the whole run of byte tokens.

    So each push decodes the new tokens together with those of the push before, and takes that part away.
    A run of byte tokens waits for its end: one invalid byte turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._token_ids = context
        # The text of token_ids[:num_done] is out.
        self._num_done = len(context)

    def push(self, token_ids: list[int]) -> str:
        token_ids = [i for i in token_ids if self._tokenizer.is_known(i)]
        self._token_ids += token_ids
        if not token_ids or self._tokenizer.is_byte(token_ids[-1]):
            return ""
        return self.flush()

    def flush(self) -> str:
        before = self._tokenizer.decode(self._token_ids[: self._num_done])
        text = self._tokenizer.decode(self._token_ids)[len(before) :]
        if text:
            del self._token_ids[: self._num_done]
            self._num_done = len(self._token_ids)
        return text


def _context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """The prompt's last token that is no byte; a special one, having no text, is no context at all."""
    for token_id in reversed(prompt_token_ids):
        if tokenizer.is_known(token_id) and not tokenizer.is_byte(token_id):
            return [token_id]
    return []
