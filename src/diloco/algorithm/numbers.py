"""Checks of numbers given by the user, and schedules of a number over steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from types import UnionType
from typing import Any, Literal, get_args

from diloco.errors import ConfigurationError, nearest

__all__ = [
    "ValueSchedule",
    "check_choice",
    "check_number",
    "check_replica",
    "check_type",
    "check_whole",
]


def check_whole(name: str, value: Any, least: int | None = None) -> int:
    """Return ``value`` as an int. It must be a whole number, and at least ``least`` if that is given.

    Raises:
        ConfigurationError: if it is not.

    >>> check_whole("inner_steps", 2.5, 1)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: inner_steps must be a whole number of at least 1, got 2.5.
    """
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None or (least is not None and whole < least):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigurationError(f"{name} must be a whole number{bound}, got {value!r}.")
    return whole


def check_replica(replica: Any, num_replicas: Any) -> int:
    """Return the number of a replica as an int. It must be from 0 to ``num_replicas - 1``.

    Raises:
        ConfigurationError: if it is not, or ``num_replicas`` is not a whole number of at least 1.

    >>> check_replica(5, 2)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: replica must be from 0 to 1 with num_replicas=2, got 5.
    """
    last = check_whole("num_replicas", num_replicas, 1) - 1
    if not 0 <= (number := check_whole("replica", replica)) <= last:
        raise ConfigurationError(f"replica must be from 0 to {last} with num_replicas={num_replicas}, got {replica}.")
    return number


def check_type(name: str, value: Any, kind: type | UnionType, works: str) -> None:
    """Raise `ConfigurationError`, which says what ``works``, if ``value`` is not a ``kind``."""
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name} must be {works}, got {value!r}.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise `ConfigurationError`, with the nearest choice, if ``value`` is not one of ``choices``.

    >>> check_choice("ranks", "alon", ("alone", "whole"))
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: ranks='alon' is unknown; did you mean 'alone'?
    """
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} is unknown; {nearest(str(value), choices)}")


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Check that ``value`` is a finite number from ``low`` to ``high``; ``above`` excludes ``low`` itself.

    Raises:
        ConfigurationError: if it is not.

    >>> check_number("momentum", 1.5, 0, 1)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: momentum must be a number from 0 to 1, got 1.5.
    >>> check_number("epsilon", float("nan"), 0, above=True)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: epsilon must be a finite number above 0, got nan.
    """
    number = float(value) if not isinstance(value, bool) and isinstance(value, Real) else math.nan
    if math.isfinite(number) and low <= number <= high and not (above and number == low):
        return
    if high < math.inf:
        wanted = f"a number from {low:g} to {high:g}"
    elif low > -math.inf:
        wanted = f"a finite number {'above' if above else 'of at least'} {low:g}"
    else:
        wanted = "a finite number"
    raise ConfigurationError(f"{name} must be {wanted}, got {value!r}.")


_Kind = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class ValueSchedule:
    """A linear warm-up to ``peak``, followed by a decay to ``final_ratio * peak`` at ``total_steps``.

    The decay has one of four shapes:

    - ``constant``: stays at the peak.
    - ``linear``: decreases linearly.
    - ``cosine``: ``final + (peak - final) * (1 + cos(pi * x)) / 2`` with x from 0 at the end of the warm-up to 1.
    - ``wsd``: stays at the peak, then decreases linearly over the last ``decay_steps``.

    After ``total_steps`` the value stays constant; it never rises again.

    Args:
        peak: The value after the warm-up.
        kind: The shape of the decay.
        total_steps: The step at which the final value is reached.
        warmup_steps: The length of the warm-up. Step s < warmup_steps gives ``peak * (s + 1) / warmup_steps``.
        final_ratio: The final value divided by the peak.
        decay_steps: The length of the decay of ``wsd``.

    >>> rate = ValueSchedule(peak=1.0, kind="cosine", total_steps=10, warmup_steps=2, final_ratio=0.0)
    >>> [round(rate(step), 3) for step in (0, 1, 2, 6, 10, 11)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    peak: float
    kind: _Kind = "constant"
    total_steps: int = 0
    warmup_steps: int = 0
    final_ratio: float = 0.0
    decay_steps: int = 0

    def __post_init__(self) -> None:
        check_number("peak", self.peak, -math.inf)
        check_number("final_ratio", self.final_ratio, 0, 1)
        for name in ("total_steps", "warmup_steps", "decay_steps"):
            check_whole(name, getattr(self, name), 0)
        if self.kind not in get_args(_Kind):
            raise ConfigurationError(f"There is no kind {self.kind!r}; {nearest(str(self.kind), get_args(_Kind))}")
        if self.kind != "constant" and self.warmup_steps > self.total_steps:
            raise ConfigurationError(
                f"The warm-up can't be longer than the run, got warmup_steps={self.warmup_steps} with "
                f"total_steps={self.total_steps}."
            )
        if self.kind == "wsd" and not 0 < self.decay_steps <= self.total_steps - self.warmup_steps:
            raise ConfigurationError(
                f"decay_steps must be from 1 to {self.total_steps - self.warmup_steps}, the steps after the warm-up, "
                f"got {self.decay_steps}."
            )

    def __call__(self, step: int) -> float:
        """Return the value for the step that follows ``step`` finished steps."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.peak * (self.final_ratio + (1 - self.final_ratio) * self._shape(step))

    def _shape(self, step: int) -> float:
        """Return the progress of the decay: 1 at the end of the warm-up, 0 from ``total_steps`` on."""
        if self.kind == "constant":
            return 1.0
        if step >= self.total_steps:
            return 0.0
        if self.kind == "wsd":
            return min(1.0, (self.total_steps - step) / self.decay_steps)
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
