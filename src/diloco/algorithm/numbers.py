"""Checks of numbers that users give, made before the numbers are used."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from diloco.errors import ConfigurationError

__all__ = ["check_number", "check_whole", "learning_rate_of_gain"]


def check_whole(name: str, value: Any, least: int | None = None) -> int:
    """``value`` as an int, if it is a whole number of at least ``least``; None: any.

    Raises:
        ConfigurationError: if it is not.

    >>> check_whole("inner_steps", 2.5, 1)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: inner_steps=2.5 was given; it must be a whole number from 1 on. Nothing was ...
    """
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None or (least is not None and whole < least):
        works = "a whole number" if least is None else f"a whole number from {least} on"
        raise ConfigurationError(f"{name}={value!r} was given; it must be {works}. Nothing was started.")
    return whole


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Refuse anything but a finite number from ``low`` to ``high``, and with ``above`` also ``low`` itself.

    Raises:
        ConfigurationError: for anything else.

    >>> check_number("momentum", 1.5, 0, 1)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: momentum=1.5 was given; it must be a number from 0 to 1. Nothing was started.
    >>> check_number("epsilon", float("nan"), 0, above=True)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: epsilon=nan was given; it must be a finite number above 0. Nothing was started.
    """
    number = float(value) if not isinstance(value, bool) and isinstance(value, Real) else math.nan
    if math.isfinite(number) and low <= number <= high and not (above and number == low):
        return
    if high < math.inf:
        works = f"a number from {low:g} to {high:g}"
    elif low > -math.inf:
        works = f"a finite number {'above' if above else 'from'} {low:g}{'' if above else ' on'}"
    else:
        works = "a finite number"
    raise ConfigurationError(f"{name}={value!r} was given; it must be {works}. Nothing was started.")


def learning_rate_of_gain(gain: float, momentum: float) -> float:
    """``gain (1 - mu)``: the learning rate with which equal means move the parameters by ``gain`` of them in the end.

    >>> learning_rate_of_gain(4.0, 0.9), learning_rate_of_gain(1.75, 0.6), learning_rate_of_gain(1.0, 0.0)
    (0.4, 0.7, 1.0)
    """
    return round(gain * (1 - momentum), 12)  # not 0.3999999999999999
