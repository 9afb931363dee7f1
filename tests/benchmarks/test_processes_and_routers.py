"""Servers under comparison are started, timed and ended; a router's work is counted."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks import router
from benchmarks.load.api import ChatApi, CompletionsApi
from benchmarks.load.connection import HttpClient
from benchmarks.load.driver import Target
from benchmarks.load.outcome import Job
from benchmarks.peers.process import ServerFailed, ServerProcess, free_port
from benchmarks.routers.systems import MocksAlone

BUSY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
until = time.process_time() + 0.3
while time.process_time() < until: pass
print("did it", flush=True)
time.sleep(60)
"""


def wait_for(text, process):
    deadline_s = time.monotonic() + 30
    while text not in process.log_tail():
        assert time.monotonic() < deadline_s, process.log_tail()
        time.sleep(0.05)


def test_cpu_time_is_counted_and_children_end_too(tmp_path):
    process = ServerProcess([sys.executable, "-c", BUSY], tmp_path / "log")
    try:
        wait_for("did it", process)
        assert 0.25 <= process.cpu_s() < 5
        child = int(process.log_tail().split()[1])
        assert child in process.pids()
    finally:
        process.stop()
    assert process.pids() == []
    with pytest.raises(ServerFailed, match="ended with status"):
        process.check()


async def test_a_server_that_ends_shows_its_last_words(tmp_path):
    process = ServerProcess([sys.executable, "-c", "print('no such model'); exit(3)"], tmp_path / "log")
    with pytest.raises(ServerFailed, match="status 3(.|\n)*no such model"):
        await process.until_ready(f"http://127.0.0.1:{free_port()}", "/health", 30)
    process.stop()


@pytest.mark.parametrize("api", [CompletionsApi(), ChatApi()])
async def test_the_mock_worker_streams_what_is_asked_for(api, byte_level_dir: Path):
    system = MocksAlone(byte_level_dir)
    await system.start()
    try:
        target = Target(HttpClient(system.url, keep_alive=True), api, "mock")
        run = await target.run_closed(iter([Job("hi", 1, 40)] * 4), 2, 30, 4)
    finally:
        system.stop()
    assert [(o.error, o.num_output_tokens, len(o.event_times_s)) for o in run.outcomes] == [("", 40, 40)] * 4


@pytest.mark.slow
async def test_kvferrys_router_is_measured_over_both_apis(byte_level_dir):
    result = await router._compare(["kvferry", "no router"], byte_level_dir, 0.5, 1)
    assert result["skipped"] == {}
    assert [(row["system"], row["api"]) for row in result["rows"]] == [
        ("kvferry", "http"),
        ("kvferry", "grpc"),
        ("no router", "http"),
    ]
    for row in result["rows"]:
        assert row["num_errors"] == 0
        assert row["requests_per_s"] > 0
        assert row["tokens_per_s"] > 0
        assert row["cpu_s_per_million_tokens"] > 0
