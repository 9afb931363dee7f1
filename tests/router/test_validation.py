import math
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from kvferry.results import ChatMessage
from kvferry.sampling import SamplingParams
from router.errors import DeadlineExceeded, InvalidRequest, UnknownModel
from router.events import RequestSpec
from router.model_spec import ModelSpec
from router.tokenizer import Tokenizer
from router.validation import explain, validate


@pytest.fixture(scope="module")
def tokenizer(byte_level_dir):
    return Tokenizer.load(byte_level_dir)


@pytest.fixture(scope="module")
def model(byte_level_dir):
    return ModelSpec.load(byte_level_dir, "tiny")


@pytest.fixture(scope="module")
def check(tokenizer, model):
    def run(prompt: Any = "hello", sampling: SamplingParams | None = None, **fields: Any):
        spec = RequestSpec(prompt, sampling or SamplingParams(), **fields)
        return validate(spec, model, tokenizer, now_s=100.0, default_timeout_s=60.0)

    return run


def test_defaults_are_filled_in(check, tokenizer, model):
    request = check("hello Paris")
    assert request.prompt_token_ids == tokenizer.encode("hello Paris")
    assert request.max_tokens == model.context_length - len(request.prompt_token_ids)
    assert request.sampling.max_tokens == request.max_tokens
    assert request.sampling.seed is not None
    assert request.sampling.seed != check().sampling.seed
    assert request.request_id.startswith("req-")
    assert request.request_id != check().request_id
    assert request.received_s == 100.0
    assert 100.0 <= request.tokenised_s < 110.0
    assert request.deadline_s == 160.0


def test_what_a_client_sets_stays(check):
    sampling = SamplingParams(seed=0, max_tokens=5, temperature=0.5, stop=["x"])
    request = check([1, 2], sampling, model="tiny", priority=-100, label="mine", timeout_s=2.5)
    assert request.sampling == sampling
    assert request.prompt_token_ids == [1, 2]
    assert (request.max_tokens, request.priority, request.label) == (5, -100, "mine")
    assert request.deadline_s == 102.5


def test_a_chat_is_a_prompt(check, tokenizer):
    messages = [ChatMessage("user", "hi")]
    assert check(messages).prompt_token_ids == tokenizer.encode_chat(messages)


def test_a_prompt_may_fill_all_but_one_token(check, model):
    request = check([1] * (model.context_length - 1))
    assert request.max_tokens == 1


@pytest.mark.parametrize(
    ("field", "message", "arguments"),
    [
        ("prompt", "empty", {"prompt": ""}),
        ("prompt", "empty", {"prompt": []}),
        ("prompt", r"256 tokens leave no room .* 256", {"prompt": [1] * 256}),
        ("prompt", "cannot fit the context length of 256", {"prompt": "a" * 10**6}),
        ("prompt", "lone surrogate at character 1", {"prompt": "a\ud800"}),
        ("prompt", "token id 5000 is not in the vocabulary", {"prompt": [1, 5000]}),
        ("prompt", "token id -1 is not", {"prompt": [-1]}),
        ("messages", "tokens leave no room", {"prompt": [ChatMessage("user", "é" * 999)]}),
        ("messages", "unknown role wizard", {"prompt": [ChatMessage("wizard", "hi")]}),
        ("messages[0].role", "1 to 64", {"prompt": [ChatMessage("", "hi")]}),
        ("messages[0].content", "cannot fit", {"prompt": [ChatMessage("user", "a" * 10**6)]}),
        ("messages[0].content", "lone surrogate", {"prompt": [ChatMessage("user", "\udfff")]}),
        ("max_tokens", r"2 tokens of prompt and 255 .* 257, over .* 256", {"sampling": {"max_tokens": 255}}),
        ("min_tokens", "3 is more than max_tokens", {"sampling": {"max_tokens": 2, "min_tokens": 3}}),
        ("min_tokens", "do not fit", {"sampling": {"min_tokens": 255}}),
        ("stop_token_ids", "token id 9999", {"sampling": {"stop_token_ids": [9999]}}),
        ("logit_bias", "token id 9999", {"sampling": {"logit_bias": {1: 0.5, 9999: 1.0}}}),
        ("top_logprobs", "only together with logprobs", {"sampling": {"top_logprobs": 2}}),
        ("priority", "101 is not within", {"priority": 101}),
        ("priority", "-101 is not within", {"priority": -101}),
        ("label", "at most 256", {"label": "x" * 257}),
        ("timeout_s", "nan is not a number of seconds", {"timeout_s": math.nan}),
        ("timeout_s", "inf is not", {"timeout_s": math.inf}),
    ],
)
def test_bad_input_is_refused_by_name(check, field, message, arguments):
    if "sampling" in arguments:
        arguments = {"prompt": [1, 2], **arguments, "sampling": SamplingParams(**arguments["sampling"])}
    with pytest.raises(InvalidRequest, match=message) as caught:
        check(**arguments)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_an_unknown_model_is_told_the_served_one(check):
    with pytest.raises(UnknownModel, match="'other' is not served here; 'tiny' is") as caught:
        check(model="other")
    assert caught.value.field == "model"


def test_a_request_whose_time_is_up_is_not_begun(check):
    with pytest.raises(DeadlineExceeded):
        check(timeout_s=0)
    with pytest.raises(DeadlineExceeded):
        check(timeout_s=-1)


def test_a_chat_needs_a_template(byte_fallback_dir):
    tokenizer = Tokenizer.load(byte_fallback_dir)
    model = ModelSpec.load(byte_fallback_dir, "tiny")
    spec = RequestSpec([ChatMessage("user", "hi")], SamplingParams())
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        validate(spec, model, tokenizer, now_s=0, default_timeout_s=1)
    assert caught.value.field == "messages"


class Part(BaseModel, extra="forbid"):
    text: str


class Whole(BaseModel, extra="forbid"):
    parts: list[Part] | None = None
    number: int = 0


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"numbr": 1}, "numbr", "unknown field; the nearest known one is 'number'"),
        ({"parts": [{"text": "a"}, {"txt": "b"}]}, "parts[1].text", "required"),
        ({"parts": [{"text": "b", "txet": "b"}]}, "parts[0].txet", "unknown field; .* is 'text'"),
        ({"number": "a" * 500}, "number", r"valid integer.*\(got 'aaa.*\.\.\.\)"),
        (3, "body", "valid dictionary"),
    ],
)
def test_pydantics_faults_are_told_in_the_clients_words(values, field, message):
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(values)
    error = explain(caught.value, Whole)
    assert error.field == field
    with pytest.raises(InvalidRequest, match=message):
        raise error
    assert len(str(error)) < 300


def test_every_range_of_the_sampling_parameters_is_explained():
    for values in (
        {"temperature": 2.1},
        {"stop": ["\ud800"]},
        {"top_p": 0.0},
        {"min_p": math.nan},
        {"logit_bias": {1: 101.0}},
    ):
        with pytest.raises(ValidationError) as caught:
            SamplingParams(**values)
        assert explain(caught.value).field.startswith(next(iter(values)))
