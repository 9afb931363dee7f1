import json

import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import AutoTokenizer

from kvferry.models import demo_model_dir
from kvferry.results import ChatMessage
from router.errors import InvalidRequest
from router.model_spec import ModelSpec
from router.tokenizer import Tokenizer

TEXTS = ["hello", " hello  a", "naïve 🤖 你好", "<|im_end|> in the text", "\n\n\ttabs", "a" * 10_000]


@pytest.fixture(params=["byte_level", "byte_fallback", "demo"])
def model_dir(request):
    if request.param != "demo":
        return request.getfixturevalue(f"{request.param}_dir")
    if not demo_model_dir().is_dir():
        pytest.skip("the demo model is not here")
    return demo_model_dir()


def test_token_ids_are_those_of_transformers(model_dir):
    ours, theirs = Tokenizer.load(model_dir), AutoTokenizer.from_pretrained(model_dir)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)
        token_ids = ours.encode(text)
        assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)


def test_chats_are_tokenised_as_by_transformers(byte_level_dir):
    messages = [("system", "Be brief."), ("user", "<|im_end|>? Grüße 🙂")]
    ours = Tokenizer.load(byte_level_dir).encode_chat([ChatMessage(*each) for each in messages])
    theirs = AutoTokenizer.from_pretrained(byte_level_dir).apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert ours == theirs


def test_truncation_and_padding_in_the_file_do_not_cut_prompts(byte_level_dir, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(byte_level_dir / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "The capital of France is Paris, naïve café."
    assert Tokenizer.load(tmp_path).encode(text) == Tokenizer.load(byte_level_dir).encode(text)


def test_bytes_of_tokens_make_up_the_text(byte_level_dir, byte_fallback_dir):
    for folder, text in ((byte_level_dir, "Grüße 🙂 a tool ü <think>"), (byte_fallback_dir, "hello é🙂 a")):
        tokenizer = Tokenizer.load(folder)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, token_ids)).decode()
        # Sentencepiece tokenizers put a space in front of every text.
        assert joined.removeprefix(" ") == text


def test_text_of_single_tokens_is_as_it_stands_in_a_text(byte_fallback_dir):
    tokenizer = Tokenizer.load(byte_fallback_dir)
    tokens = tokenizers.Tokenizer.from_file(str(byte_fallback_dir / "tokenizer.json")).get_vocab()
    assert tokenizer.token_text(tokens["▁hello"]) == " hello"
    assert tokenizer.token_text(tokens["▁"]) == " "
    assert tokenizer.token_text(tokens["</s>"]) == "</s>"
    assert tokenizer.token_bytes(tokens["<0xE2>"]) == b"\xe2"
    assert tokenizer.token_text(tokens["<0xE2>"]) == "\ufffd"
    assert tokenizer.token_bytes(10**6) == b""


def test_no_token_covers_more_characters_than_the_bound(byte_level_dir):
    tokenizer = Tokenizer.load(byte_level_dir)
    assert tokenizer.max_chars_per_token is not None
    for text in TEXTS:
        assert len(text) <= tokenizer.max_chars_per_token * len(tokenizer.encode(text))


def test_a_chat_without_a_template_is_refused(byte_fallback_dir):
    tokenizer = Tokenizer.load(byte_fallback_dir)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template: use completions") as caught:
        tokenizer.encode_chat([ChatMessage("user", "hi")])
    assert caught.value.field == "messages"


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="CTC"):
        ctc = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
        ctc.decoder = decoders.CTC()
        Tokenizer(ctc, None)


def test_model_facts_come_from_the_text_part_of_the_configuration(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"max_position_embeddings": 128, "vocab_size": 500}))
    assert ModelSpec.load(tmp_path, "m") == ModelSpec("m", 128, 500)
    path.write_text(json.dumps({"text_config": {"max_position_embeddings": 64, "vocab_size": 7}}))
    assert ModelSpec.load(tmp_path, "m") == ModelSpec("m", 64, 7)
    path.write_text(json.dumps({"vocab_size": 7}))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        ModelSpec.load(tmp_path, "m")
