"""Metrics: what the fields of events measure. Each stands once, as a `Metric` in the annotation of its field.

Every reader takes it from there: a curve of a tracker, of the live page and of Grafana, a figure of Prometheus, a
column of the console. In all of them it has the name of its field, or the name that its `Metric` gives.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from diloco.units import format_bytes, format_count, format_duration

Kind = Literal["gauge", "rate", "part", "total", "counter"]
"""gauge: the last value counts; rate: a mean over one step, so that a mean of several weighs each by its time; part:
what one event adds to a sum; total: of the whole run so far, also before a resumption; counter: so far, from 0 at some
moment that isn't the start of the run."""

UNITS: Mapping[str, tuple[int, Callable[[float], str]]] = {
    "nats per token": (7, "{:.4f}".format),
    "share": (6, lambda value: f"{100 * value:.1f} %"),  # from 0 to 1
    "tokens": (8, format_count),
    "tokens per second": (8, format_count),
    "bytes": (8, format_bytes),
    "s": (6, format_duration),
    "": (7, "{:.3g}".format),
}
"""The width of a value in a table, and its text, by unit; another unit has those of ""."""


@dataclass(frozen=True)
class Metric:
    """What a field measures.

    The first ``title`` and ``unit`` are for people. Values of a metric ``of_model`` come from losses or parameters, so
    they may be NaN or infinite, and their extremes are of interest. A metric with a ``column`` has one of this title in
    the console.
    """

    title: str
    unit: str = ""
    kind: Kind = "gauge"
    of_model: bool = False
    column: str = ""
    name: str = ""  # default: that of its field

    def show(self, value: float | None) -> str:
        """Return a value as text; None is "-"."""
        return "-" if value is None else self._form[1](value)

    @property
    def width(self) -> int:
        """The number of characters of its column."""
        return max(self._form[0], len(self.column))

    @property
    def _form(self) -> tuple[int, Callable[[float], str]]:
        return UNITS.get(self.unit, UNITS[""])


def metrics_of(kind: type) -> Mapping[str, Metric]:
    """Return the metrics among the fields of an event, or of a named tuple in one, by field.

    >>> class Weather(NamedTuple):
    ...     place: str
    ...     wind: Annotated[float, Metric("Wind", "m/s", name="wind_m_per_s")]
    >>> [metric.name for metric in metrics_of(Weather).values()]
    ['wind_m_per_s']
    """
    return _cached(kind)


def _metrics_of(kind: type) -> Mapping[str, Metric]:
    metrics = {}
    for field, hint in get_type_hints(kind, include_extras=True).items():
        for trait in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            if isinstance(trait, Metric):
                metrics[field] = replace(trait, name=trait.name or field)
    return metrics


_cached: Callable[[type], Mapping[str, Metric]] = functools.cache(_metrics_of)


class Measurement(NamedTuple):
    """A value of a metric, and which one of several it is: label (such as "peer") and value of the label, or ""."""

    metric: Metric
    value: float
    label: str = ""
    which: str = ""


def measured(facts: Any, label: str = "", which: str = "") -> Iterator[Measurement]:
    """Yield the known values of the metrics in an event, or in a named tuple of one."""
    for field, metric in metrics_of(type(facts)).items():
        value = getattr(facts, field)
        if value is not None:
            yield Measurement(metric, value, label, which)
