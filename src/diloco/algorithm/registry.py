"""The components that settings name: codecs, outer optimizers, merge rules and averages.

To add one of ours, write its class (or a function that makes one) and add a line to the table of its kind. This module
does not import torch: the code of a component is imported when it is used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.errors import ConfigurationError, nearest
from diloco.plugins import call, is_own, takes


@dataclass(frozen=True)
class Registry:
    """The components of one kind, by name.

    >>> CODECS.make("int8", {"block_size": 64}).payload_bytes(1000)
    1064
    >>> CODECS.make("int8", {"blocksize": 64})
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: The codec 'int8' has no parameter 'blocksize'; did you mean 'block_size'?
    """

    kind: str  # what they are, for messages
    key: str  # the setting that names one
    base: str  # ``file:Class`` in this package that they are instances of, or whose methods they have
    known: Mapping[str, str]  # name -> ``file:Class`` in this package

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.known)

    def check(self, name: str) -> None:
        """Raise `ConfigurationError` if ``name`` is neither known nor written as code of your own, ``module:Class``."""
        if name not in self.known and not is_own(name):
            raise ConfigurationError(
                f"There is no {self.kind} {name!r}; {nearest(name, self.known)} Name your own as module:Class or "
                "FILE.py:Class."
            )

    def make(self, name: str, arguments: Mapping[str, Any] | None = None, **offered: Any) -> Any:
        """Make the component that is known as ``name``, or the user's own if it is ``module:Class``.

        It must take all ``arguments``; of those ``offered`` it gets what it takes.

        Raises:
            ConfigurationError: if a name or value is invalid. The message has the nearest name or the valid values.
        """
        self.check(name)
        arguments = arguments or {}
        if is_own(name):
            return call(self.key, name, kind=_load(self.base), arguments=arguments, offered=offered)
        make = _load(self.known[name])
        known = list(inspect.signature(make).parameters)
        for argument in arguments:
            if argument not in known:
                hint = nearest(argument, known) if known else "it has none."
                raise ConfigurationError(f"The {self.kind} {name!r} has no parameter {argument!r}; {hint}")
        return make(**{key: value for key, value in offered.items() if takes(make, key)} | dict(arguments))


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"diloco.algorithm.{module.replace('/', '.')}"), name)


def plain_mean() -> None:
    """Return the rule of the average ``mean``: none."""


CODECS = Registry(
    "codec",
    "sync.codec",
    "codec/base:Codec",
    {
        "float32": "codec/base:Float32",
        "float16": "codec/base:Float16",
        "bfloat16": "codec/base:BFloat16",
        "int8": "codec/blockwise:Int8",
        "fp4": "codec/blockwise:FP4",
        "topk2": "codec/topk2:TopK2",
    },
)
OUTER_OPTIMIZERS = Registry(
    "outer optimizer",
    "sync.outer",
    "optim:OuterOptimizer",
    {"nesterov": "optim:Nesterov", "sgd": "optim:Sgd"},
)
MERGE_RULES = Registry(
    "merge rule", "sync.merge", "merge:MergeRule", {"alpha": "merge:AlphaMerge", "rebase": "merge:RebaseMerge"}
)
AVERAGES = Registry(
    "average", "sync.average", "rounds:AverageRule", {"mean": "registry:plain_mean", "senders": "rounds:SendersMean"}
)
