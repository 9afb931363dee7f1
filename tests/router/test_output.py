import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.results import TokenLogprobs
from kvferry.sampling import SamplingParams
from router.events import Delta, Request
from router.output import OutputBuilder
from router.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(byte_level_dir):
    return Tokenizer.load(byte_level_dir)


def request_for(**sampling):
    params = SamplingParams(seed=1, max_tokens=100, **sampling)
    return Request("req-1", [1], params, 100, 0, "", 0.0, 0.0, 60.0)


def letters(tokenizer, text):
    """One token a character."""
    token_ids = [tokenizer.encode(char, add_special_tokens=False)[0] for char in text]
    assert tokenizer.decode(token_ids) == text
    return token_ids


def end_token(tokenizer):
    return tokenizer.encode("<|im_end|>")[0]


def test_an_end_token_is_counted_but_not_shown(tokenizer):
    builder = OutputBuilder(request_for(), tokenizer)
    tokens = [*letters(tokenizer, "hi"), end_token(tokenizer)]
    assert builder.push(tokens, ended="stop") == Delta("hi", tokens)
    assert builder.num_output_tokens == 3
    assert builder.finish_reason == "stop"


def test_a_stop_token_that_has_text_is_not_shown_either(tokenizer):
    builder = OutputBuilder(request_for(stop_token_ids=letters(tokenizer, "x")), tokenizer)
    assert builder.push(letters(tokenizer, "hix"), ended="stop").text == "hi"
    assert builder.num_output_tokens == 3


def test_the_last_token_of_an_output_of_full_length_is_shown(tokenizer):
    builder = OutputBuilder(request_for(), tokenizer)
    assert builder.push(letters(tokenizer, "hi"), ended="length").text == "hi"
    assert builder.finish_reason == "length"


def test_tokens_after_a_stop_string_are_dropped(tokenizer):
    builder = OutputBuilder(request_for(stop=["cd"]), tokenizer)
    tokens = letters(tokenizer, "abcdef")
    logprobs = [TokenLogprobs(token_id, -1.0) for token_id in tokens]
    assert builder.push(tokens[:3], logprobs[:3]).text == "ab"
    assert builder.finish_reason is None
    assert builder.push(tokens[3:], logprobs[3:], ended="length") == Delta("", tokens[3:4], logprobs[3:4])
    assert builder.num_output_tokens == 4
    assert builder.finish_reason == "stop"


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(tokenizer):
    builder = OutputBuilder(request_for(stop=["cd"]), tokenizer)
    assert builder.push(letters(tokenizer, "abc")).text == "ab"
    assert builder.push([], ended="length").text == "c"


def test_half_a_character_comes_out_at_the_end(tokenizer):
    builder = OutputBuilder(request_for(stop=["\ufffd!"]), tokenizer)
    half = tokenizer.encode("ǿ", add_special_tokens=False)[:1]
    assert builder.push(half).text == ""
    assert builder.push([], ended="length").text == "\ufffd"
    assert builder.finish_reason == "length"


@pytest.mark.parametrize(
    ("min_tokens", "text", "num_tokens"), [(0, "", 2), (2, "", 2), (3, "ab", 4), (4, "ab", 4), (6, "abab", 6)]
)
def test_a_stop_string_counts_from_min_tokens_on(tokenizer, min_tokens, text, num_tokens):
    builder = OutputBuilder(request_for(stop=["ab"], min_tokens=min_tokens), tokenizer)
    shown = ""
    for token_id in letters(tokenizer, "ababab"):
        shown += builder.push([token_id]).text
        if builder.finish_reason is not None:
            break
    assert (shown, builder.num_output_tokens) == (text, num_tokens)


def test_a_stop_string_may_begin_before_min_tokens(tokenizer):
    builder = OutputBuilder(request_for(stop=["bcd"], min_tokens=4), tokenizer)
    assert builder.push(letters(tokenizer, "abcd")).text == "a"
    assert builder.finish_reason == "stop"


def test_the_last_token_may_complete_a_stop_string(tokenizer):
    builder = OutputBuilder(request_for(stop=["ab"]), tokenizer)
    assert builder.push(letters(tokenizer, "xab"), ended="length").text == "x"
    assert builder.finish_reason == "stop"


@given(data=st.data())
def test_how_tokens_arrive_changes_nothing(tokenizer, data):
    ids = st.integers(3, tokenizer.vocab_size - 1)
    tokens = data.draw(st.lists(ids, min_size=1, max_size=20))
    text = tokenizer.decode(tokens)
    stop = [text[i : i + 3] for i in data.draw(st.lists(st.integers(0, max(0, len(text) - 3)), max_size=2))]
    request = request_for(stop=[s for s in stop if s], min_tokens=data.draw(st.integers(0, 5)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=5)) | {len(tokens)})

    def outcome(pushes):
        builder, shown, kept = OutputBuilder(request, tokenizer), "", []
        for number, push in enumerate(pushes, 1):
            delta = builder.push(push, ended="length" if number == len(pushes) else None)
            shown, kept = shown + delta.text, kept + delta.token_ids
            if builder.finish_reason is not None:
                break
        assert builder.num_output_tokens == len(kept)
        return shown, kept, builder.finish_reason

    by_cuts = outcome([tokens[a:b] for a, b in zip([0, *cuts], cuts, strict=False)])
    assert by_cuts == outcome([[token_id] for token_id in tokens])
    if by_cuts[2] == "length":
        assert by_cuts[0] == text
