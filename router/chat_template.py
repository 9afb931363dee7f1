"""A model's chat template: a conversation in, the text of a prompt out."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.results import ChatMessage
from router.errors import InvalidRequest

# Far above any context; stops a template that multiplies its input.
_MAX_RENDERED_CHARS = 2**24


class ChatTemplate:
    """A compiled Jinja template with what templates expect to find around them.

    Renders the same text as transformers' `apply_chat_template(..., add_generation_prompt=True)`.
    Templates come with a model and run sandboxed: they see messages and special tokens, nothing else.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the model's chat template is no valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model_dir: Path) -> Self | None:
        """The template in chat_template.jinja or tokenizer_config.json; None where a model has none.

        Raises `ValueError` for a template that does not compile.
        """
        config = _read_json(model_dir / "tokenizer_config.json")
        jinja_path = model_dir / "chat_template.jinja"
        source = (
            jinja_path.read_text(encoding="utf-8")
            if jinja_path.is_file()
            else _default_template(config.get("chat_template"))
        )
        if source is None:
            return None
        return cls(source, _special_tokens({**_read_json(model_dir / "special_tokens_map.json"), **config}))

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, ending where the assistant's answer begins.

        Raises `InvalidRequest` when the template refuses the messages.
        """
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            ):
                num_chars += len(piece)
                if num_chars > _MAX_RENDERED_CHARS:
                    raise jinja2.TemplateError(f"more than {_MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
        # A template is foreign code that may trip over any message in any way.
        except Exception as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error}") from error
        return "".join(pieces)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only lets them through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values = json.loads(path.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) else {}


def _default_template(value: object) -> str | None:
    """`chat_template` is a string or a list of {"name", "template"}, of which "default" counts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("default")
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like: a string each, or an object with its `content`."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
