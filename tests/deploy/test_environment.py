"""What the launcher sets for the processes that it starts."""

import subprocess
import sys

import pytest

from deploy import environment
from kvferry.config import Resources


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_a_gpu_worker_has_an_allocator_that_grows_its_segments():
    assert environment.of_actor(Resources(num_gpus=0.5)) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("resources", [None, Resources(num_gpus=0)])
def test_others_have_none(resources):
    assert environment.of_actor(resources) == {}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_set_stands(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert environment.of_actor(Resources(num_gpus=1)) == {name: "max_split_size_mb:64"}


@pytest.mark.parametrize("order", ["environment.prepare(); import ray", "import ray; environment.prepare()"])
def test_ray_reads_what_is_set_or_nobody_goes_on(order):
    code = f"from deploy import environment; {order}"
    run = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True, timeout=60)
    if order.endswith("import ray"):
        assert run.returncode == 0, run.stderr
    else:
        assert "Ray was imported before its environment was set" in run.stderr
