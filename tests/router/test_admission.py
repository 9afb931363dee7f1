"""The router's queue: whose turn it is, and that nobody is passed over for ever."""

import asyncio

import pytest

from kvferry.config import ConfigError, parse
from router.admission import Admission
from scheduling.queue_policies import QUEUE_POLICIES


class Room:
    """Places that are given out one at a time."""

    def __init__(self, policy):
        self.admission = Admission(100, 30.0, QUEUE_POLICIES[policy]())
        self.free = 0
        self.order = []
        self.tasks = []

    async def enter(self, name, *, priority=0, num_tokens=10, is_accepted=False):
        async def attempt():
            if not self.free:
                return None
            self.free -= 1
            self.order.append(name)
            return name

        task = self.admission.admit(priority, num_tokens, attempt, is_accepted=is_accepted)
        self.tasks.append(asyncio.create_task(task))
        await asyncio.sleep(0)

    async def all_enter(self):
        self.free = len(self.tasks)
        self.admission.wake()
        await asyncio.gather(*self.tasks)
        assert self.admission.num_queued == 0
        return self.order


async def test_higher_first_then_the_shortest():
    room = Room("priority")
    await room.enter("long", num_tokens=50)
    await room.enter("short")
    await room.enter("high", priority=1, num_tokens=90)
    assert await room.all_enter() == ["high", "short", "long"]


async def test_by_arrival_whatever_the_priority():
    room = Room("fcfs")
    for name, priority in [("a", 0), ("b", 5), ("c", 9)]:
        await room.enter(name, priority=priority)
    assert await room.all_enter() == ["a", "b", "c"]


async def test_a_flood_of_high_ones_does_not_keep_a_low_one_out():
    room = Room("priority")
    await room.enter("low", num_tokens=100)
    for number in range(30):
        await room.enter(f"high-{number}", priority=1, num_tokens=100)
    assert (await room.all_enter()).index("low") in range(1, 10)


async def test_who_was_accepted_before_goes_first():
    room = Room("priority")
    await room.enter("high", priority=9)
    await room.enter("recovers", is_accepted=True)
    assert await room.all_enter() == ["recovers", "high"]


def test_an_unknown_policy_is_refused_with_the_key_and_the_known_ones():
    with pytest.raises(ConfigError, match=r"router\.policy.*'priority', 'fcfs', 'shortest' or 'deadline'"):
        parse({"router": {"policy": "random"}})
    assert parse({"router": {"policy": "deadline"}, "prefill": {"policy": "fcfs"}}).prefill.policy == "fcfs"
