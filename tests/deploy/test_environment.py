"""What the launcher sets for the processes that it starts."""

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
