"""Costs add up as steps do, and a request's times follow from them."""

import json

import pytest

from scheduling.cost_fit import CostFit
from scheduling.cost_model import CostModel, PairLoad, StepCost, TransferCost, predict
from scheduling.sequence import Scheduled, Sequence

MODEL = CostModel(
    prefill=StepCost(0.01, 0.001, 1e-7),
    decode=StepCost(0.02, 0.0005, 1e-6),
    large_decode=StepCost(0.005, 0.0007, 1e-6),
    large_batch=10,
    transfers={"decode-0": TransferCost(0.002, 1e-9), "decode-1": TransferCost(0.004, 3e-9)},
)


def sequence(num_tokens, num_prompt_tokens):
    return Sequence("r", [1] * num_tokens, num_prompt_tokens, 0, 0.0)


def test_chunks_cost_what_the_whole_prompt_does_and_a_base_each():
    whole_s = MODEL.prefill_s(1000)
    assert whole_s == pytest.approx(0.01 + 1.0 + 0.1)
    assert MODEL.prefill_s(1000, max_step_tokens=300) == pytest.approx(whole_s + 3 * 0.01)
    halves_s = MODEL.prefill_s(500) + MODEL.prefill_s(1000, num_cached=500)
    assert halves_s == pytest.approx(whole_s + 0.01)


def test_large_batches_have_costs_of_their_own():
    assert MODEL.decode_s(9, 1000) == pytest.approx(0.02 + 0.0045 + 0.001)
    assert MODEL.decode_s(10, 1000) == pytest.approx(0.005 + 0.007 + 0.001)
    assert MODEL.decode_s(0, 0) == 0


def test_a_pair_that_is_not_known_is_taken_for_the_mean():
    assert MODEL.transfer_s("decode-1", 10**6) == pytest.approx(0.007)
    assert MODEL.transfer_s("decode-9", 10**6) == pytest.approx((0.003 + 0.007) / 2)
    assert CostModel().transfer_s("decode-0", 10**6) == 0


def test_published_costs_below_zero_are_no_time():
    assert StepCost(-1.0, 0.001, 0.0).seconds(10, 0) == 0


def test_a_requests_times_add_up():
    load = PairLoad(
        num_pending_tokens=600,
        num_pending_requests=2,
        max_step_tokens=512,
        num_rows=3,
        num_context_tokens=900,
        room_s=0.5,
    )
    times = predict(
        MODEL, MODEL, "decode-0", load, num_prompt_tokens=500, num_transfer_bytes=10**6, num_output_tokens=100
    )
    assert times.queue_s == pytest.approx(2 * 0.01 + 0.6 + 1e-7 * 2 * 300**2)
    assert times.prefill_s == pytest.approx(MODEL.prefill_s(500))
    assert times.transfer_s == pytest.approx(0.003)
    assert times.decode_queue_s == pytest.approx(MODEL.decode_s(3, 900) / 2)
    assert times.first_step_s == pytest.approx(MODEL.decode_s(4, 1400))
    assert times.tpot_s == pytest.approx(MODEL.decode_s(4, 1600))
    assert times.ttft_s == pytest.approx(0.5 + times.queue_s + times.prefill_s)
    parts_s = times.transfer_s + times.decode_queue_s + times.first_step_s
    assert times.second_token_s == pytest.approx(times.ttft_s + parts_s)


def test_nothing_is_predicted_of_workers_that_have_run_nothing():
    times = predict(CostModel(), CostModel(), "d", PairLoad(num_pending_tokens=5), num_prompt_tokens=5)
    assert (times.ttft_s, times.tpot_s) == (0, 0)


def test_it_survives_json():
    assert CostModel.from_dict(json.loads(json.dumps(MODEL.as_dict()))) == MODEL


def test_a_worker_learns_from_its_steps():
    fit = CostFit()
    for i in range(200):
        start, end = 16 * (i % 5), 16 * (i % 5) + 20 + i % 40
        chunk = Scheduled(sequence(400, 400), start, end)
        fit.observe_step([chunk], 0.01 + 0.001 * (end - start) + 1e-6 * (end**2 - start**2))
        rows = [Scheduled(sequence(101 + 7 * i, 100), 100 + 7 * i, 101 + 7 * i) for _ in range(1 + i % 8)]
        fit.observe_step(rows, 0.02 + 0.0005 * len(rows) + 1e-6 * sum(row.end for row in rows))
        fit.observe_transfer("decode-0", 1000 * (i % 50), 0.002 + 1e-9 * 1000 * (i % 50))
    model = fit.model
    assert model.prefill_s(50) == pytest.approx(0.01 + 0.05 + 0.0025, rel=0.02)
    assert model.decode_s(4, 2000) == pytest.approx(0.024, rel=0.02)
    assert model.transfer_s("decode-0", 20_000) == pytest.approx(0.00202, rel=0.02)
    assert model.prefill.num_steps == model.decode.num_steps == 200


def test_a_step_of_both_kinds_teaches_nothing():
    fit = CostFit()
    fit.observe_step([Scheduled(sequence(101, 100), 100, 101), Scheduled(sequence(50, 50), 0, 50)], 1.0)
    assert fit.model == CostModel()


def test_a_prompts_last_single_token_is_no_decode_row():
    fit = CostFit()
    fit.observe_step([Scheduled(sequence(33, 33), 32, 33)], 0.01)
    assert fit.model.decode is None
    assert fit.model.prefill.num_steps == 1
