"""The plan finds the rate at which targets break, and the pools that stand the highest."""

import json
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from kvferry import config as settings_file
from kvferry.cli import app
from scheduling.cost_model import CostModel, StepCost
from simulator.costs import Costs
from simulator.plan import PRECISION, Setting, Targets, frontier, highest_rate, plan, settings
from simulator.traces import TraceRequest

CONFIG = "prefill: {engine: {num_blocks: 256}}\ndecode: {engine: {num_blocks: 256}}\n"


@pytest.mark.parametrize("limit", [0.013, 1.0, 37.5])
def test_the_highest_rate_is_found_from_either_side(limit):
    asked = []
    rate = highest_rate(lambda each: asked.append(each) or each <= limit)
    assert limit / (1 + PRECISION) <= rate <= limit
    assert len(asked) == len(set(asked))


def test_what_is_never_met_has_no_rate():
    assert highest_rate(lambda _: False) == 0.0


def test_every_split_of_the_devices_is_tried_once():
    tried = list(settings(4, tps=(1, 2)))
    assert len(tried) == len(set(tried))
    assert all(each.num_devices <= 4 for each in tried)
    assert Setting(1, 2, 2, 1) in tried
    assert Setting(1, 1, 2, 2) in tried
    assert len(list(settings(3, chunks=(128, 256), batches=(8, None)))) == 3 * 4


def test_the_pool_that_is_short_gets_the_devices():
    # Prompts take 1 s, outputs nothing to speak of: prefill workers set the rate.
    costs = Costs(CostModel(prefill=StepCost(0.0, 0.01, 0.0)), CostModel(decode=StepCost(0.001, 0.0, 0.0)))
    trace = [TraceRequest(float(i), 100, 2) for i in range(60)]
    config = settings_file.parse(
        {"prefill": {"engine": {"num_blocks": 256}}, "decode": {"engine": {"num_blocks": 256}}}
    )
    planned = plan(
        config, lambda _p, _d: costs, trace, Targets(1.5, 0.1, 0.9), list(settings(4)), lambda *_: None
    )
    assert planned[0].setting == Setting(3, 1)
    assert [each.setting.num_devices for each in frontier(planned)] == [2, 3, 4]
    # One worker computes one prompt a second, and a regular load leaves it no other wait.
    assert frontier(planned)[0].rate == pytest.approx(1.0, rel=0.05)


def test_the_command_prints_the_frontier(tmp_path, costs):
    (tmp_path / "deploy.yaml").write_text(CONFIG)
    (tmp_path / "costs.json").write_text(json.dumps(asdict(costs)))
    arguments = ["plan", str(tmp_path / "deploy.yaml"), "--costs", str(tmp_path / "costs.json")]
    arguments += ["--max-devices", "3", "--requests", "40", "--prompt", "50", "--output", "5"]
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    assert shown.exit_code == 0, shown.output
    points = json.loads(shown.stdout)["frontier"]
    assert [each["num_devices"] for each in points] == [2, 3]
    assert all(each["rate"] > 0 for each in points)
    assert "1 x TP1" in CliRunner().invoke(app, arguments).output


def test_too_few_devices_are_refused(tmp_path, costs):
    (tmp_path / "deploy.yaml").write_text(CONFIG)
    (tmp_path / "costs.json").write_text(json.dumps(asdict(costs)))
    arguments = ["plan", str(tmp_path / "deploy.yaml"), "--costs", str(tmp_path / "costs.json")]
    shown = CliRunner().invoke(app, [*arguments, "--max-devices", "2", "--tp", "2"])
    assert shown.exit_code == 2
    assert "max-devices" in shown.output
