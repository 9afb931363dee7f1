"""Costs are read as they were written, and what is missing is named."""

import json
from dataclasses import asdict

import pytest

from simulator import costs as cost_files
from simulator.costs import CostsError


def test_fitted_costs_are_read_back(tmp_path, costs):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(asdict(costs)))
    assert cost_files.load(path) == costs


def test_a_published_profile_is_in_milliseconds(tmp_path):
    profile = {"prefill": [10, 1, 0.1], "decoding_smallbs": [5, 0.5, 2], "decoding_largebs": [6, 0.6, 3]}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"m": {"2": profile | {"decoding_large_small_bs_threshold": 4}}}))
    costs = cost_files.load(path, "m", 2, 2)
    assert costs.prefill.prefill_s(10) == pytest.approx(0.010 + 0.001 + 0.010 + 0.010)
    assert costs.decode.decode_s(3, 100) == pytest.approx(0.005 + 0.050 + 0.006)
    assert costs.decode.decode_s(4, 100) == pytest.approx(0.006 + 0.060 + 0.012)
    with pytest.raises(CostsError, match="m at TP 1"):
        cost_files.load(path, "m")


@pytest.mark.parametrize("text", ["{", "[]", '{"prefill": {}}', '{"prefill": {}, "decode": {}}', "null"])
def test_what_is_no_costs_is_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostsError, match=r"costs\.json"):
        cost_files.load(path)
