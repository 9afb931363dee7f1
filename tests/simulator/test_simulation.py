"""Simulated times are those that arithmetic gives, and nothing is lost on the way."""

import pytest

from kvferry.config import ConfigError
from simulator.report import summary
from simulator.traces import TraceRequest, at_rate, poisson


def times(result):
    return [(r.ttft_s, r.e2e_s) for r in sorted(result.requests, key=lambda r: r.request_id)]


def test_one_request_takes_its_steps_and_its_transfer(simulate):
    result = simulate([TraceRequest(1.0, 100, 4)])
    [request] = result.requests
    assert request.ttft_s == pytest.approx(0.010 + 0.100)
    # 1,000 bytes at 10 us each, and 2 ms; the first decode step reads the prompt and the first token.
    assert request.transfer_ended_s - request.first_token_s == pytest.approx(0.012)
    steps_s = sum(0.006 + 1e-6 * context for context in (101, 102, 103))
    assert request.finished_s - request.transfer_ended_s == pytest.approx(steps_s)
    assert request.tpot_s == pytest.approx((0.012 + steps_s) / 3)


def test_chunks_leave_while_the_next_is_computed(simulate):
    whole, chunked = (
        simulate([TraceRequest(0.0, 100, 2)], prefill={"max_step_tokens": chunk}).requests[0]
        for chunk in (100, 50)
    )
    assert chunked.ttft_s == pytest.approx(whole.ttft_s + 0.010)
    exposed_s = [r.transfer_ended_s - r.first_token_s for r in (whole, chunked)]
    assert exposed_s == [pytest.approx(0.012), pytest.approx(0.007)]


def test_a_newcomer_joins_when_the_running_step_has_ended(simulate):
    result = simulate([TraceRequest(0.0, 16, 40), TraceRequest(0.1, 16, 3)])
    first, second = sorted(result.requests, key=lambda r: r.request_id)
    assert second.transfer_ended_s < second.decode_started_s < second.transfer_ended_s + 0.006 + 1e-4
    # Two steps of two rows; all others of one.
    alone_s = sum(0.006 + 1e-6 * context for context in range(17, 17 + 39))
    assert first.finished_s - first.decode_started_s > alone_s + 2 * 0.001


def test_one_token_needs_no_decode(simulate):
    [request] = simulate([TraceRequest(0.0, 10, 1)]).requests
    assert request.finished_s == request.first_token_s == pytest.approx(0.020)


@pytest.mark.parametrize(
    "decode",
    [
        {"engine": {"num_blocks": 512}},
        {"engine": {"num_blocks": 40}},  # Sequences are preempted and come back.
        {"engine": {"num_blocks": 512}, "max_batch_size": 3},  # More are ready than a step has rows.
        {"engine": {"num_blocks": 512}, "step_target_s": 0.009},
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_steps_at_once_give_what_each_by_itself_gives(simulate, decode, seed):
    trace = list(poisson(12, 120, 60, 40, seed))
    by_step = simulate(trace, decode=decode, max_steps_at_once=1)
    at_once = simulate(trace, decode=decode)
    assert len(by_step.requests) + by_step.num_rejected == 120
    assert at_once.num_rejected == by_step.num_rejected
    assert at_once.num_preempted == by_step.num_preempted
    for ours, theirs in zip(times(at_once), times(by_step), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert at_once.decode_busy_share == pytest.approx(by_step.decode_busy_share)
    if decode["engine"]["num_blocks"] == 40:
        assert by_step.num_preempted > 0


def test_equal_beginnings_are_computed_once(simulate):
    block = 32
    trace = [TraceRequest(float(i), 3 * block, 2, (7, 8, 9 + i), block) for i in range(3)]
    assert simulate(trace).num_computed_tokens == 3 * block + 2 * block


def test_prompts_go_back_to_where_their_beginning_is(simulate):
    block = 32
    trace = [
        TraceRequest(float(i), 4 * block, 2, (chat := i % 3, 10 + chat, 20 + chat, 100 + i), block)
        for i in range(12)
    ]
    result = simulate(trace, prefill={"count": 4, "engine": {"num_blocks": 256}})
    assert result.num_computed_tokens == 3 * 4 * block + 9 * block


def test_a_full_queue_refuses_and_the_others_get_their_turn(simulate):
    trace = [TraceRequest(0.0, 32, 20) for _ in range(6)]
    result = simulate(trace, decode={"max_batch_size": 1}, router={"max_queued": 2})
    assert (len(result.requests), result.num_rejected) == (4, 2)
    values = summary(result, 10.0, 10.0)
    assert values["attainment"] == pytest.approx(4 / 6)
    assert values["waits_s"]["router"] > 0


def test_who_waits_too_long_is_refused(simulate):
    trace = [TraceRequest(0.0, 32, 200) for _ in range(6)]
    result = simulate(trace, decode={"max_batch_size": 1}, router={"queue_timeout_s": 0.5})
    assert result.num_rejected == 4


def test_what_no_worker_can_hold_is_refused_at_the_door(simulate):
    result = simulate([TraceRequest(0.0, 16 * 300, 2), TraceRequest(0.0, 16, 2)])
    assert (len(result.requests), result.num_rejected) == (1, 1)


def test_a_pool_without_a_size_is_named(simulate):
    with pytest.raises(ConfigError, match=r"decode\.engine\.num_blocks"):
        simulate([], decode={"engine": {}})


def test_a_large_pool_spreads_its_load(simulate):
    trace = [TraceRequest(0.0, 64, 2) for _ in range(60)]
    result = simulate(
        trace,
        prefill={"count": 30, "engine": {"num_blocks": 256}},
        decode={"count": 30, "engine": {"num_blocks": 256}},
    )
    alone_s = 0.010 + 0.064
    # Both prompts of a worker: the second waits for the first.
    assert max(r.ttft_s for r in result.requests) == pytest.approx(2 * alone_s)


def test_at_rate_keeps_the_requests(simulate):
    trace = at_rate(list(poisson(5, 50, 10, 10)), 2.0)
    assert trace[-1].at_s == pytest.approx(49 / 2)
    assert [r.at_s for r in trace] == sorted(r.at_s for r in trace)
