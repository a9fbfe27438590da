"""Checks of numbers and names given by the user."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

from msgspec import Meta

from diloco.errors import ConfigurationError, nearest

MAX_FLOAT = 3.4028234663852886e38  # the largest float32; a larger number is infinite to a model
MAX_WHOLE = 2**63 - 1


def check_whole(name: str, value: Any, ge: int | None = None, le: int | None = None) -> int:
    """Return ``value`` as an int. It must be a whole number, and from ``ge`` to ``le`` where they are given.

    >>> check_whole("inner_steps", 2.5, 1)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: inner_steps must be a whole number of at least 1, got 2.5.
    """
    check_number(name, value, ge=ge, le=le, whole=True)
    return operator.index(value)


def check_replica(replica: Any, num_replicas: Any) -> int:
    """Return the number of a replica as an int, which must be from 0 to ``num_replicas - 1``."""
    last = check_whole("num_replicas", num_replicas, 1) - 1
    return check_whole(f"replica with num_replicas={num_replicas}", replica, 0, last)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise `ConfigurationError`, with the nearest choice, if ``value`` is not one of ``choices``.

    >>> check_choice("ranks", "alon", ("alone", "whole"))
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: ranks='alon' is unknown; did you mean 'alone'?
    """
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} is unknown; {nearest(str(value), choices)}")


def check_number(
    name: str,
    value: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    whole: bool = False,
) -> None:
    """Raise `ConfigurationError` unless ``value`` is a finite number within the bounds, named as in `msgspec.Meta`.

    >>> check_number("momentum", 1.5, ge=0, le=1)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: momentum must be a number from 0 to 1, got 1.5.
    >>> check_number("epsilon", float("nan"), gt=0)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: epsilon must be a finite number above 0, got nan.

    Finite means in float32 or, for whole numbers, in 64 bits.
    """
    if not isinstance(value, bool) and isinstance(value, Integral if whole else Real):
        most = MAX_WHOLE if whole else MAX_FLOAT
        finite = (operator.ge, -most), (operator.le, most)
        bounds = (operator.ge, ge), (operator.gt, gt), (operator.le, le), (operator.lt, lt), *finite
        if all(bound is None or fits(value, bound) for fits, bound in bounds):
            return
    has_bound_above = le is not None or lt is not None
    kind = "number" if has_bound_above else "finite number"
    if whole:
        kind = "whole number"
    words = _range(ge, gt, le, lt)
    if whole and not words and isinstance(value, Integral):
        words = "of at most 64 bits"
    raise ConfigurationError(f"{name} must be a {kind}{' ' if words else ''}{words}, got {value!r}.")


def _range(ge: float | None, gt: float | None, le: float | None, lt: float | None) -> str:
    if ge is not None and le is not None:
        return f"from {ge} to {le}"
    bounds = ("of at least", ge), ("above", gt), ("of at most", le), ("below", lt)
    return " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)


def check_finite(name: str, value: Any) -> None:
    """Raise `ConfigurationError`, which names the entry, unless all numbers in a table of any depth are finite.

    >>> check_finite("optimizer.arguments", {"betas": (0.9, float("inf"))})
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: optimizer.arguments.betas must be a finite number, got inf.
    """
    if isinstance(value, Mapping):
        for key, inside in value.items():
            check_finite(f"{name}.{key}", inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            check_finite(name, inside)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        check_number(name, value, whole=isinstance(value, int))


def check_range(name: str, value: Any, hint: Any) -> None:
    """Raise `ConfigurationError` unless a number, or each in a tuple, is in the range that a `Meta` in its type gives.

    None is in every range.
    """
    if value is None:
        return
    for mark in (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Meta)):
        for number in value if isinstance(value, tuple) else (value,):
            whole = int in (hint.__origin__, *get_args(hint.__origin__))
            check_number(name, number, ge=mark.ge, gt=mark.gt, le=mark.le, lt=mark.lt, whole=whole)


def check_ranges(settings: object, prefix: str = "") -> None:
    """Raise `ConfigurationError` unless all fields of a dataclass, and of dataclasses in it, are in their ranges.

    Numbers in its tables must be finite. With the prefix "--" they are named as flags.
    """
    for field, hint in _hints(type(settings)).items():
        value, name = getattr(settings, field), field.replace("_", "-") if prefix == "--" else field
        check_range(f"{prefix}{name}", value, hint)
        if is_dataclass(value):
            check_ranges(value, f"{prefix}{name}.")
        elif isinstance(value, Mapping):
            check_finite(f"{prefix}{name}", value)


_hints: Callable[[type], dict[str, Any]] = functools.cache(functools.partial(get_type_hints, include_extras=True))
