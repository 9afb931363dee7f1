"""One member on a real Ray cluster of this machine."""

import asyncio
import os
import signal
import sys

import pytest
import ray

from deploy import environment
from deploy.cluster import Cluster, describe, request_of
from deploy.member import Lost, Member, Plan, StartFailed
from kvferry.config import Resources
from kvferry.models import ModelNotFound

pytestmark = pytest.mark.slow


class Worker:
    """As much of a worker as a launcher sees."""

    def __init__(self, failure=None):
        self._failure = failure
        self._address = None

    async def start(self):
        if self._failure:
            raise self._failure
        self._address = f"127.0.0.1:{os.getpid()}"
        return self._address

    async def address(self):
        return self._address

    async def environment(self):
        return dict(os.environ)

    async def stop(self):
        self._address = None


@pytest.fixture(scope="module")
def cluster():
    # Ray's processes cannot import a test module: the class travels whole.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with Cluster([{"CPU": 1}]) as cluster:
        yield cluster


@pytest.fixture
def said():
    return []


@pytest.fixture
def make(cluster, said):
    members = []

    def make(resources=Resources(num_cpus=0.1), *arguments):  # noqa: B008 - frozen
        members.append(Member(Plan("decode-0", lambda: Worker, arguments, resources), cluster, said.append))
        return members[-1]

    yield make
    for member in members:
        member.kill()


async def test_a_member_starts_once_and_says_where_it_is(make):
    member = make()
    address = await member.start()
    assert member.state == "ready"
    assert await member.call("address") == address
    assert await member.start() == address
    await member.stop()


async def test_a_killed_process_comes_back_and_can_be_started_again(make):
    member = make()
    first = await member.start()
    os.kill(int(first.split(":")[1]), signal.SIGKILL)
    async with asyncio.timeout(60):
        while True:
            try:
                if await member.call("address") is None:
                    break
            except Lost:
                assert member.state == "lost"
            await asyncio.sleep(0.05)
        assert await member.start() != first
    assert member.state == "ready"


async def test_a_failed_start_names_the_member_and_the_cause(make):
    member = make(Resources(num_cpus=0.1), ModelNotFound("no such model; do this"))
    with pytest.raises(StartFailed, match=r"decode-0 could not start: ModelNotFound: no such model; do this"):
        await member.start()
    member = make(Resources(num_cpus=0.1), ZeroDivisionError("a bug"))
    with pytest.raises(StartFailed, match=r"in start(.|\n)*ZeroDivisionError: a bug"):
        await member.start()


async def test_what_no_node_has_is_refused_at_once_on_one_machine(make, said):
    member = make(Resources(num_cpus=0.1, custom={"prefill_node": 1}))
    async with asyncio.timeout(2):
        with pytest.raises(StartFailed, match=r"asks one node for CPU 0.1, prefill_node 1, which none has; "):
            await member.start()
    assert said == []


async def test_what_a_cluster_lacks_is_reported_while_it_is_waited_for(make, said, monkeypatch, cluster):
    monkeypatch.setattr(cluster, "is_local", False)
    monkeypatch.setattr("deploy.member.REPORT_S", 0.5)
    start = asyncio.create_task(make(Resources(num_gpus=4)).start())
    async with asyncio.timeout(10):
        while len(said) < 2:
            await asyncio.sleep(0.05)
    start.cancel()
    assert "decode-0 cannot be placed: it asks one node for CPU 1, GPU 4, which none has; " in said[0]
    assert "has CPU" in said[0]
    assert "(waiting for 0 s)" in said[0]
    assert "free in all: CPU" in said[1]


async def test_a_member_waits_for_what_another_gives_back(make, said, monkeypatch, cluster):
    monkeypatch.setattr(cluster, "is_local", False)
    monkeypatch.setattr("deploy.member.REPORT_S", 0.5)
    (node,) = cluster.nodes().values()
    everything = Resources(num_cpus=node["CPU"])
    first = make(everything)
    await first.start()
    start = asyncio.create_task(make(everything).start())
    async with asyncio.timeout(30):
        while not said:
            await asyncio.sleep(0.05)
        assert "which none has free now" in said[0]
        first.kill()
        await start


async def test_threads_follow_the_cpus(make):
    member = make(Resources(num_cpus=2))
    await member.start()
    assert (await member.call("environment"))["OMP_NUM_THREADS"] == "2"


def test_gpus_are_hidden_on_a_cluster_from_who_asked_for_none(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert environment.of_actor(Resources(num_gpus=0)) == {"CUDA_VISIBLE_DEVICES": ""}
    assert environment.of_actor(None) == {"CUDA_VISIBLE_DEVICES": ""}
    assert "CUDA_VISIBLE_DEVICES" not in environment.of_actor(Resources(num_gpus=1))


def test_only_what_is_asked_for_is_asked_of_ray():
    assert request_of(Resources(num_cpus=0, num_gpus=0)) == {}
    assert request_of(Resources(num_cpus=2, custom={"decode_node": 1})) == {"CPU": 2, "decode_node": 1}
    assert describe({"memory": 1e9, "node:1.2.3.4": 1, "GPU": 1, "CPU": 0.5}) == "CPU 0.5, GPU 1"
    assert describe({"memory": 1}) == "nothing"
