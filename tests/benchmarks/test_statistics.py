"""What is reported is what was seen: worked out by hand."""

import math

import pytest

from benchmarks.load import statistics, summary
from benchmarks.load.driver import Run
from benchmarks.load.outcome import Outcome, Slo, tail_mean


def outcome(*times_s, started_s=0.0, tokens=None, error="", off=0):
    return Outcome(started_s, times_s[-1] if times_s else 0.0, times_s, tokens or len(times_s), off, error)


def test_percentiles_interpolate_between_neighbours():
    values = [4.0, 1.0, 3.0, 2.0]
    assert statistics.percentile(values, 50) == 2.5
    assert statistics.percentile(values, 100) == 4.0
    # 90 % of the way from the first of four to the last: 0.9 * 3 = 2.7 places.
    assert statistics.percentile(values, 90) == pytest.approx(3.7)
    assert math.isnan(statistics.percentile([], 50))


@pytest.mark.parametrize(
    ("gaps_s", "expected"),
    [
        ([], 0.0),
        ([3.0], 3.0),
        ([1.0] * 9 + [5.0], 5.0),
        # A tenth of 11 is two gaps, rounded up.
        ([1.0] * 9 + [5.0, 3.0], 4.0),
        # A tenth of 30 is three, though 0.1 * 30 is a little more in binary.
        ([0.0] * 27 + [1.0, 2.0, 3.0], 2.0),
    ],
)
def test_tail_tbt_is_the_mean_of_the_longest_tenth_of_gaps(gaps_s, expected):
    assert tail_mean(gaps_s) == expected


def test_latencies_of_a_request():
    request = outcome(10.5, 10.75, 11.75, started_s=10.0, tokens=6)
    assert request.ttft_s == 0.5
    assert request.gaps_s == [0.25, 1.0]
    # Five tokens after the first, in 1.25 s: an event may hold several.
    assert request.tpot_s == 0.25
    assert request.e2e_s == 1.75
    assert request.tail_tbt_s == 1.0


def test_one_token_has_no_time_per_token():
    request = outcome(1.0)
    assert (request.tpot_s, request.gaps_s, request.tail_tbt_s) == (0.0, [], 0.0)


def test_tokens_are_spread_over_a_requests_events():
    request = outcome(1.0, 2.0, 3.0, 4.0, tokens=8)
    assert request.num_tokens_between(1.5, 4.0) == 4.0
    assert request.num_tokens_between(0.0, 9.0) == 8.0
    assert outcome(tokens=5, error="lost").num_tokens_between(0, 9) == 0.0


def test_attainment_wants_both_targets_of_the_same_request():
    slo = Slo(ttft_s=1.0, tpot_s=0.5)
    quick_start_slow_tokens = outcome(0.5, 1.5)
    slow_start_quick_tokens = outcome(1.5, 1.75)
    good = outcome(1.0, 1.5)
    failed = outcome(0.1, 0.2, error="HTTP 500")
    requests = [quick_start_slow_tokens, slow_start_quick_tokens, good, failed]
    assert [slo.is_met(each) for each in requests] == [False, False, True, False]
    assert statistics.attainment(requests, slo) == 0.25


def test_bootstrap_holds_the_mean_and_narrows_with_more_values():
    few = [1.0, 2.0, 3.0, 4.0, 5.0]
    low, high = statistics.bootstrap(few)
    assert 1.0 < low < 3.0 < high < 5.0
    assert (low, high) == statistics.bootstrap(few)
    more_low, more_high = statistics.bootstrap(few * 20)
    # A twentieth of the variance: about a quarter of the width.
    assert (more_high - more_low) < (high - low) / 3
    assert statistics.bootstrap([2.0] * 10) == (2.0, 2.0)
    assert all(map(math.isnan, statistics.bootstrap([1.0])))


def test_bootstrap_takes_other_statistics():
    # A value that is far out moves the mean's range, not the median's.
    values = [1.0] * 30 + [100.0]
    assert statistics.bootstrap(values, statistics.median) == (1.0, 1.0)
    assert statistics.bootstrap(values)[1] > 4.0


def test_wilsons_interval():
    # Known values of the score interval at 95 %.
    assert statistics.wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    assert statistics.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert statistics.wilson(0, 0) == (0.0, 1.0)


def test_numbers_that_are_none_become_null():
    assert statistics.rounded({"a": [1.23456, float("nan")], "n": 7, "t": (0.0,)}) == {
        "a": [1.235, None],
        "n": 7,
        "t": [0.0],
    }


def test_a_row_counts_errors_and_leaves_them_out_of_latencies():
    run = Run(
        [
            outcome(0.5, 1.0, 1.5, tokens=4),
            outcome(1.0, 2.0, 3.0, tokens=4, off=1),
            outcome(0.1, error="HTTP 500: oh"),
            outcome(tokens=0, error="HTTP 500: oh"),
        ],
        0.0,
        2.0,
    )
    row = summary.row("us", "test", [run], Slo(0.6, 0.2))
    assert row["num_requests"] == 4
    assert row["num_errors"] == 2
    assert row["errors"] == {"HTTP 500: oh": 2}
    assert row["num_prompts_counted_otherwise"] == 1
    assert row["ttft_ms"]["p50"] == 750.0
    assert row["itl_ms"]["p50"] == 750.0
    assert row["attainment"] == 0.0
    # Until 2.0 s: all 4 tokens of the first, one event of the second (4/3), and what the third gave.
    assert row["output_tokens_per_s"] == pytest.approx((4 + 4 / 3 + 1) / 2)


def test_rounds_are_pooled():
    runs = [
        Run([outcome(0.5, 1.0)], 0.0, 2.0),
        Run([outcome(10.5, 11.0, 11.5, 11.9, started_s=10.0)], 10.0, 12.0),
    ]
    row = summary.row("us", "test", runs)
    assert row["num_rounds"] == 2
    assert row["output_tokens_per_s"] == pytest.approx(6 / 4)
    low, high = row["output_tokens_per_s_range"]
    assert low <= 1.5 <= high
