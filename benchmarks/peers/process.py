"""A server as a child process: started, awaited, its CPU time read, ended with all that it started."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.load.connection import HttpClient

_POLL_S = 0.2
_KILL_POLL_S = 0.01
_STOP_TIMEOUT_S = 20.0
_NUM_LOG_LINES = 15


class ServerFailed(Exception):
    """A server that did not come up, or ended; the message has the end of its log."""


def free_port() -> int:
    """A port of the loopback address that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


class ServerProcess:
    """One command in a session of its own, its output in a log file."""

    def __init__(self, command: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises `ServerFailed` when it has ended."""
        if (status := self._process.poll()) is not None:
            raise ServerFailed(f"{self._process.args!r} ended with status {status}:\n{self.log_tail()}")

    async def until_ready(self, url: str, path: str, timeout_s: float) -> None:
        """Waits until GET `path` answers 200. Raises `ServerFailed`."""
        client = HttpClient(url, timeout_s=5.0)
        deadline_s = time.monotonic() + timeout_s
        while (await client.get(path)).status != 200:
            self.check()
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"not ready within {timeout_s:g} s:\n{self.log_tail()}")
            time.sleep(_POLL_S)  # noqa: ASYNC251 - nothing else runs meanwhile

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        text = self._log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_NUM_LOG_LINES:])

    def pids(self) -> list[int]:
        """Its processes: all that run in its session."""
        session = str(self._process.pid)
        stats = {int(f.name): _stat(f) for f in Path("/proc").iterdir() if f.name.isdigit()}
        return [pid for pid, stat in stats.items() if stat[3:4] == [session] and stat[0] != "Z"]

    def cpu_s(self) -> float:
        """CPU seconds, user and system, that its processes have taken."""
        ticks = 0
        for pid in self.pids():
            if fields := _stat(Path(f"/proc/{pid}")):
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Ends it, in good order if it can."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        # Whatever it left behind is in its session, and takes a moment to die.
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while (left := self.pids()) and time.monotonic() < deadline_s:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_KILL_POLL_S)


def _stat(folder: Path) -> list[str]:
    """The fields of /proc/PID/stat from the state on (see proc(5)); none where the process is gone."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
