"""The benchmarks as a person runs them."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import router, serving

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["benchmarks.serving", "benchmarks.router"])
def test_help_shows_examples(module):
    command = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"python -m {module} --" in " ".join(shown.split())


async def test_a_server_is_measured_from_the_command_line(tiny_server, byte_level_dir):
    command = [sys.executable, "-m", "benchmarks.serving", "--url", tiny_server.url, "--streams", "2"]
    command += ["--tokenizer", str(byte_level_dir), "--input", "12", "--output", "5"]
    command += ["--requests", "4", "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, log
    result = json.loads(output)
    assert result["goodput"] == []
    [row] = result["rows"]
    assert (row["system"], row["num_requests"], row["num_errors"]) == (tiny_server.url, 4, 0)
    assert row["ttft_ms"]["p50"] >= 50
    assert row["itl_ms"].keys() == {"p50", "p90", "p99"}
    assert row["output_tokens_per_s"] > 0
    assert {request["model"] for request in tiny_server.requests} == {"tiny"}


def test_no_server_is_said_in_one_line(unused_tcp_port, byte_level_dir):
    url = f"http://127.0.0.1:{unused_tcp_port}"
    arguments = ["--url", url, "--tokenizer", str(byte_level_dir)]
    result = CliRunner().invoke(serving.app, arguments)
    assert result.exit_code == 1
    assert "no model is listed there (cannot connect" in result.output


@pytest.mark.parametrize(
    ("app", "arguments", "said"),
    [
        (serving.app, ["--api", "both"], "neither completions nor chat"),
        (serving.app, ["--peers", "--systems", "kvferry,other"], "no such system: other"),
        (serving.app, ["--trace", "x.jsonl", "--rate", "2"], "brings its own rate"),
        (serving.app, ["--setup", "other"], "is none of"),
        (router.app, ["--systems", "other"], "no such router: other"),
    ],
)
def test_what_cannot_be_is_refused(app, arguments, said, byte_level_dir):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
