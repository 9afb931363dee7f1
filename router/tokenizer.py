"""Text to token ids and back, by the model's own tokenizer.json."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from kvferry.results import ChatMessage
from router.chat_template import ChatTemplate
from router.errors import InvalidRequest

# Above this the batch call, which lets other threads run meanwhile, is worth its overhead.
_SHORT_TEXT_CHARS = 4096

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A tokenizer and the chat template that belongs to it. Safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoders = _decoder_kinds(tokenizer)
        self.is_byte_level = decoders == {"ByteLevel"}
        if not self.is_byte_level and decoders & {"ByteLevel", "CTC"}:
            raise ValueError(
                f"tokenizer.json: a decoder made of {', '.join(sorted(decoders))} is not supported"
            )
        self._has_byte_tokens = "ByteFallback" in decoders
        self._bytes_by_char = _bytes_by_char() if self.is_byte_level else {}
        self._token_bytes: dict[int, bytes] = {}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        # Where each byte of the text ends up in some token, no token covers more characters than this.
        covers_all = self.is_byte_level or self._has_byte_tokens
        self.max_chars_per_token = max(map(len, vocabulary)) if covers_all else None

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """Reads tokenizer.json and the chat template.

        Raises `FileNotFoundError` without a tokenizer.json, `ValueError` for one that cannot be used.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{model_dir} holds no tokenizer.json (a fast tokenizer's file)")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # The library raises plain Exception.
        except Exception as error:
            raise ValueError(f"{path}: {error}") from error
        return cls(tokenizer, ChatTemplate.load(model_dir))

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be turned into prompts."""
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. About half a second a MB: long texts belong in a thread."""
        if len(text) <= _SHORT_TEXT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt's text for a conversation. Raises `InvalidRequest`."""
        if self._template is None:
            raise InvalidRequest(
                "messages", "the model has no chat template: use completions with a text or token ids"
            )
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The prompt for a conversation; the template writes the special tokens. Raises `InvalidRequest`."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no place in the text, such as an end token."""
        return token_id in self._special_ids

    def is_known(self, token_id: int) -> bool:
        """Whether the id stands for a token; models may have more ids than their tokenizers."""
        return self._name(token_id) != ""

    def is_byte(self, token_id: int) -> bool:
        """Whether a token is one raw byte (`<0xE2>`), whose text depends on its neighbours."""
        return self._has_byte_tokens and _BYTE_TOKEN.fullmatch(self._name(token_id)) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds in the middle of a text; a special token's is its name."""
        value = self._token_bytes.get(token_id)
        if value is None:
            value = self._token_bytes[token_id] = self._compute_token_bytes(token_id)
        return value

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for incomplete characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _compute_token_bytes(self, token_id: int) -> bytes:
        name = self._name(token_id)
        if self.is_byte_level:
            values = [self._bytes_by_char.get(char) for char in name]
            return bytes(v for v in values if v is not None) if None not in values else name.encode()
        if self.is_byte(token_id):
            return bytes.fromhex(name[3:5])
        # The first token of a text may lose its leading space, so the second of two is looked at.
        one = self._tokenizer.decode([token_id], skip_special_tokens=False)
        two = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return two[len(one) :].encode()

    def _name(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""


def _decoder_kinds(tokenizer: tokenizers.Tokenizer) -> set[str]:
    """The decoders in tokenizer.json but those that change nothing here, such as {"ByteLevel"}."""
    if tokenizer.decoder is None:
        return set()
    tree: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    kinds = {part["type"] for part in tree["decoders"]} if tree["type"] == "Sequence" else {tree["type"]}
    return kinds - {"Fuse"}


def _bytes_by_char() -> dict[str, int]:
    """The alphabet of byte-level vocabularies (GPT-2's).

    Bytes that print in Latin-1 stand for themselves, the others for the characters from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printing)]
    return {chr(v): v for v in printing} | {chr(256 + i): v for i, v in enumerate(others)}
