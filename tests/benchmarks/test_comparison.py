"""A comparison treats all alike, leaves out what does not run and says so, and ends what it started."""

from pathlib import Path

import pytest

from benchmarks.load import loads
from benchmarks.load.loads import ChatsBesidePrompts, Shape, Streams
from benchmarks.load.outcome import Slo
from benchmarks.peers.environment import Environment
from benchmarks.peers.peer import Peer
from benchmarks.peers.process import ServerFailed
from benchmarks.serving_peers import Comparison, Plan

SHORT = Shape("short", 16, 4, Slo(ttft_s=5.0, tpot_s=5.0))


class FakePeer(Peer):
    """A system at an address that is there already."""

    def __init__(self, name, url, log, fails_in=None):
        super().__init__(Path("tiny"))
        self.name = name
        self._address = url
        self._log = log
        self._fails_in = fails_in
        self._num_starts = 0

    async def start(self):
        self._num_starts += 1
        self._log.append(("start", self.name))
        if self._num_starts == self._fails_in:
            raise ServerFailed("it ended at once")
        self.url = self._address

    def stop(self):
        self._log.append(("stop", self.name))


class NeverSetUp(FakePeer):
    @property
    def environment(self):
        return Environment("never")


def compare(peers, model_dir, plan):
    return Comparison(peers, model_dir, plan, lambda line: None).run()


async def test_rounds_alternate_and_ratios_compare(tiny_server, byte_level_dir, monkeypatch):
    monkeypatch.setattr(loads, "_PROBE_S", (0.3, 0.5))
    monkeypatch.setattr(loads, "_SETTLE_S", 0.0)
    log = []
    peers = [FakePeer(name, tiny_server.url, log) for name in ("kvferry", "other")]
    plan = Plan(2, (Streams(SHORT, 2, 0.3),), ((SHORT, 40.0),), max_probes=1)
    result = await compare(peers, byte_level_dir, plan)
    started = [name for what, name in log if what == "start"]
    assert started == ["kvferry", "other", "other", "kvferry"]
    assert log[1::2] == [("stop", name) for name in started]
    assert [(row["system"], row["load"]) for row in result["rows"]] == [
        ("kvferry", "2 streams 16/4"),
        ("other", "2 streams 16/4"),
    ]
    ours, other = result["rows"]
    assert (ours["num_rounds"], ours["num_errors"]) == (2, 0)
    assert "kvferry_ratio" not in ours
    expected = ours["output_tokens_per_s"] / other["output_tokens_per_s"]
    assert other["kvferry_ratio"]["tokens/s"] == pytest.approx(expected)
    # Twice as slow is half as good.
    assert other["kvferry_ratio"]["ITL p99"] == pytest.approx(other["itl_ms"]["p99"] / ours["itl_ms"]["p99"])
    assert [row["system"] for row in result["goodput"]] == ["kvferry", "other"]
    assert result["goodput"][0]["probes"][0]["attainment"] == 1.0
    assert result["skipped"] == {}


async def test_what_does_not_run_is_left_out_and_named(tiny_server, byte_level_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    log = []
    peers = [
        FakePeer("kvferry", tiny_server.url, log),
        FakePeer("breaks", tiny_server.url, log, fails_in=1),
        FakePeer("gone", "http://127.0.0.1:1/v1", log),
        NeverSetUp("never", tiny_server.url, log),
    ]
    result = await compare(peers, byte_level_dir, Plan(2, (Streams(SHORT, 1, 0.1),), ()))
    assert [row["system"] for row in result["rows"]] == ["kvferry"]
    assert result["skipped"].keys() == {"breaks", "gone", "never"}
    assert "it ended at once" in result["skipped"]["breaks"]
    assert "cannot connect" in result["skipped"]["gone"]
    assert "--setup never" in result["skipped"]["never"]
    # Also what failed to start is stopped; it is not tried again.
    assert log.count(("stop", "breaks")) == log.count(("start", "breaks")) == 1


async def test_long_prompts_arrive_while_chats_run(tiny_server, byte_level_dir):
    log = []
    tiny_server.gap_s = 0.001
    load = ChatsBesidePrompts(0.6, num_chats=2, every_s=0.3)
    peers = [FakePeer("kvferry", tiny_server.url, log)]
    result = await compare(peers, byte_level_dir, Plan(1, (load,), ()))
    chats, prompts = result["rows"]
    assert (chats["load"], prompts["load"]) == (
        "2 chats, 2048-token prompt every 0.3 s",
        "the 2048-token prompts",
    )
    assert prompts["num_requests"] == 2
    assert chats["num_errors"] == prompts["num_errors"] == 0
    # Warm-up, then both kinds at once.
    assert {request["max_tokens"] for request in tiny_server.requests[-4:]} == {16, 128}
