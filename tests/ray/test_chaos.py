"""The chaos benchmark's quick run: Ray actors that are killed, stopped and cut off under load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_nothing_is_lost_doubled_corrupted_or_leaked_under_faults(demo_model):
    command = [sys.executable, "-m", "benchmarks.chaos", "--quick", "--seed", "1", "--json"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert found["violations"] == []
    assert done.returncode == 0, done.stderr
    assert found["held_after"] == 0
    assert {"kill", "kill_router", "cancel"} <= found["injected"].keys()
