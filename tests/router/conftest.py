"""Small tokenizers, made here, so that no test needs a model."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "Grüße aus München, ça va? naïve café — “quotes” … 你好，世界 こんにちは 🙂🙃🤖",
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
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,!éß\ufffd", "he", "hel", "lo", "hello", "▁hello", "▁▁", "▁a"]
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
