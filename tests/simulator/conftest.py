"""Deployments small enough to be worked out by hand."""

import pytest

from kvferry import config as settings
from scheduling.cost_model import CostModel, StepCost, TransferCost
from simulator.costs import Costs
from simulator.simulation import Simulation


@pytest.fixture
def costs():
    """A prefill step takes 10 ms and 1 ms a token; a decode step 5 ms, 1 ms a row, 1 us a context token."""
    transfers = {"any": TransferCost(0.002, 0.00001)}
    prefill = CostModel(prefill=StepCost(0.010, 0.001, 0.0), transfers=transfers)
    return Costs(prefill, CostModel(decode=StepCost(0.005, 0.001, 1e-6)), token_bytes=10)


@pytest.fixture
def simulate(costs):
    """Runs a trace; settings of the pools as in a configuration."""

    def run(trace, *, prefill=None, decode=None, router=None, **options):
        config = settings.parse(
            {
                "router": router or {},
                "prefill": {"engine": {"num_blocks": 256}} | (prefill or {}),
                "decode": {"engine": {"num_blocks": 256}} | (decode or {}),
            }
        )
        return Simulation(config, options.pop("costs", costs), **options).run(trace)

    return run
