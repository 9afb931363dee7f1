"""The transfer benchmark measures what it says, on two real processes."""

import asyncio

import pytest

from benchmarks import transfer
from benchmarks.transfer_ends import TINY_SHAPE

pytestmark = pytest.mark.slow


def test_every_path_moves_its_blocks(monkeypatch):
    monkeypatch.setattr(transfer, "NUM_WARM_UP_ROUNDS", 0)
    costs = transfer.measure(TINY_SHAPE, transfer.PATHS, num_rounds=1)
    assert list(costs) == list(transfer.PATHS)
    assert all(wall_s > 0 for wall_s, _, _ in costs.values())


@pytest.mark.parametrize("is_shared", [False, True])
def test_handoffs_are_measured_between_the_workers_own_steps(monkeypatch, tmp_path, is_shared):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    monkeypatch.setattr(transfer, "PROMPT_TOKENS", (100, 600))
    handoffs = asyncio.run(transfer.measure_handoffs(is_shared, num_rounds=1))
    assert list(handoffs) == [100, 600]
    for num_tokens, ((prefill_s, exposed_s),) in (
        (length, [(h.prefill_s, h.exposed_s) for h in rounds]) for length, rounds in handoffs.items()
    ):
        assert prefill_s >= 0.0007 * num_tokens
        assert exposed_s > 0
