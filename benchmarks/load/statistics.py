"""Percentiles, shares and how sure they are."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.load.outcome import Outcome, Slo

NUM_RESAMPLES = 1000
CONFIDENCE = 0.95

Range = tuple[float, float]
Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From samples [resamples, values] to one number for each resample."""


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), interpolated between the two nearest values; nan of nothing."""
    return float(np.percentile(values, q)) if len(values) else float("nan")


def mean(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """A `Statistic`."""
    result: NDArray[np.float64] = samples.mean(axis=1)
    return result


def median(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """A `Statistic`."""
    result: NDArray[np.float64] = np.median(samples, axis=1)
    return result


def bootstrap(values: Sequence[float], statistic: Statistic = mean, seed: int = 0) -> Range:
    """Where the statistic lies with 95 % confidence: Efron's percentile bootstrap over 1,000 resamples.

    nan of fewer than two values, of which nothing can be said.
    """
    if len(values) < 2:
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    drawn = np.asarray(values, dtype=np.float64)[
        generator.integers(0, len(values), (NUM_RESAMPLES, len(values)))
    ]
    margin = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(statistic(drawn), [margin, 100 - margin])
    return float(low), float(high)


def attainment(outcomes: Sequence[Outcome], slo: Slo) -> float:
    """The share of requests that met both targets; those that failed did not. nan of nothing."""
    return sum(map(slo.is_met, outcomes)) / len(outcomes) if outcomes else float("nan")


def wilson(num_met: int, num: int) -> Range:
    """Where a share lies with 95 % confidence (Wilson's score interval); it holds for few and for all too."""
    if num == 0:
        return 0.0, 1.0
    z = 1.959964
    share = num_met / num
    centre = (share + z**2 / (2 * num)) / (1 + z**2 / num)
    half = z / (1 + z**2 / num) * ((share * (1 - share) / num + z**2 / (4 * num**2)) ** 0.5)
    return max(0.0, centre - half), min(1.0, centre + half)


def rounded(value: Any) -> Any:
    """A number for JSON: four significant digits, None where there is no number. Walks lists and dicts."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if np.isfinite(value) else None
    return value
