"""Curves of bounded size, whatever the length of the run: neighbouring points are merged and their extremes kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco.watch.records import finite

__all__ = ["Series"]


@dataclass(slots=True)
class _Mean:
    """The mean, minimum and maximum of the finite values in a bucket."""

    total: float = 0.0
    count: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, other: _Mean) -> None:
        self.total, self.count = self.total + other.total, self.count + other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def shown(self) -> tuple[float | None, float | None, float | None]:
        if not self.count:
            return None, None, None
        return finite(self.total / self.count), finite(self.low), finite(self.high)


@dataclass(slots=True)
class _Bucket:
    points: int
    place: Mapping[str, float]
    values: Mapping[str, _Mean]

    def merge(self, later: _Bucket) -> None:
        self.points, self.place = self.points + later.points, later.place
        for name, value in self.values.items():
            value.add(later.values[name])


class Series:
    """A curve of points in at most ``most`` buckets with equal numbers of points.

    When all buckets are full, neighbouring ones are merged in pairs, which halves the resolution. A bucket keeps the
    mean, the minimum and the maximum of its finite values.

    Args:
        places: the names of a point's coordinates, such as the step. A bucket has the coordinates of its last point.
        values: the names of the measured values.
        most: the largest number of buckets, an even number of at least 2.

    >>> losses = Series(("step",), ("loss",), most=2)
    >>> for step, loss in enumerate([4.0, 2.0, float("nan"), 9.0, 1.0]):
    ...     losses.add({"step": step}, {"loss": loss})
    >>> losses.columns
    ('step', 'loss', 'loss_low', 'loss_high')
    >>> losses.rows()
    [(3, 5.0, 2.0, 9.0), (4, 1.0, 1.0, 1.0)]
    """

    def __init__(self, places: Sequence[str], values: Sequence[str], most: int = 512) -> None:
        self.columns = (*places, *(f"{name}{end}" for name in values for end in ("", "_low", "_high")))
        self.stride = 1
        """The number of points in a full bucket."""
        self._places = tuple(places)
        self._values = tuple(values)
        self._most = most
        self._buckets: list[_Bucket] = []

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, place: Mapping[str, float], values: Mapping[str, float | None]) -> None:
        """Add a point. Values that are missing, None or not finite don't enter the mean."""
        means = {}
        for name in self._values:
            value = values.get(name)
            seen = value is not None and math.isfinite(value)
            means[name] = _Mean(value, 1, value, value) if seen and value is not None else _Mean()
        point = _Bucket(1, dict(place), means)
        if self._buckets and self._buckets[-1].points < self.stride:
            self._buckets[-1].merge(point)
            return
        if len(self._buckets) == self._most:
            for first, second in zip(self._buckets[::2], self._buckets[1::2], strict=True):
                first.merge(second)
            del self._buckets[1::2]
            self.stride *= 2
        self._buckets.append(point)

    def rows(self) -> list[tuple[float | None, ...]]:
        """Return one tuple per bucket, in the order of `columns`; None stands for a bucket without finite values."""
        rows = []
        for bucket in self._buckets:
            shown = [part for name in self._values for part in bucket.values[name].shown()]
            rows.append((*(round(bucket.place[name], 3) for name in self._places), *shown))
        return rows
