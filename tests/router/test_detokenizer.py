import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from kvferry.models import demo_model_dir
from router.detokenizer import Detokenizer
from router.tokenizer import Tokenizer


def wordpiece() -> Tokenizer:
    pieces = ["[UNK]", "the", "cat", "##s", "##ly", "dog", "!"]
    library = Library(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(library, None)


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁the", "▁", "▁▁", "cat", "é"]
    library = Library(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    library.decoder = decoders.Metaspace()
    return Tokenizer(library, None)


@pytest.fixture(
    scope="module", params=["byte_level", "byte_fallback", "wordpiece", "metaspace", "no decoder", "demo"]
)
def tokenizer(request):
    match request.param:
        case "wordpiece":
            return wordpiece()
        case "metaspace":
            return metaspace()
        case "no decoder":
            return Tokenizer(Library(models.WordLevel({"a": 0, "b": 1, "\ufffd": 2}, "a")), None)
        case "demo":
            if not demo_model_dir().is_dir():
                pytest.skip("the demo model is not here")
            return Tokenizer.load(demo_model_dir())
        case name:
            return Tokenizer.load(request.getfixturevalue(f"{name}_dir"))


def pieces_of(detokenizer, token_ids):
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


@given(data=st.data())
def test_pieces_make_up_the_text_of_the_whole(tokenizer, data):
    token_ids = st.integers(0, tokenizer.vocab_size + 3)
    pushes = data.draw(st.lists(st.lists(token_ids, max_size=5), max_size=12))
    detokenizer = Detokenizer(tokenizer)
    text = "".join([*map(detokenizer.push, pushes), detokenizer.flush()])
    assert text == tokenizer.decode([token_id for push in pushes for token_id in push])


@given(data=st.data())
def test_real_text_comes_back_whatever_the_prompt(tokenizer, data):
    prompt = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=4))
    text = data.draw(st.text(st.sampled_from(list("ab  é🙂你\ufffd<0")), max_size=20))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    text = "".join(pieces_of(Detokenizer(tokenizer, prompt), token_ids))
    # Only a leading space depends on what stands before.
    assert text.lstrip(" ") == tokenizer.decode(token_ids).lstrip(" ")


def test_what_came_out_never_changes(tokenizer):
    """Each prefix of an output, had it ended there, starts with all that was shown by then."""
    token_ids = tokenizer.encode("hello 🙂🙃 naïve 你好 the cats", add_special_tokens=False)
    for end in range(len(token_ids) + 1):
        shown = "".join(pieces_of(Detokenizer(tokenizer), token_ids[:end])[:-1])
        assert tokenizer.decode(token_ids).startswith(shown)
        assert tokenizer.decode(token_ids[:end]).startswith(shown)


def test_an_emoji_over_several_tokens_comes_out_once_and_whole(byte_level_dir):
    tokenizer = Tokenizer.load(byte_level_dir)
    names = Library.from_file(str(byte_level_dir / "tokenizer.json"))
    tokens = [names.token_to_id(char) for char in "ðŁ¤Ŀ"]
    assert pieces_of(Detokenizer(tokenizer), tokens) == ["", "", "", "🤝", ""]


def test_bytes_that_are_no_character_come_out_as_replacement_characters(byte_level_dir, byte_fallback_dir):
    names = Library.from_file(str(byte_level_dir / "tokenizer.json"))
    broken = [names.token_to_id(char) for char in "ðŁ"] + [names.token_to_id("a")]
    tokenizer = Tokenizer.load(byte_level_dir)
    assert pieces_of(Detokenizer(tokenizer), broken) == ["", "", "\ufffda", ""]
    assert pieces_of(Detokenizer(tokenizer), broken[:2]) == ["", "", "\ufffd"]
    tokenizer = Tokenizer.load(byte_fallback_dir)
    names = Library.from_file(str(byte_fallback_dir / "tokenizer.json"))
    run = [names.token_to_id(f"<0x{value:02X}>") for value in "é".encode() + b"\xff"]
    assert pieces_of(Detokenizer(tokenizer), [*run, names.token_to_id("a")])[-2:] == ["\ufffd" * 3 + "a", ""]
    assert pieces_of(Detokenizer(tokenizer), run)[-1] == "\ufffd" * 3


def test_endless_invalid_bytes_are_not_held_for_ever(byte_level_dir):
    tokenizer = Tokenizer.load(byte_level_dir)
    token_id = Library.from_file(str(byte_level_dir / "tokenizer.json")).token_to_id("ð")
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push([token_id]) for _ in range(1000))
    assert shown == "\ufffd" * 999


def test_an_output_that_goes_on_from_text_keeps_its_leading_space(byte_fallback_dir):
    tokenizer = Tokenizer.load(byte_fallback_dir)
    prompt, output = tokenizer.encode("a"), tokenizer.encode("hello", add_special_tokens=False)
    end = tokenizer.encode("</s>", add_special_tokens=False)
    assert pieces_of(Detokenizer(tokenizer, prompt), output) == [" hello", ""]
    assert pieces_of(Detokenizer(tokenizer, [*prompt, end[-1]]), output) == ["hello", ""]
    assert pieces_of(Detokenizer(tokenizer), output) == ["hello", ""]


def test_special_tokens_are_not_shown(byte_level_dir):
    tokenizer = Tokenizer.load(byte_level_dir)
    token_ids = tokenizer.encode("a<|im_end|>b<think>")
    assert "".join(pieces_of(Detokenizer(tokenizer), token_ids)) == "ab<think>"
