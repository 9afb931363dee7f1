"""The signals that end a deployment: all of them as Ctrl-C does. For the main thread only."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Each of the signals raises `KeyboardInterrupt` within the block."""
    with _handled_by(signal.default_int_handler):
        yield


@contextmanager
def held() -> Iterator[None]:
    """Keeps the signals until the block is done, then raises `KeyboardInterrupt` if there were any.

    Goes around what would leave processes behind if it were broken off.
    """
    caught: list[int] = []
    with _handled_by(lambda number, _: caught.append(number)):
        yield
    if caught:
        raise KeyboardInterrupt


@contextmanager
def _handled_by(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
