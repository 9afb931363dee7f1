"""What every system under comparison is: something that can be set up, started, asked and stopped."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import Environment, Say
from benchmarks.peers.process import ServerProcess

HOST = "127.0.0.1"


class Peer(ABC):
    """A system that serves the demo model over OpenAI's API.

    extra: fields that a request to it carries besides. starts_slowly: whether its start alone takes more
    than a quick run has.
    """

    name: str
    extra: Mapping[str, Any] = {}
    starts_slowly = False

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._processes: list[ServerProcess] = []
        self.url = ""

    @property
    def environment(self) -> Environment | None:
        """Where it is installed; None where it needs nothing."""
        return None

    def why_not(self) -> str:
        """Why it cannot be started; empty when it can."""
        if self.environment is None or self.environment.is_complete:
            return ""
        return f"not set up: run `python -m benchmarks.serving --setup {self.environment.folder.name}`"

    def set_up(self, say: Say) -> None:
        """Installs it. Raises `SetupFailed`."""
        say(f"{self.name}: there is nothing to set up")

    @abstractmethod
    async def start(self) -> None:
        """Starts it and waits until it serves at `url`. Raises `ServerFailed`; `stop` is due all the same."""

    def stop(self) -> None:
        """Ends all that `start` started."""
        for process in reversed(self._processes):
            process.stop()
        self._processes.clear()

    @property
    def model(self) -> str:
        """What requests call the model."""
        return str(self._model_dir)
