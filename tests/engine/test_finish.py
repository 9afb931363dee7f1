import pytest

from engine.finish import FinishReason, end_token_ids, finish_reason
from kvferry.sampling import SamplingParams
from kvferry.v1 import common_pb2

EOS = frozenset({2, 7})
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fields", "token", "num_output", "expected"),
    [
        ({}, 5, 1, None),
        ({}, 2, 1, STOP),
        ({}, 7, 9, STOP),
        ({"ignore_eos": True}, 2, 1, None),
        ({"stop_token_ids": [5]}, 5, 1, STOP),
        ({"stop_token_ids": [5]}, 2, 1, STOP),
        ({"stop_token_ids": [5], "ignore_eos": True}, 5, 1, STOP),
        ({"stop_token_ids": [2], "ignore_eos": True}, 2, 1, STOP),
        # min_tokens others must come first: number 4 is the earliest that may end the output.
        ({"min_tokens": 3}, 2, 3, None),
        ({"min_tokens": 3}, 2, 4, STOP),
        ({"min_tokens": 3, "stop_token_ids": [5]}, 5, 3, None),
        ({"min_tokens": 1}, 2, 1, None),
        ({"max_tokens": 1}, 5, 1, LENGTH),
        ({"max_tokens": 3}, 5, 2, None),
        ({"max_tokens": 3}, 5, 3, LENGTH),
        ({"max_tokens": 3}, 5, 4, LENGTH),
        ({"max_tokens": 3}, 2, 3, STOP),
        ({"max_tokens": 3, "min_tokens": 3}, 2, 3, LENGTH),
        ({"max_tokens": 3, "ignore_eos": True}, 2, 3, LENGTH),
    ],
)
def test_an_output_ends_exactly_where_it_was_asked_to(fields, token, num_output, expected):
    sampling = SamplingParams(**fields)
    assert finish_reason(sampling, EOS, token, num_output, 10 + num_output, 100) is expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(99, None), (100, LENGTH), (101, LENGTH)])
def test_a_full_context_ends_the_output(num_tokens, expected):
    assert finish_reason(SamplingParams(max_tokens=1000), EOS, 5, 20, num_tokens, 100) is expected
    assert finish_reason(SamplingParams(), EOS, 2, 20, num_tokens, 100) is STOP


def test_end_tokens_are_the_models_and_the_requests():
    assert end_token_ids(SamplingParams(stop_token_ids=[5]), EOS) == {2, 5, 7}
    assert end_token_ids(SamplingParams(stop_token_ids=[5], ignore_eos=True), EOS) == {5}


def test_reasons_are_named_as_in_the_protos():
    names = {f"FINISH_REASON_{reason.value}" for reason in FinishReason}
    assert names == set(common_pb2.FinishReason.keys()) - {"FINISH_REASON_UNSPECIFIED"}
