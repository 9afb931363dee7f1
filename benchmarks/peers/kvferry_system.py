"""kvferry itself: a router, one prefill and one decode worker, or what a configuration says."""

import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.peers.peer import HOST, Peer
from benchmarks.peers.process import ServerProcess, free_port
from kvferry import config as settings

_START_TIMEOUT_S = 240.0
# The `kvferry` command, whether or not the package is installed.
_COMMAND = [sys.executable, "-c", "from kvferry.cli import app; app()"]


class Kvferry(Peer):
    """The checkout that this file belongs to."""

    name = "kvferry"

    def __init__(self, model_dir: Path, config: Path | None = None) -> None:
        super().__init__(model_dir)
        self._config = settings.load(config) if config else settings.DeploymentConfig()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def model(self) -> str:
        """See `Peer`."""
        return self._config.served_name or self._model_dir.name

    async def start(self) -> None:
        """See `Peer`."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-benchmark-")
        path = Path(self._folder.name) / "deployment.yaml"
        port = free_port()
        values = self._config.model_dump(exclude_unset=True)
        values["model"] = str(self._model_dir)
        values["served_name"] = self.model
        values["router"] = values.get("router", {}) | {"grpc_port": 0, "http_port": port}
        path.write_text(yaml.safe_dump(values))
        self.url = f"http://{HOST}:{port}/v1"
        process = ServerProcess([*_COMMAND, "serve", str(path)], Path(self._folder.name) / "server.log")
        self._processes.append(process)
        await process.until_ready(self.url, "/ready", _START_TIMEOUT_S)

    def stop(self) -> None:
        """See `Peer`."""
        super().stop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
