"""Each queue policy by itself: its order, and that nobody starves."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.earliest_deadline import PATIENCE_S, EarliestDeadline
from scheduling.fair_shares import MAX_BEHIND_TOKENS, FairShares
from scheduling.first_come import FirstCome
from scheduling.owed_share import MIN_TURN_TOKENS
from scheduling.queue_policies import QUEUE_POLICIES
from scheduling.queue_policy import Ticket
from scheduling.shortest_first import ShortestFirst


def ticket(name, num_tokens=100, *, at=0.0, priority=0, weight=None, due=float("inf")):
    return Ticket(name, num_tokens, at, priority, weight, due)


def order(policy, now_s=0.0):
    """Serves everything whole; who came when."""
    names = []
    while (turn := policy.first(now_s)) is not None:
        names.append(turn.ticket.request_id)
        policy.remove(turn.ticket.request_id)
    return names


def filled(policy, *tickets):
    for each in tickets:
        policy.push(each)
    return policy


def test_first_come_first_served_whatever_the_size_and_priority():
    policy = filled(FirstCome(), ticket("b", 1, at=2, priority=9), ticket("c", at=3), ticket("a", 900, at=1))
    assert order(policy) == ["a", "b", "c"]


def test_shortest_first_and_equals_by_age():
    policy = filled(ShortestFirst(), ticket("long", 900), ticket("new", 5, at=2), ticket("old", 5, at=1))
    assert order(policy) == ["old", "new", "long"]


def test_a_pushed_ticket_takes_its_new_place():
    policy = filled(ShortestFirst(), ticket("a", 900), ticket("b", 500))
    policy.push(ticket("a", 100))
    assert order(policy) == ["a", "b"]


def test_earliest_deadline_first_and_the_late_behind_those_that_can_be_in_time():
    late, soon = ticket("late", at=0, due=4), ticket("soon", at=1, due=6)
    without = ticket("without", at=2)
    assert order(filled(EarliestDeadline(), without, soon, late), now_s=3) == ["late", "soon", "without"]
    assert order(filled(EarliestDeadline(), without, soon, late), now_s=5) == ["soon", "without", "late"]
    soonest = ticket("x", at=1, due=2 + PATIENCE_S + 0.1)
    assert order(filled(EarliestDeadline(), without, soonest), now_s=5) == ["without", "x"]


def test_the_higher_class_goes_first():
    policy = filled(FairShares(FirstCome), ticket("low"), ticket("high", at=5, priority=1))
    assert order(policy) == ["high", "low"]


@pytest.mark.parametrize("name", QUEUE_POLICIES)
def test_what_is_set_aside_is_out_of_the_order_until_pushed_again(name):
    policy = filled(QUEUE_POLICIES[name](), ticket("a", 10), ticket("b", 20, at=1))
    policy.set_aside("a")
    assert policy.first(0.0).ticket.request_id == "b"
    policy.push(ticket("a", 10))
    assert order(policy) == ["a", "b"]
    policy.remove("nobody")
    assert policy.first(0.0) is None


def serve(policy, waiting, num_tokens, max_turn):
    """Everyone always wants more: tokens that each has got."""
    got = Counter()
    while sum(got.values()) < num_tokens:
        turn = policy.first(0.0)
        share = min(turn.max_tokens, max_turn)
        assert share >= 1
        policy.charge(turn.ticket, share)
        got[turn.ticket.request_id] += share
        policy.push(waiting[turn.ticket.request_id])
    return got


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 3.5, 8.0]), min_size=1, max_size=4),
    max_turn=st.integers(1, 600),
)
def test_under_a_flood_the_shares_are_as_the_weights(weights, max_turn):
    waiting = {str(i): ticket(str(i), 10**6, priority=-i, weight=weight) for i, weight in enumerate(weights)}
    total = 40_000 if max_turn > 20 else 8_000
    got = serve(filled(FairShares(ShortestFirst), *waiting.values()), waiting, total, max_turn)
    for i, weight in enumerate(weights):
        fair = total * weight / sum(weights)
        # What a class may lag, and what the others may be ahead by, in its measure.
        slack = sum(w / min(weights) for w in weights) * (MAX_BEHIND_TOKENS + 2 * max_turn)
        assert abs(got[str(i)] - fair) <= slack


def test_a_class_that_was_away_is_owed_nothing():
    waiting = {"high": ticket("high", 10**6, priority=1, weight=1.0)}
    policy = filled(FairShares(FirstCome), *waiting.values())
    serve(policy, waiting, 50_000, 100)
    policy.push(ticket("low", 10**6, weight=1.0))
    waiting["low"] = ticket("low", 10**6, weight=1.0)
    got = serve(policy, waiting, 4_000, 100)
    assert got["low"] <= 2_000 + MAX_BEHIND_TOKENS
    policy.remove("high")
    serve(policy, waiting, 50_000, 100)
    policy.push(waiting["high"])
    # Nor does it go without what it lacked while the other was alone.
    assert serve(policy, waiting, 4_000, 100)["low"] >= 1_500


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=5, max_size=60), name=st.sampled_from(sorted(QUEUE_POLICIES))
)
def test_the_oldest_gets_on_however_many_shorter_ones_come(sizes, name):
    policy = QUEUE_POLICIES[name]()
    policy.push(ticket("oldest", 2000, at=-1.0, due=-0.5))
    got, others = 0, 0
    for number, size in enumerate(sizes * 20):
        policy.push(ticket(f"short-{number}", size, at=float(number), due=number + 100.0))
        turn = policy.first(float(number))
        share = min(turn.max_tokens, turn.ticket.num_tokens)
        policy.charge(turn.ticket, share)
        if turn.ticket.request_id == "oldest":
            got += share
            if got >= 2000:
                return
            policy.push(ticket("oldest", 2000 - got, at=-1.0, due=-0.5))
        else:
            others += share
            policy.remove(turn.ticket.request_id)
    assert got >= others / 3 - MIN_TURN_TOKENS - 50


def test_a_queue_in_permanent_overload_does_not_grow():
    policy = ShortestFirst()
    policy.push(ticket("long", 10**6))
    for number in range(2000):
        policy.push(ticket("long", 10**6 + number))
    assert len(policy._preferred._heap) < 100
