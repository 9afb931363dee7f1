"""`kvferry simulate` as a person runs it."""

import json
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from kvferry.cli import app

CONFIG = "prefill: {engine: {num_blocks: 256}}\ndecode: {engine: {num_blocks: 256}}\n"


@pytest.fixture
def run(tmp_path, costs):
    (tmp_path / "deploy.yaml").write_text(CONFIG)
    (tmp_path / "costs.json").write_text(json.dumps(asdict(costs)))
    (tmp_path / "trace.csv").write_text("arrival,prompt,output\n0,100,4\n1,50,1\n")
    places = {name: str(tmp_path / name) for name in ("deploy.yaml", "costs.json", "trace.csv", "none.csv")}

    def invoke(*arguments):
        return CliRunner().invoke(app, ["simulate", *(places.get(each, each) for each in arguments)])

    return invoke


def test_a_trace_is_run_and_its_times_are_told(run):
    shown = run("deploy.yaml", "--costs", "costs.json", "--trace", "trace.csv", "--ttft", "0.1", "--json")
    assert shown.exit_code == 0, shown.output
    values = json.loads(shown.stdout)
    assert values["num_requests"] == 2
    assert values["ttft_s"]["mean"] == pytest.approx((0.110 + 0.060) / 2)
    assert values["attainment"] == 0.5
    assert values["tpot_s"].keys() == {"mean", "p50", "p90", "p99"}


def test_a_load_is_drawn_where_there_is_no_trace(run):
    shown = run("deploy.yaml", "--costs", "costs.json", "--requests", "20", "--rate", "2", "--prefill", "2")
    assert shown.exit_code == 0, shown.output
    assert "20 requests" in shown.output
    assert "goodput" in shown.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--costs", "none.csv"], "none.csv"),
        (["--costs", "trace.csv"], "trace.csv"),
        (["--costs", "costs.json", "--trace", "none.csv"], "none.csv"),
        (["--costs", "costs.json", "--prefill", "0"], "prefill.count"),
        (["--costs", "costs.json", "--profile", "opt"], "no profile of opt"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(run, arguments, said):
    shown = run("deploy.yaml", *arguments)
    assert shown.exit_code == 2
    assert said in shown.output.replace("\n", "")
    assert "Traceback" not in shown.output
