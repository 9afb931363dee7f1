"""A linear cost learned from what was measured, one observation at a time.

Least squares with exponential forgetting, the recursive kind in its information form: the weighted sums of
the products of features and times are all that is kept. Coefficients are never negative, for no work takes
less time than none. Where the measurements say nothing of a direction (all steps alike), the coefficients
stay as they were; where nothing is known at all, the first time is shared evenly among the features, so that
the very first prediction is sane.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

# Half of what is known comes from the last 700 observations: some ten seconds of decode steps.
FORGETTING = 0.999

# Observations between two solutions. Solving takes about 0.1 ms.
NUM_BETWEEN_FITS = 8

# How strongly the former coefficients hold on, against observations of weight 1 in all.
_INERTIA = 1e-3

# A time so many times its prediction counts as so many times: the process was stopped, not the work slow.
# A lasting change gets through all the same, a factor at a time.
_MAX_RATIO = 4.0

# Of the mean relative error: about the last 100 observations.
_ERROR_SHARE = 0.01


class OnlineFit:
    """Predicts seconds as a weighted sum of features. Errors count relative to the prediction."""

    def __init__(self, num_features: int) -> None:
        self.coefficients: tuple[float, ...] = (0.0,) * num_features
        self.error = 0.0
        self.num_observations = 0
        # Sums over the observations: weight * feature * feature, and weight * feature * seconds.
        self._products: NDArray[np.float64] = np.zeros((num_features, num_features))
        self._targets: NDArray[np.float64] = np.zeros(num_features)
        self._weight = 0.0

    def predict(self, features: Sequence[float]) -> float:
        """Seconds; 0 before the first observation."""
        return sum(each * value for each, value in zip(self.coefficients, features, strict=True))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Something with these features, none negative, took so long. Times of 0 or less are passed by."""
        if seconds <= 0:
            return
        predicted_s = self.predict(features)
        if predicted_s > 0:
            self._note_error(abs(predicted_s - seconds) / seconds)
            seconds = min(seconds, _MAX_RATIO * predicted_s)
        row = np.asarray(features, dtype=np.float64)
        # By the prediction, not the time itself: dividing by what scatters would favour the short times.
        weight = (predicted_s or seconds) ** -2
        self._products *= FORGETTING
        self._targets *= FORGETTING
        self._weight = FORGETTING * self._weight + 1.0
        self._products += weight * np.outer(row, row)
        self._targets += weight * seconds * row
        self.num_observations += 1
        if self.num_observations < NUM_BETWEEN_FITS or self.num_observations % NUM_BETWEEN_FITS == 0:
            self._fit()

    def _note_error(self, error: float) -> None:
        # A plain mean at first: the first errors are large and must not linger.
        share = max(_ERROR_SHARE, 1.0 / self.num_observations)
        self.error += share * (min(error, _MAX_RATIO) - self.error)

    def _fit(self) -> None:
        """The best coefficients of which none is negative, near the former ones where it does not matter."""
        scales = np.sqrt(np.diag(self._products) / self._weight)
        seen = np.flatnonzero(scales)
        scale = scales[seen]
        # In units in which each feature's coefficient is its share of the time, about 1 in all.
        former = np.asarray(self.coefficients)[seen] * scale
        matrix = self._products[np.ix_(seen, seen)] / np.outer(scale, scale) / self._weight
        matrix += _INERTIA * np.eye(len(seen))
        target = self._targets[seen] / scale / self._weight + _INERTIA * former
        best = _non_negative(matrix, target) / scale
        coefficients = list(self.coefficients)
        for index, value in zip(seen, best, strict=True):
            coefficients[index] = float(value)
        self.coefficients = tuple(coefficients)


def _non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Minimises x'Mx / 2 - t'x over x >= 0, for few unknowns: tries which of them are 0."""
    num = len(target)
    best, least = np.zeros(num), 0.0
    for size in range(num, 0, -1):
        for chosen in combinations(range(num), size):
            part = np.linalg.solve(matrix[np.ix_(chosen, chosen)], target[list(chosen)])
            # Where it is the minimum without bounds, the value is -t'x / 2.
            value = -float(target[list(chosen)] @ part) / 2
            if value < least and (part >= 0).all():
                best, least = np.zeros(num), value
                best[list(chosen)] = part
        if size == num and least < 0:
            break  # All are positive: nothing can be better.
    return best
