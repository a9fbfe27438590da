"""Checks of numbers and names given by the user."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from types import UnionType
from typing import Any

from diloco.errors import ConfigurationError, nearest


def check_whole(name: str, value: Any, least: int | None = None) -> int:
    """Return ``value`` as an int. It must be a whole number, and at least ``least`` if that is given.

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
    """Return the number of a replica as an int, which must be from 0 to ``num_replicas - 1``."""
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


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> None:
    """Raise `ConfigurationError` unless ``value`` is a finite number from ``low`` to ``high``; ``above``: not ``low``.

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
    bound = "" if low == -math.inf else f" {'above' if above else 'of at least'} {low:g}"
    works = f"a number from {low:g} to {high:g}" if high < math.inf else f"a finite number{bound}"
    raise ConfigurationError(f"{name} must be {works}, got {value!r}.")
