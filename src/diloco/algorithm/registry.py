"""The components that settings name: codecs, outer optimizers, merge rules, averages and inner optimizers.

To add one of ours, write its class (or a function that makes one) and add a line to the table of its kind. This module
does not import torch: the code of a component is imported when it is used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from diloco.errors import ConfigurationError, nearest
from diloco.plugins import call, is_own, takes

__all__ = ["AVERAGES", "CODECS", "INNER_OPTIMIZERS", "MERGE_RULES", "OUTER_OPTIMIZERS", "Registry", "plain_mean"]


class Registry:
    """The components of one kind, by name.

    Args:
        kind: What they are, for messages.
        key: The setting that names one.
        base: ``module:Class`` that they are instances of, or whose methods they have.
        known: Name -> ``module:Class`` of this package.

    >>> CODECS.make("int8", {"block_size": 64}).payload_bytes(1000)
    1064
    >>> CODECS.make("int9")
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: There is no codec 'int9'; did you mean 'int8'?
    >>> CODECS.make("int8", {"blocksize": 64})
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: The codec 'int8' has no parameter 'blocksize'; did you mean 'block_size'?
    """

    def __init__(self, kind: str, key: str, base: str, known: Mapping[str, str]) -> None:
        self.kind = kind
        self.key = key
        self._base = base
        self._known: dict[str, str | Callable[..., Any]] = dict(known)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, those that were registered last at the end."""
        return tuple(self._known)

    def register(self, name: str, component: Callable[..., Any]) -> None:
        """Add a component of your own, a class or a function that makes one, for this process.

        Settings need no registration: they take your code as ``module:Class``.

        Raises:
            ConfigurationError: if the name is one of ours, or ``component`` can't be called. Nothing was changed.
        """
        if isinstance(self._known.get(name), str) or not callable(component):
            what = f"it is a {type(component).__name__}" if not callable(component) else "the name is taken"
            raise ConfigurationError(f"{component!r} can't be the {self.kind} {name!r}: {what}.")
        self._known[name] = component

    def check(self, name: str) -> None:
        """Raise `ConfigurationError` if ``name`` is neither known nor written as code of your own, ``module:Class``."""
        if name not in self._known and not is_own(name):
            raise ConfigurationError(
                f"{self.key}={name!r} is unknown; {nearest(name, self._known)} Name your own as module:Class or "
                "FILE.py:Class."
            )

    def find(self, name: str) -> Callable[..., Any]:
        """Return the class or function with a known name, and import its code.

        Raises:
            ConfigurationError: if there is none. The message has the nearest name.
        """
        if name not in self._known:
            raise ConfigurationError(f"There is no {self.kind} {name!r}; {nearest(name, self._known)}")
        found = self._known[name]
        return _load(found) if isinstance(found, str) else found

    def make(self, name: str, arguments: Mapping[str, Any] | None = None, **offered: Any) -> Any:
        """Make the component that is known as ``name``, or the user's own if it is ``module:Class``.

        Args:
            name: The name.
            arguments: Its arguments, all of which it must take.
            offered: Further arguments, for those that take them.

        Raises:
            ConfigurationError: if a name or value is invalid. The message has the nearest name or the valid values.
        """
        arguments = arguments or {}
        if is_own(name):
            return call(self.key, name, kind=_load(self._base), arguments=arguments, offered=offered)
        make = self.find(name)
        known = list(inspect.signature(make).parameters)
        for argument in arguments:
            if not takes(make, argument):
                hint = nearest(argument, known) if known else "it has none."
                raise ConfigurationError(f"The {self.kind} {name!r} has no parameter {argument!r}; {hint}")
        return make(**{key: value for key, value in offered.items() if takes(make, key)} | dict(arguments))


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def plain_mean() -> None:
    """Return the rule of the average ``mean``: none."""


_HERE = "diloco.algorithm"

CODECS = Registry(
    "codec",
    "sync.codec",
    f"{_HERE}.codec.base:Codec",
    {
        "float32": f"{_HERE}.codec.base:Float32",
        "float16": f"{_HERE}.codec.base:Float16",
        "bfloat16": f"{_HERE}.codec.base:BFloat16",
        "int8": f"{_HERE}.codec.blockwise:Int8",
        "fp4": f"{_HERE}.codec.blockwise:FP4",
        "topk2": f"{_HERE}.codec.topk2:TopK2",
    },
)

OUTER_OPTIMIZERS = Registry(
    "outer optimizer",
    "sync.outer",
    f"{_HERE}.optim:OuterOptimizer",
    {
        "nesterov": f"{_HERE}.optim:Nesterov",
        "sgd": f"{_HERE}.optim:Sgd",
        "adam": f"{_HERE}.optim:Adam",
    },
)

MERGE_RULES = Registry(
    "merge rule",
    "sync.merge",
    f"{_HERE}.merge:MergeRule",
    {"alpha": f"{_HERE}.merge:AlphaMerge", "rebase": f"{_HERE}.merge:RebaseMerge"},
)

AVERAGES = Registry(
    "average",
    "sync.average",
    f"{_HERE}.rounds:AverageRule",
    {"mean": f"{_HERE}.registry:plain_mean", "senders": f"{_HERE}.rounds:SendersMean"},
)

INNER_OPTIMIZERS = Registry(
    "inner optimizer", "optimizer.name", "torch.optim:Optimizer", {"Muon": f"{_HERE}.muon:muon"}
)
"""Those that torch.optim does not have, or not like this; its classes are known by their names."""
