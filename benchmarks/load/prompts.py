"""Random texts that a server counts as exactly so many tokens."""

import random
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load.api import Api
from router.tokenizer import Tokenizer

# Words with their leading space: a pre-tokeniser splits before each, so that no two of them merge.
_WORD = re.compile(r" [A-Za-z]+")
_MAX_WORDS = 4096
_MAX_TRIES = 64


class Prompts:
    """Makes prompts for one model and one API. The same seed makes the same prompts."""

    def __init__(self, model_dir: Path, api: Api, seed: int = 0, num_shared_tokens: int = 0) -> None:
        """num_shared_tokens: so many leading tokens are the same in all prompts.

        Raises `FileNotFoundError` or `ValueError` for a tokenizer that cannot be used.
        """
        self._tokenizer = Tokenizer.load(model_dir)
        self._api = api
        self._seed = seed
        self._random = random.Random(f"{seed} prompts")
        self._words = self._find_words()
        self._num_added = api.count(self._tokenizer, self._words[0]) - 1
        self._shared = self._draw(random.Random(f"{seed} shared"), num_shared_tokens)

    @property
    def min_tokens(self) -> int:
        """The shortest prompt: one word and what the API adds."""
        return self._num_added + 1

    def prompt(self, num_tokens: int) -> str:
        """A prompt of that many tokens with those that the API adds. Raises `ValueError` if too few."""
        num_words = self._num_words(num_tokens)
        shared = self._shared[:num_words]
        for _ in range(_MAX_TRIES):
            words = [*shared, *self._draw(self._random, num_words - len(shared))]
            if text := self._checked("".join(words), num_tokens):
                return text
        raise ValueError(f"no text of {num_tokens} tokens was found for this tokenizer")

    def from_blocks(self, block_ids: Sequence[int], block_tokens: int, num_tokens: int) -> str:
        """A prompt of that many tokens whose blocks depend on their ids alone, as in a trace.

        The last block is cut, or filled up, to the length.
        """
        num_words = self._num_words(num_tokens)
        words: list[str] = []
        for block_id in block_ids:
            words += self._draw(random.Random(f"{self._seed} block {block_id}"), block_tokens)
        words += self._draw(self._random, max(0, num_words - len(words)))
        text = self._checked("".join(words[:num_words]), num_tokens)
        if not text:
            raise ValueError(f"a prompt of {num_tokens} tokens came out at another length")
        return text

    def _num_words(self, num_tokens: int) -> int:
        num_words = num_tokens - self._num_added
        if num_words < 1:
            raise ValueError(f"a prompt has at least {self.min_tokens} tokens here, not {num_tokens}")
        return num_words

    def _draw(self, source: random.Random, num: int) -> list[str]:
        return source.choices(self._words, k=num)

    def _checked(self, text: str, num_tokens: int) -> str:
        """The text, where it has that many tokens as it is or without its first space; else nothing."""
        for candidate in (text, text.lstrip(" ")):
            if self._api.count(self._tokenizer, candidate) == num_tokens:
                return candidate
        return ""

    def _find_words(self) -> list[str]:
        ids = list(range(self._tokenizer.vocab_size))
        random.Random(f"{self._seed} words").shuffle(ids)
        found: list[str] = []
        for token_id in ids:
            if not self._tokenizer.is_known(token_id) or self._tokenizer.is_special(token_id):
                continue
            text = self._tokenizer.token_text(token_id)
            if _WORD.fullmatch(text) and self._adds_one(text):
                found.append(text)
                if len(found) == _MAX_WORDS:
                    break
        if not found:
            raise ValueError("the tokenizer has no words that begin with a space")
        return found

    def _adds_one(self, word: str) -> bool:
        count = self._api.count
        return count(self._tokenizer, f"{word}{word}") - count(self._tokenizer, word) == 1
