"""The simulation's arithmetic, on traces small enough to be worked out by hand."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks import placement
from benchmarks.placement import BLOCK_SIZE, SHRINK, STEP_S, TOKEN_S


def write(folder, name, requests):
    lines = [
        json.dumps({"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": ids})
        for at, length, ids in requests
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))


def run(folder, *options):
    result = CliRunner().invoke(placement.app, ["--traces", str(folder), "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["rows"]


def test_what_is_cached_is_not_computed_and_a_worker_does_one_step_at_a_time(tmp_path):
    # Two prompts of 4 blocks, the first 3 alike, and one more at once with the second.
    length = 4 * BLOCK_SIZE * SHRINK
    requests = [(0, length, [1, 2, 3, 4]), (9000, length, [1, 2, 3, 5]), (9000, length, [1, 2, 6, 7])]
    write(tmp_path, "conversation", requests)
    first_s = STEP_S + TOKEN_S * 4 * BLOCK_SIZE
    both_s = STEP_S + TOKEN_S * (1 + 2) * BLOCK_SIZE
    second_s = STEP_S + TOKEN_S * BLOCK_SIZE
    third_s = STEP_S + TOKEN_S * 2 * BLOCK_SIZE
    # The load is so low that the first is long done when the others come.
    for row in run(tmp_path, "--workers", "1", "--loads", "0.01"):
        assert row["cached_share"] == pytest.approx(5 / 12)
        assert row["num_requests"] == 3
        # The step of the second has begun when the third comes.
        assert row["mean_ttft_s"] == pytest.approx((first_s + second_s + second_s + third_s) / 3)
        assert row["mean_ttft_s"] != pytest.approx((first_s + 2 * both_s) / 3)


def test_only_cache_aware_placement_goes_back_to_where_the_prefix_is(tmp_path):
    length = 8 * BLOCK_SIZE * SHRINK
    chats = [list(range(100 * i, 100 * i + 8)) for i in range(4)]
    requests = [(1000 * turn, length, chats[turn * 3 % 4]) for turn in range(24)]
    write(tmp_path, "synthetic", requests)
    rows = {row["placement"]: row for row in run(tmp_path, "--workers", "4", "--loads", "0.01")}
    assert rows["cache-aware"]["cached_share"] == pytest.approx(20 * (7 / 8) / 24)
    assert rows["cache-aware"]["cached_share"] > rows["random"]["cached_share"]
    assert rows["random"]["of_random"] == 1


def test_traces_that_are_not_there_are_left_out(tmp_path):
    result = CliRunner().invoke(placement.app, ["--traces", str(tmp_path)])
    assert result.exit_code == 0
    assert "conversation is left out" in result.output
