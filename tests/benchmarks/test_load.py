"""The load generator: what it sends, what it stamps, and that no failure is lost."""

import asyncio
import itertools
import re
import time

import pytest

from benchmarks.load.api import ChatApi, CompletionsApi
from benchmarks.load.arrivals import Arrival
from benchmarks.load.connection import HttpClient
from benchmarks.load.driver import Target
from benchmarks.load.outcome import Job

JOB = Job(" a prompt", 2, 6)


def target_of(server, api=None, **client):
    return Target(HttpClient(server.url, **client), api or CompletionsApi(), "tiny", {"extra_field": 1})


async def one(server, **client):
    run = await target_of(server, **client).run_closed(iter([JOB]), 1, 10, 1)
    [outcome] = run.outcomes
    return outcome


@pytest.mark.parametrize("api", [CompletionsApi(), ChatApi()])
async def test_times_are_those_of_the_server(tiny_server, api):
    run = await target_of(tiny_server, api).run_closed(iter([JOB]), 1, 10, 1)
    [outcome] = run.outcomes
    assert outcome.error == ""
    assert outcome.num_output_tokens == len(outcome.event_times_s) == 6
    assert 0.05 <= outcome.ttft_s < 0.5
    assert len(outcome.gaps_s) == 5
    # Timers may fire late on a busy machine, never early.
    assert 0.1 - 0.02 <= sum(outcome.gaps_s) < 1.0
    assert outcome.tpot_s == pytest.approx(sum(outcome.gaps_s) / 5)


async def test_requests_ask_for_exactly_what_is_counted(tiny_server):
    await one(tiny_server)
    [request] = tiny_server.requests
    assert request == {
        "model": "tiny",
        "prompt": " a prompt",
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_field": 1,
    }


async def test_tokens_are_counted_by_usage_not_by_events(tiny_server):
    tiny_server.tokens_per_event = 2
    outcome = await one(tiny_server)
    assert outcome.error == ""
    assert (outcome.num_output_tokens, len(outcome.event_times_s)) == (6, 3)


async def test_a_prompt_that_is_counted_otherwise_is_told(tiny_server):
    tiny_server.prompt_tokens = 5
    assert (await one(tiny_server)).num_prompt_tokens_off == 3


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        ("status", "HTTP 500"),
        ("cut", "connection closed"),
        ("event", "worker lost"),
        ("short", "5 tokens instead of 6"),
        ("no done", r"without \[DONE\]"),
        ("hang", "no whole answer within 0.3 s"),
    ],
)
async def test_what_goes_wrong_is_an_error(tiny_server, spoil, error):
    tiny_server.spoil = spoil
    outcome = await one(tiny_server, timeout_s=0.3 if spoil == "hang" else 10)
    assert re.search(error, outcome.error)


async def test_a_server_that_is_not_there_is_an_error(unused_tcp_port):
    client = HttpClient(f"http://127.0.0.1:{unused_tcp_port}")
    run = await Target(client, CompletionsApi(), "tiny").run_closed(iter([JOB] * 3), 3, 10, 3)
    assert ["cannot connect" in outcome.error for outcome in run.outcomes] == [True] * 3


async def test_a_closed_loop_keeps_its_streams_busy_and_ends(tiny_server):
    target = target_of(tiny_server)
    run = await asyncio.wait_for(target.run_closed(itertools.repeat(JOB), 3, 0.5, 1000), 20)
    assert tiny_server.max_open == 3
    assert len(run.outcomes) == len(tiny_server.requests) >= 3
    assert 0.5 <= run.end_s - run.begin_s < 0.6


async def test_a_closed_loop_is_bounded_in_requests(tiny_server):
    run = await target_of(tiny_server).run_closed(itertools.repeat(JOB), 3, 10, 7)
    assert len(run.outcomes) == len(tiny_server.requests) == 7


async def test_an_open_loop_does_not_wait_for_answers(tiny_server):
    tiny_server.first_s = 0.5
    arrivals = [Arrival(0.01 * index, JOB) for index in range(8)]
    run = await target_of(tiny_server).run_open(arrivals)
    assert tiny_server.max_open == 8
    assert [outcome.error for outcome in run.outcomes] == [""] * 8
    assert all(outcome.ttft_s >= 0.5 for outcome in run.outcomes)


async def test_latency_counts_from_when_a_request_was_due(tiny_server, monkeypatch):
    target = target_of(tiny_server)
    post = target.client.post

    async def late(path, body):
        await asyncio.sleep(0.3)
        return await post(path, body)

    monkeypatch.setattr(target.client, "post", late)
    run = await target.run_open([Arrival(0.0, JOB)])
    assert run.outcomes[0].ttft_s >= 0.35


async def test_a_hopeless_open_loop_is_given_up(tiny_server):
    tiny_server.first_s = 20
    started_s = time.monotonic()
    arrivals = [Arrival(0.0, JOB), Arrival(0.0, JOB), Arrival(60.0, JOB)]
    target = target_of(tiny_server, timeout_s=0.2)
    run = await target.run_open(arrivals, lambda outcome: bool(outcome.error))
    assert time.monotonic() - started_s < 15
    assert len(run.outcomes) <= 2


async def test_connections_are_used_again_only_where_asked(tiny_server):
    await target_of(tiny_server).run_closed(itertools.repeat(JOB), 1, 10, 3)
    assert tiny_server.num_connections == 3
    client = target_of(tiny_server, keep_alive=True)
    await client.run_closed(itertools.repeat(JOB), 1, 10, 3)
    assert tiny_server.num_connections == 4
    client.client.close()


@pytest.mark.parametrize("url", ["127.0.0.1:80", "https://127.0.0.1", "http://"])
def test_an_address_that_cannot_be_used_is_refused(url):
    with pytest.raises(ValueError, match="no http:// address"):
        HttpClient(url)
