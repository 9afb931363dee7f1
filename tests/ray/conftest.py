"""`kvferry serve` as users run it: real Ray actors, the demo model, one prefill and one decode worker."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry import models

ROOT = Path(__file__).parents[2]
KVFERRY = str(Path(sys.executable).with_name("kvferry"))
# Loading a model twice on two busy cores takes a while; this only keeps a hang from lasting.
PATIENCE_S = 180


class Command:
    """A `kvferry` command in a process of its own, all of whose descendants can be told by a mark."""

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        self._log = log
        self._mark = f"KVFERRY_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [KVFERRY, *arguments],
                cwd=ROOT,
                env=inherited | environment | {name: value},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """All it has written so far."""
        return self._log.read_text()

    def processes(self) -> dict[int, str]:
        """Every process that descends from it and still runs: its command line by its id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in its output, once it is there."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not (match := re.search(pattern, self.output)):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < give_up_s, self.output
            time.sleep(0.05)
        return match

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=30)

    def end(self) -> None:
        """Kills what is left of it, by process id."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=30)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    folder = models.demo_model_dir()
    if not folder.is_dir():
        pytest.skip("the demo model is not here: `make model`")
    return folder


@pytest.fixture
def run_command(tmp_path: Path, demo_model: Path) -> Iterator[Callable[..., Command]]:
    """Starts `kvferry ...`; what is left of it is killed at the end."""
    commands: list[Command] = []

    def run(*arguments: str, **environment: str) -> Command:
        commands.append(Command(tmp_path / f"{len(commands)}.log", *arguments, **environment))
        return commands[-1]

    yield run
    for command in commands:
        command.end()


class Served:
    """A deployment that is up."""

    def __init__(self, command: Command) -> None:
        match = command.wait_for(r"ready: gRPC at (\S+), HTTP at (\S+)")
        self.command = command
        self.grpc, self.http = match.groups()

    def pid_of(self, worker_id: str) -> int:
        """The process of an actor, from the prefix that Ray gives its log lines."""
        return int(re.findall(rf"\({worker_id} pid=(\d+)\)", self.command.output)[-1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Served]:
    """`kvferry serve` with the demo model in float32, where greedy answers do not hang on rounding."""
    log = tmp_path_factory.mktemp("serve") / "serve.log"
    command = Command(log, "serve", "--grpc-port", "0", "--http-port", "0", "--dtype", "float32")
    try:
        yield Served(command)
    finally:
        command.end()
