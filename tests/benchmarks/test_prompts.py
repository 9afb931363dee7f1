"""Prompts have the tokens that they claim, differ, and share what they should."""

import json
from itertools import pairwise

import pytest

from benchmarks.load.api import ChatApi, CompletionsApi
from benchmarks.load.arrivals import Trace, poisson_times_s
from benchmarks.load.prompts import Prompts
from kvferry.results import ChatMessage
from router.tokenizer import Tokenizer


@pytest.fixture(params=["byte_level_dir", "byte_fallback_dir"])
def model_dir(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("num_tokens", [2, 3, 17, 128])
def test_a_completion_has_exactly_so_many_tokens(model_dir, num_tokens):
    prompts = Prompts(model_dir, CompletionsApi())
    tokenizer = Tokenizer.load(model_dir)
    num_tokens = max(num_tokens, prompts.min_tokens)
    assert len(tokenizer.encode(prompts.prompt(num_tokens))) == num_tokens


def test_a_chat_counts_its_template(byte_level_dir):
    prompts = Prompts(byte_level_dir, ChatApi())
    tokenizer = Tokenizer.load(byte_level_dir)
    text = prompts.prompt(64)
    assert len(tokenizer.encode_chat([ChatMessage("user", text)])) == 64
    with pytest.raises(ValueError, match="at least"):
        prompts.prompt(prompts.min_tokens - 1)


def test_prompts_differ_but_a_seed_repeats_them(byte_level_dir):
    first, second, third = (Prompts(byte_level_dir, CompletionsApi(), seed) for seed in (1, 1, 2))
    some = [first.prompt(32) for _ in range(20)]
    assert len({text[:20] for text in some}) > 15
    assert some == [second.prompt(32) for _ in range(20)]
    assert some[0] != third.prompt(32)


def test_a_shared_prefix_is_shared(byte_level_dir):
    prompts = Prompts(byte_level_dir, CompletionsApi(), num_shared_tokens=24)
    tokenizer = Tokenizer.load(byte_level_dir)
    first, second = (tokenizer.encode(prompts.prompt(40)) for _ in range(2))
    assert first[:24] == second[:24]
    assert first[24:] != second[24:]


def test_a_poisson_process_has_its_rate_and_its_bounds():
    times_s = poisson_times_s(50, 100, 100_000)
    assert times_s == sorted(times_s)
    assert times_s[-1] < 100
    # Five standard deviations of a count of 5,000.
    assert abs(len(times_s) - 5000) < 5 * 5000**0.5
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    mean_s = sum(gaps_s) / len(gaps_s)
    deviation_s = (sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s)) ** 0.5
    assert deviation_s == pytest.approx(mean_s, rel=0.1)
    assert len(poisson_times_s(50, 100, 10)) == 10
    assert poisson_times_s(50, 100, 10) != poisson_times_s(50, 100, 10, seed=1)


def test_a_trace_is_scaled_and_shares_what_its_blocks_share(byte_level_dir, tmp_path):
    rows = [
        {"timestamp": 1000, "input_length": 1200, "output_length": 40, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 1, "hash_ids": [7, 8, 10]},
        {"timestamp": 9000, "input_length": 600, "output_length": 600, "hash_ids": [11, 12]},
        {"timestamp": 99000, "input_length": 600, "output_length": 600, "hash_ids": [11, 12]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts = Prompts(byte_level_dir, CompletionsApi())
    trace = Trace(path, length_scale=1 / 16, time_scale=0.5, max_tokens=70)
    arrivals = list(trace.arrivals(prompts, duration_s=20, max_requests=10))
    assert [arrival.at_s for arrival in arrivals] == [0.0, 1.0, 4.0]
    assert [(a.job.num_prompt_tokens, a.job.num_output_tokens) for a in arrivals] == [
        (68, 2),
        (69, 1),
        # 38 and 38 would be more than 70 together.
        (35, 35),
    ]
    tokenizer = Tokenizer.load(byte_level_dir)
    first, second, third = (tokenizer.encode(arrival.job.prompt) for arrival in arrivals)
    assert (len(first), len(second), len(third)) == (68, 69, 35)
    # Two blocks of 512 / 16 tokens are the same text.
    assert first[:64] == second[:64]
    assert first[64:] != second[64:68]
    assert len(list(trace.arrivals(prompts, duration_s=1000, max_requests=2))) == 2
