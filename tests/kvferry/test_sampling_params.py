import math

import pytest
from pydantic import ValidationError

from kvferry.sampling import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams
from kvferry.v1 import common_pb2

EVERYTHING = {
    "temperature": 0.25,
    "top_k": 2**32 - 1,
    "top_p": 0.5,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 2.0,
    "logit_bias": {0: -100.0, 2**32 - 1: 100.0, 7: 0.0},
    "seed": 2**64 - 1,
    "stop": ["end", "\n\n", "é漢🙂"],
    "stop_token_ids": [0, 2**32 - 1],
    "max_tokens": 2**31 - 1,
    "min_tokens": 3,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, 2.1, math.nan, math.inf, "1", True, None)],
        *[("top_k", v) for v in (-1, 2**32, 1.0, True, "5")],
        *[("top_p", v) for v in (0, -0.5, 1.1, math.nan, False)],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan, True)],
        *[("repetition_penalty", v) for v in (0, -1, 10.1, math.nan, math.inf, True)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan, True)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, -math.inf, True)],
        *[("logit_bias", v) for v in ({1: 101.0}, {1: -101.0}, {1: math.nan}, {-1: 1.0}, {2**32: 1.0})],
        *[("logit_bias", v) for v in ({"1": 1.0}, {1: True}, {1: "1"}, [1], {1.5: 1.0})],
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        *[("seed", v) for v in (-1, 2**64, 1.0, True)],
        *[("stop", v) for v in ("end", [""], ["x" * 257], [1], ["a"] * (MAX_STOP_STRINGS + 1))],
        *[("stop", v) for v in (["\ud800"], None)],
        *[("stop_token_ids", v) for v in ([-1], [2**32], [True], 5, [1] * (MAX_STOP_TOKEN_IDS + 1))],
        *[("max_tokens", v) for v in (0, -1, 2**31, 1.0, True)],
        *[("min_tokens", v) for v in (-1, 2**31, None, True)],
        *[("ignore_eos", v) for v in (1, "true", None)],
        *[("logprobs", v) for v in (1, 0, None)],
        *[("top_logprobs", v) for v in (-1, 21, True, 1.0)],
        ("temprature", 1.0),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(ValidationError) as caught:
        SamplingParams.model_validate({field: value})
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty", "presence_penalty"])
def test_whole_numbers_are_good_where_fractions_are(field):
    value = getattr(SamplingParams(**{field: 1}), field)
    assert (value, type(value)) == (1.0, float)
    assert SamplingParams(temperature=0).temperature == 0
    assert SamplingParams(logit_bias={5: 3}).logit_bias == {5: 3.0}


def test_the_bounds_themselves_are_good():
    for field, values in {
        "temperature": (0, 2),
        "top_p": (1e-9, 1),
        "min_p": (0, 1),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "repetition_penalty": (1e-9, 10),
        "top_logprobs": (0, 20),
        "seed": (0,),
        "max_tokens": (1,),
    }.items():
        for value in values:
            assert getattr(SamplingParams(**{field: value}), field) == value


def test_every_field_of_the_proto_is_tried_here():
    names = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    assert names == set(SamplingParams.model_fields) == set(EVERYTHING)
    assert all(getattr(SamplingParams(), name) != value for name, value in EVERYTHING.items())


def test_all_fields_survive_the_proto_and_its_bytes():
    before = SamplingParams(**EVERYTHING)
    data = common_pb2.SamplingParams(**before.to_fields()).SerializeToString()
    after = SamplingParams.from_message(common_pb2.SamplingParams.FromString(data))
    assert after == before


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_each_field_alone_survives_the_proto(name):
    before = SamplingParams(**{name: EVERYTHING[name]})
    after = SamplingParams.from_message(common_pb2.SamplingParams(**before.to_fields()))
    assert after == before


def test_what_a_message_leaves_out_has_its_default_and_what_it_sets_to_zero_is_zero():
    assert SamplingParams.from_message(common_pb2.SamplingParams()) == SamplingParams()
    message = common_pb2.SamplingParams(temperature=0, seed=0, logprobs=False, top_k=0)
    assert SamplingParams.from_message(message) == SamplingParams(temperature=0, seed=0)
    with pytest.raises(ValidationError, match="max_tokens"):
        SamplingParams.from_message(common_pb2.SamplingParams(max_tokens=0))


def test_parameters_cannot_be_changed():
    with pytest.raises(ValidationError):
        SamplingParams().temperature = 0.5
