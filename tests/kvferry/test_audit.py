"""The conservation law over a deployment: what is a culprit, and what is not."""

import pytest

from kvferry.audit import Culprit, Holding, LiveRequest, RouterAudit, WorkerAudit, culprits, settled


def worker(*holdings, **fields):
    defaults = {
        "worker_id": "decode-0",
        "epoch": 9,
        "holdings": holdings,
        "num_blocks": 64,
        "num_free_blocks": 64 - sum(h.num_blocks for h in holdings),
        "num_lost_blocks": 0,
        "num_requests": 0,
        "error": "",
    }
    return WorkerAudit(**defaults | fields)


def router(name, live, *workers):
    requests = tuple(LiveRequest(request_id, "DECODE", 1.0, "decode-0", 3) for request_id in live)
    return RouterAudit(name, requests, workers)


def held(name, router_id="r1", state="RUNNING"):
    return Holding(name, state, 4, 2.5, router_id)


def test_what_a_live_request_holds_is_right_under_the_name_of_any_attempt():
    assert culprits([router("r1", ["a", "b"], worker(held("a"), held("b~1.0")))]) == []


def test_what_no_live_request_holds_is_named():
    (culprit,) = culprits([router("r1", ["a"], worker(held("a"), held("gone~2.0", state="FILLING")))])
    assert culprit == Culprit("decode-0 (epoch 9)", "gone~2.0", "4 blocks in state FILLING, of r1")


def test_what_belongs_to_a_router_that_was_not_asked_is_not_judged():
    holding = held("x", router_id="r2")
    assert culprits([router("r1", [], worker(holding))]) == []
    both = [router("r1", [], worker(holding)), router("r2", ["x"], worker(holding))]
    assert culprits(both) == []
    both[1] = router("r2", [], worker(holding))
    assert [culprit.name for culprit in culprits(both)] == ["x"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"error": "UNAVAILABLE: gone"}, "UNAVAILABLE: gone"),
        ({"num_lost_blocks": 3}, "3 blocks"),
        ({"num_requests": 2}, "2 requests are counted"),
    ],
)
def test_silence_lost_blocks_and_wrong_counts_are_culprits(fields, word):
    (culprit,) = culprits([router("r1", [], worker(**fields))])
    assert word in culprit.what


def test_a_holding_that_the_worker_is_giving_back_is_a_culprit_only_if_it_stays():
    freeing = [router("r1", [], worker(held("a", router_id="", state="FREEING")))]
    idle = [router("r1", [], worker())]
    answers = [freeing, idle]
    assert settled(lambda: answers.pop(0), settle_s=5.0) == (idle, [])
    _, found = settled(lambda: freeing, settle_s=0.05)
    assert [culprit.name for culprit in found] == ["a"]


def test_each_moment_has_its_own_passers_by():
    names = iter("abcdefghijklmnopqrstuvwxyz")
    _, found = settled(lambda: [router("r1", [], worker(held(next(names))))], settle_s=0.05)
    assert found == []
