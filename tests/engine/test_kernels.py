"""Building the kernels: once, whole or not at all, and never a reason not to start."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import kernels

BUILD = [sys.executable, "-m", "engine.kernels"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """A compiler that runs a line of shell in which $OUT is the file to write; it counts its calls."""

    def install(line: str) -> Path:
        calls, script = tmp_path / "calls", tmp_path / "compiler"
        find_out = 'for arg; do [ "$prev" = -o ] && OUT=$arg; prev=$arg; done'
        script.write_text(f"#!/bin/sh\n{find_out}\necho $OUT >> {calls}\n{line}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return calls

    return install


def test_two_builders_at_once_build_once(cache, fake_compiler):
    calls = fake_compiler("sleep 0.3; echo library > $OUT")
    builders = [
        subprocess.Popen(BUILD, stdout=subprocess.PIPE, text=True, env=os.environ.copy()) for _ in range(2)
    ]
    outputs = {builder.communicate(timeout=60)[0] for builder in builders}
    [library] = cache.glob("*.so")
    assert outputs == {f"CPU kernels: {library}\n"}
    # One call for each source, one to link.
    assert len(calls.read_text().splitlines()) == 1 + len(list(kernels._SOURCES.glob("*.cpp")))


def test_a_cut_build_leaves_nothing_that_is_used_later(cache, fake_compiler):
    fake_compiler("echo half > $OUT; kill -9 $PPID")
    assert subprocess.run(BUILD, env=os.environ.copy(), check=False).returncode == -9
    assert not list(cache.glob("*.so"))
    assert list(cache.glob(".build-*"))
    fake_compiler("echo library > $OUT")
    assert kernels.build().read_text() == "library\n"
    assert not list(cache.glob(".build-*"))


def test_without_a_compiler_set_up_goes_on(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = subprocess.run(BUILD, env=os.environ.copy(), capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert "not built" in run.stdout
    assert "no-such-compiler" in run.stdout


def test_a_failed_build_costs_one_warning_that_says_what_it_costs(cache, fake_compiler):
    fake_compiler("echo 'attention.cpp:1: error: no such thing' >&2; exit 3")
    load = (
        "import logging; logging.basicConfig(); from engine.kernels import load_kernels; "
        "raise SystemExit(load_kernels())"
    )
    run = subprocess.run(
        [sys.executable, "-c", load], env=os.environ.copy(), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0
    assert run.stderr.count("WARNING") == 1
    assert "plain torch" in run.stderr
    assert "times as long" in run.stderr
    assert "no such thing" in run.stderr


def test_a_library_that_cannot_be_loaded_is_no_reason_to_stop(cache, fake_compiler):
    fake_compiler("echo garbage > $OUT")
    load = "from engine.kernels import load_kernels; raise SystemExit(load_kernels())"
    run = subprocess.run(
        [sys.executable, "-c", load], env=os.environ.copy(), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0
    assert "plain torch" in run.stderr


@pytest.mark.parametrize("changed", ["sources", "processor", "compiler"])
def test_what_goes_into_a_build_is_in_its_name(cache, fake_compiler, monkeypatch, tmp_path, changed):
    fake_compiler("echo library > $OUT")
    first = kernels.build()
    if changed == "sources":
        (tmp_path / "csrc").mkdir()
        (tmp_path / "csrc" / "attention.cpp").write_text("// other")
        monkeypatch.setattr(kernels, "_SOURCES", tmp_path / "csrc")
    elif changed == "processor":
        monkeypatch.setattr(kernels, "_processor_features", lambda: "other")
    else:
        monkeypatch.setenv("CXX", f"{os.environ['CXX']} -g")
    assert kernels.build() != first
    assert len(list(cache.glob("*.so"))) == 2


def test_the_real_kernels_build_and_load(caplog):
    """With the machine's compiler and the user's cache, as a worker does it."""
    with caplog.at_level(logging.WARNING):
        assert kernels.load_kernels()
    assert not caplog.records
