"""One line of the table: a feature, what shows it, and that number without and with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Row:
    """id: of the feature, such as S1. measure: what the numbers are, with their unit.

    mode: "live" for real workers, "simulated" for the same schedulers under a clock of formulas. without_it,
    with_it: what was set before and after, in a few words.
    """

    id: str
    mode: Literal["live", "simulated"]
    measure: str
    before: float
    after: float
    without_it: str
    with_it: str


Measure = Callable[[bool], list[Row]]
"""Measures the rows of one feature; True: quickly, with fewer points."""
