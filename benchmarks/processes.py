"""Child processes of a benchmark, each on a core of its own, driven from the parent over a pipe."""

import asyncio
import multiprocessing
import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from engine.heap import keep_freed_memory


def cores() -> tuple[int, int]:
    """Two cores that this process may use, or one twice."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


def cpu_s() -> float:
    """CPU seconds that this process has used, in user code and in the kernel."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Remote:
    """An object in a process of its own; its methods are coroutines on an event loop there.

    It is made there by `factory(*args)`, and its `stop` is called at the end.
    """

    def __init__(self, core: int, factory: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, core, factory, args), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, method: str, *args: Any) -> None:
        """Calls a method; `result` waits for what it returns."""
        self._connection.send((method, args))

    def result(self) -> Any:
        """What the method called last has returned. Raises `RuntimeError` where it failed."""
        error, value = self._connection.recv()
        if error is not None:
            raise RuntimeError(error)
        return value

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method and waits for it."""
        self.start(method, *args)
        return self.result()

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(10)
        self._process.kill()


def _serve(connection: Connection, core: int, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    keep_freed_memory()
    asyncio.run(_answer(connection, factory, args))


async def _answer(connection: Connection, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    target = factory(*args)
    while True:
        try:
            method, method_args = await asyncio.to_thread(connection.recv)
        except EOFError:
            break
        try:
            connection.send((None, await getattr(target, method)(*method_args)))
        except Exception as error:  # noqa: BLE001 - the parent reports it
            connection.send((repr(error), None))
    await target.stop()
