"""The table of scheduling features: its shape, and that each row shows what it says."""

import json

from typer.testing import CliRunner

from benchmarks.policies.__main__ import ROWS, app


def run(*options):
    result = CliRunner().invoke(app, ["--quick", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["rows"]


def test_chunks_shorten_the_wait_behind_a_long_prompt():
    (row,) = run("--only", "S1")
    assert {"id", "mode", "measure", "before", "after"} <= row.keys()
    assert (row["id"], row["mode"]) == ("S1", "simulated")
    assert row["after"] < 0.2 * row["before"]


def test_under_overload_the_high_class_is_served_at_once():
    (row,) = run("--only", "S8")
    assert row["after"] < 0.1 * row["before"]


def test_an_unknown_feature_is_named_with_the_known_ones():
    result = CliRunner().invoke(app, ["--only", "S1,S99"])
    assert result.exit_code == 2
    assert "S99" in result.output
    assert all(name in result.output for name in ROWS)
