"""A running estimate of a time that grows with the amount of work."""

from __future__ import annotations

from collections.abc import Iterable

_DECAY = 0.98
"""Factor by which an observation multiplies the weights of all earlier ones, so that about the last fifty count."""
_MIN_VARIANCE = 0.01
"""If the variance of x is at most this fraction of the square of its mean, the observations determine no slope."""
_EXPECTED_WEIGHT = 0.1


class LineFit:
    """A line `y = intercept + slope * x` fitted by least squares to recent observations. Neither the slope nor the
    intercept is negative. If all observations have nearly the same x, or if y does not grow with x, the line goes
    through the origin.
    """

    def __init__(self, expected: Iterable[tuple[float, float]] = ()) -> None:
        """`expected` contains points (x, y). They count as observations with the constant weight 0.1."""
        self._sums = [0.0] * 5
        self._expected = [0.0] * 5
        for x, y in expected:
            _add(self._expected, x, y, _EXPECTED_WEIGHT)

    def note(self, x: float, y: float) -> None:
        """Adds an observation, of weight 1."""
        self.fade(_DECAY)
        _add(self._sums, x, y, 1.0)

    def fade(self, keep: float) -> None:
        """Multiplies the weights of all earlier observations by `keep`."""
        self._sums = [keep * value for value in self._sums]

    @property
    def weight(self) -> float:
        """The sum of the weights of the observations and of the expected points."""
        return self._sums[0] + self._expected[0]

    @property
    def mean_y(self) -> float:
        """The mean of y, or 0.0 without observations."""
        weight, _, y, _, _ = self._all()
        return y / weight if weight else 0.0

    @property
    def ratio(self) -> float:
        """The weighted sum of y divided by the weighted sum of x, or 0.0 if the latter is 0."""
        _, x, y, _, _ = self._all()
        return y / x if x else 0.0

    @property
    def slope(self) -> float:
        """The increase of y per unit of x, or 0.0 if every x is 0."""
        weight, x, y, xx, xy = self._all()
        if x == 0.0:
            return 0.0
        mean_x = x / weight
        variance = xx / weight - mean_x * mean_x
        if variance > _MIN_VARIANCE * mean_x * mean_x:
            slope = (xy / weight - mean_x * y / weight) / variance
            if slope > 0.0:
                return min(slope, y / x)
        return y / x

    def at(self, x: float) -> float:
        """Returns the line's y at `x`, or 0.0 without observations."""
        weight, sum_x, _, _, _ = self._all()
        return self.mean_y + self.slope * (x - sum_x / weight) if weight else 0.0

    def _all(self) -> list[float]:
        return [seen + expected for seen, expected in zip(self._sums, self._expected, strict=True)]


def _add(sums: list[float], x: float, y: float, weight: float) -> None:
    """Adds a point to the weighted sums of 1, x, y, x * x and x * y."""
    for place, value in enumerate((1.0, x, y, x * x, x * y)):
        sums[place] += weight * value
