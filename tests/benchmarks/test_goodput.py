"""Bisection finds a known capacity, and ends."""

import pytest

from benchmarks.load.goodput import Probe, find


def system_of(capacity, seen=None, num=100):
    """Meets the targets of all requests up to its capacity, and of ever fewer above."""

    async def probe(rate):
        if seen is not None:
            seen.append(rate)
        return Probe(rate, num, num if rate <= capacity else int(num * capacity / rate * 0.89))

    return probe


@pytest.mark.parametrize("capacity", [0.3, 2.9, 3.0, 57.0])
async def test_the_capacity_is_found_from_above_and_below(capacity):
    found = await find(system_of(capacity), 3.0, max_probes=20, max_s=60)
    assert found.is_bounded
    assert found.requests_per_s <= capacity < found.requests_per_s * 1.12


async def test_ninety_percent_is_enough():
    async def probe(rate):
        return Probe(rate, 10, 9 if rate <= 4 else 8)

    found = await find(probe, 1.0, max_probes=20, max_s=60)
    assert 4 / 1.12 < found.requests_per_s <= 4


async def test_probes_are_bounded_in_number():
    rates = []
    found = await find(system_of(float("inf"), rates), 1.0, max_probes=4, max_s=60)
    assert rates == [1, 2, 4, 8]
    assert (found.requests_per_s, found.is_bounded, found.range) == (8, False, (8, None))


async def test_probes_are_bounded_in_time():
    found = await find(system_of(5), 1.0, max_probes=20, max_s=0)
    assert (found.requests_per_s, found.probes) == (0.0, [])


async def test_a_system_that_meets_nothing_has_no_goodput():
    async def probe(rate):
        return Probe(rate, 10, 0)

    found = await find(probe, 1.0, max_probes=5, max_s=60)
    assert (found.requests_per_s, found.is_bounded) == (0.0, True)


async def test_the_range_is_of_what_is_sure():
    # 19 of 20 passes, but its share may as well be 0.76; 100 of 100 is above 0.96.
    outcomes = {1.0: (100, 100), 2.0: (19, 20), 4.0: (17, 20), 8.0: (0, 20)}

    async def probe(rate):
        num_met, num = outcomes.get(rate, (0, 20))
        return Probe(rate, num, num_met)

    found = await find(probe, 1.0, max_probes=3, max_s=60)
    assert found.requests_per_s == 2.0
    assert found.range == (1.0, None)
    found = await find(probe, 8.0, max_probes=3, max_s=60)
    assert found.range == (0.0, 8.0)
