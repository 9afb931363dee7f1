"""A progress bar for work that tells what it does and, where it can, how far it is."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class ProgressBar:
    """Shows one bar for each thing that is done. Use it in a `with` block and call it as work goes on."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", visible=False)
        self._what = ""

    def __call__(self, what: str, share: float | None) -> None:
        """what: what is done now. share: how much of it is done, 0 to 1; None where that is not known."""
        if what != self._what:
            self._finish()
            self._what = what
            self._task = self._progress.add_task(what, total=None if share is None else 1.0)
        if share is not None:
            self._progress.update(self._task, completed=share)

    def _finish(self) -> None:
        self._progress.update(self._task, total=1.0, completed=1.0)
        self._progress.stop_task(self._task)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()
