"""`python -m deploy.launch` as a user runs it: what it says, how it ends, and that nothing stays behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from deploy import signals


@pytest.fixture
def launch(tmp_path):
    """Starts to launch a deployment, given as text, of what passes for a model until it is loaded."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"embed": np.zeros(4, dtype=np.float32)}, model / "model.safetensors")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    started = []

    def launch(text, **extra):
        (tmp_path / "deployment.yaml").write_text(text.replace("MODEL", str(model)))
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.launch", str(tmp_path / "deployment.yaml")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, **extra},
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.communicate()


def outcome(process):
    _, errors = process.communicate(timeout=100)
    return process.returncode, errors


def belonging_to(folder):
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if folder in " ".join([*process.cmdline(), *process.environ().values()]):
                yield process


def test_a_users_mistake_is_one_clear_line(launch):
    status, errors = outcome(launch("modle: x"))
    assert (status, len(errors.splitlines())) == (1, 1)
    assert "modle: unknown key; the nearest known one is 'model'" in errors
    status, errors = outcome(launch("model: ./none"))
    assert (status, errors) == (1, "./none: no such directory\n")


def test_a_ray_that_is_not_there_is_named(launch):
    status, errors = outcome(launch("model: MODEL", RAY_ADDRESS="nonsense"))
    assert status == 1
    assert errors.splitlines()[-1].startswith("cannot use RAY_ADDRESS=nonsense: ")


@pytest.mark.slow
def test_a_worker_that_cannot_be_placed_ends_the_launch_with_what_it_asked_for(launch):
    deployment = "{model: MODEL, router: {grpc_port: 0, http_port: 0}, decode: {resources: {num_gpus: 99}}}"
    status, errors = outcome(launch(deployment))
    assert status == 1
    assert "it asks one node for CPU 1, GPU 99, which none has; 127.0.0.1:" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", signals.ENDING, ids=lambda number: number.name)
def test_a_signal_at_an_early_moment_leaves_no_process_and_is_no_failure(launch, number):
    process = launch("{model: MODEL, router: {grpc_port: 0, http_port: 0}}")
    assert "starting Ray" in process.stdout.readline()
    family = psutil.Process(process.pid)
    while not any("raylet" in child.name() for child in family.children(recursive=True)):
        time.sleep(0.01)
    words = " ".join(word for child in family.children() for word in child.cmdline())
    (folder,) = set(re.findall(r"/tmp/kvferry-\w+", words))
    began_s = time.monotonic()
    process.send_signal(number)
    assert outcome(process)[0] == 0
    assert time.monotonic() - began_s < 20
    # Time enough for what was being started to show itself.
    time.sleep(1.5)
    assert [child.cmdline() for child in belonging_to(folder)] == []
    assert not Path(folder).exists()


def test_signals_are_held_to_the_end_of_a_block_and_not_lost():
    before = signal.getsignal(signal.SIGTERM)
    reached = False
    with pytest.raises(KeyboardInterrupt), signals.held():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", signals.ENDING, ids=lambda number: number.name)
def test_every_ending_signal_interrupts(number):
    with pytest.raises(KeyboardInterrupt), signals.as_interrupts():
        signal.raise_signal(number)
