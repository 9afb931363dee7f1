"""Small tokenizers, made here, so that no test needs a model; and a service that follows a script."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from deploy import environment
from kvferry.config import RouterConfig
from kvferry.results import TokenLogprobs
from router.events import Delta, Finished, Request, RequestSpec
from router.http import HttpServer, build_app
from router.model_spec import ModelSpec
from router.output import OutputBuilder
from router.tokenizer import Tokenizer
from router.validation import validate

# Ray reads it when it is imported, and any test module may be the first that does.
environment.prepare()

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "Grüße aus München, ça va? naïve café — “quotes” … 你好世界 こんにちは 🙂🙃🤖",
    "def main():\n    return [x for x in range(10)]\n",
] * 8


def _byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: tokens are bytes, so characters are split over tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("a tool ü", special=False)])
    return tokenizer


def _byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's kind: spaces are part of tokens, characters out of vocabulary are runs of byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    pieces += [
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,!éß\ufffd",
        "he",
        "hel",
        "lo",
        "hello",
        "▁hello",
        "▁▁",
        "▁a",
    ]
    merges = [("h", "e"), ("he", "l"), ("l", "o"), ("hel", "lo"), ("▁", "hello"), ("▁", "▁"), ("▁", "a")]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


def _save(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, object]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "config.json").write_text(
        json.dumps(
            {"max_position_embeddings": 256, "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True)}
        )
    )
    return folder


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    return _save(tmp_path_factory.mktemp("byte_level"), _byte_level(), config)


@pytest.fixture(scope="session")
def byte_fallback_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _save(tmp_path_factory.mktemp("byte_fallback"), _byte_fallback(), config)


Script = Callable[[Request], AsyncGenerator[Delta | Finished, None]]


class ScriptedService:
    """What the router's servers call, with the real door and a script in place of workers.

    The script is an async generator; by default it answers `ANSWER`, one token at a time.
    """

    ANSWER = "The capital is Paris, naïve 🙂."

    def __init__(self, model_dir: Path) -> None:
        self.model_name = "tiny"
        self.tokenizer = Tokenizer.load(model_dir)
        self.model = ModelSpec.load(model_dir, self.model_name)
        self.script: Script = self.answer
        self.reason = ""
        self.requests: list[Request] = []
        self.started = asyncio.Event()
        self.closed = asyncio.Event()

    async def validate(self, spec: RequestSpec) -> Request:
        now_s = time.monotonic()
        return validate(spec, self.model, self.tokenizer, now_s=now_s, default_timeout_s=60)

    async def run(self, request: Request) -> AsyncGenerator[Delta | Finished, None]:
        self.requests.append(request)
        self.started.set()
        try:
            async for event in self.script(request):
                yield event
        finally:
            self.closed.set()

    async def answer(self, request: Request) -> AsyncGenerator[Delta | Finished, None]:
        builder = OutputBuilder(request, self.tokenizer)
        tokens = self.tokenizer.encode(self.ANSWER) + self.tokenizer.encode("<|im_end|>")
        for number, token_id in enumerate(tokens, 1):
            logprobs = [self.logprobs(token_id, request)] if request.sampling.logprobs else []
            ended = "stop" if number == len(tokens) else "length" if number == request.max_tokens else None
            yield builder.push([token_id], logprobs, ended)
            await asyncio.sleep(0)
            if builder.finish_reason is not None:
                break
        num_prompt_tokens = len(request.prompt_token_ids)
        yield Finished(builder.finish_reason, num_prompt_tokens, builder.num_output_tokens, [])

    def logprobs(self, token_id: int, request: Request) -> TokenLogprobs:
        top = [(token_id, -0.5), (token_id + 1, -1.5), (token_id + 2, float("-inf"))]
        return TokenLogprobs(token_id, -0.5, tuple(top[: request.sampling.top_logprobs]))

    def why_not_ready(self) -> str:
        return self.reason

    def metrics(self) -> bytes:
        return b"kvferry_requests_total 1\n"


@pytest.fixture
async def service(byte_level_dir: Path) -> ScriptedService:
    return ScriptedService(byte_level_dir)


@pytest.fixture
async def http_server(service: ScriptedService) -> AsyncIterator[HttpServer]:
    """Not started yet: its fixture's user, or `base_url`, does that."""
    app = build_app(service, RouterConfig(max_body_bytes=100_000))
    server = HttpServer(app, "127.0.0.1", 0)
    yield server
    await server.stop()


@pytest.fixture
async def base_url(http_server: HttpServer) -> str:
    return f"http://127.0.0.1:{await http_server.start()}"
