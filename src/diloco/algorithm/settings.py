"""The settings of the algorithm, and the components that they name: codecs, outer optimizers, merge rules and averages.

To add a component, write its class (or a function that makes one) and add a line to the table of its kind. This module
imports no torch, so that `diloco train --help` is quick: the code of a component is imported when it is used.

``None`` in a setting means that the value is derived from the algorithm or the preset; each run prints the derived
values when it starts.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta
from tyro.conf import arg

from diloco.algorithm.checks import check_number
from diloco.errors import ConfigurationError, nearest
from diloco.plugins import call, check_switches, is_own, takes
from diloco.traits import Trait

Strategy = Literal["strided", "sequential", "balanced"]

AUTO_MEANS_FROM_REPLICAS = 8  # the least number of replicas for which the mean codec "auto" encodes means


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
    also: tuple[str, ...] = ()  # entries of its table of arguments that the component does not get

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.known)

    def check(self, name: str) -> None:
        """Raise `ConfigurationError` if ``name`` is neither known nor written as code of your own, ``module:Class``."""
        if name not in self.known and not is_own(name):
            raise ConfigurationError(
                f"There is no {self.kind} {name!r}; {nearest(str(name), self.known)} Name your own as module:Class or "
                "FILE.py:Class."
            )

    def component(self, name: str) -> Any:
        """Return the class, or the function that makes it, of a known component; None for the user's own."""
        return None if is_own(name) else _load(self.known[name])

    def make(self, name: str, arguments: Mapping[str, Any] | None = None, **offered: Any) -> Any:
        """Make the component that is known as ``name``, or the user's own if it is ``module:Class``.

        It must take all ``arguments`` but those in `also`; of those ``offered``, which have settings of their own, it
        gets what it takes.

        Raises:
            ConfigurationError: if a name or value is invalid. The message has the nearest name or the valid values.
        """
        self.check(name)
        arguments = {key: value for key, value in (arguments or {}).items() if key not in self.also}
        if is_own(name):
            return call(self.key, name, kind=_load(self.base), arguments=arguments, offered=offered)
        make = _load(self.known[name])
        offered = {key: value for key, value in offered.items() if takes(make, key)}
        known = [
            *(parameter for parameter in inspect.signature(make).parameters if parameter not in offered),
            *self.also,
        ]
        for argument in arguments:
            if argument not in known:
                hint = nearest(argument, known) if known else "it has none."
                setting = f"{self.key}_{argument}"
                hint = f"set {setting}." if hasattr(SyncSettings, setting.removeprefix("sync.")) else hint
                raise ConfigurationError(f"The {self.kind} {name!r} has no parameter {argument!r}; {hint}")
        check_switches(f"sync.arguments.{self.key.removeprefix('sync.')}", make, arguments)
        return make(**offered, **arguments)


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
        "sign": "codec/blockwise:Sign",
        "topk2": "codec/topk2:TopK2",
    },
)
OUTER_OPTIMIZERS = Registry(
    "outer optimizer",
    "sync.outer",
    "optim:OuterOptimizer",
    {"nesterov": "optim:nesterov", "sgd": "optim:sgd"},
    also=("isotropic",),
)
MERGE_RULES = Registry(
    "merge rule", "sync.merge", "optim:MergeRule", {"alpha": "optim:AlphaMerge", "rebase": "optim:RebaseMerge"}
)
AVERAGES = Registry(
    "average",
    "sync.average",
    "rounds:AverageRule",
    {"mean": "settings:plain_mean", "senders": "rounds:SendersMean"},
    also=("max_norm", "codec", "weight", "at_home"),
)
REGISTRIES = {"codec": CODECS, "outer": OUTER_OPTIMIZERS, "merge": MERGE_RULES, "average": AVERAGES}
"""Role -> the components that ``sync`` may name in it."""


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """How replicas synchronise: when, which part of the model, as which bytes, and what the mean does."""

    inner_steps: Annotated[int, arg(aliases=["--inner-steps"])] = 100
    """Inner optimizer steps between two synchronisations of the same fragment (H)."""
    overlap_steps: Annotated[int | None, arg(aliases=["--overlap-steps"])] = None
    """Inner steps between sending a fragment and merging its average (tau). Default: 1 for streaming, else 0."""
    num_fragments: Annotated[int | None, Meta(ge=1), arg(aliases=["--fragments"])] = None
    """Number of fragments (P). Default: 1 for diloco; for streaming one per three layers and one for the rest."""
    fragment_strategy: Strategy = "strided"
    """strided: every n-th layer, and one fragment for all parameters outside the layers; sequential: the same with
    neighbouring layers; balanced: parameters packed into fragments of nearly equal size. A single fragment holds the
    whole model."""
    codec: Annotated[str | None, arg(aliases=["--codec"]), Trait.NO_PLACE] = None
    """float32, float16, bfloat16, int8, fp4, sign, topk2, or module:class. Default: fp4 for streaming, else float32."""
    error_feedback: Annotated[float, Meta(ge=0, le=1), arg(aliases=["--error-feedback"])] = 0.0
    """Share of the codec's error that is added to the next pseudo-gradient, 0..1."""
    outer: Annotated[str, Trait.NO_PLACE] = "nesterov"
    """Outer optimizer: nesterov (SGD with Nesterov momentum, the papers'), sgd, or module:class for your own."""
    outer_learning_rate: Annotated[float | None, Meta(gt=0), arg(aliases=["--outer-learning-rate"])] = None
    """Outer learning rate. Default: 0.7 for diloco, 0.4 for streaming (the papers')."""
    outer_momentum: Annotated[float, Meta(ge=0, lt=1), arg(aliases=["--outer-momentum"])] = 0.9
    """Nesterov momentum (mu)."""
    merge: Annotated[str | None, Trait.NO_PLACE] = None
    """alpha: local <- alpha * local + (1 - alpha) * global; rebase: local <- global + (local - local when sent);
    or module:class for your own. Default: alpha if `merge_alpha` is given, else rebase for streaming, alpha for diloco.
    """
    merge_alpha: Annotated[float | None, Meta(ge=0, le=1), arg(aliases=["--merge-alpha"])] = None
    """Weight of the local parameters in the merge, 0..1. Default: 0."""
    average: Annotated[str, Trait.NO_PLACE] = "mean"
    """mean: the weighted mean of all contributors; senders: each value averaged over the replicas that sent a nonzero
    value, for topk2; or module:class for your own. All but mean send every payload to every replica."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """A table of arguments for each of codec, outer, merge and average, such as arguments.codec.block_size. Yours
    get all of theirs. int8, fp4, sign: block_size (256). nesterov, sgd: schedule of the outer learning rate
    (constant, linear or cosine), final_ratio (0); nesterov: momentum_warmup in outer steps. outer: isotropic
    (false), whether the mean of each hidden matrix gets equal singular values (for AdamW inside). average:
    max_norm, to which the norm of a contribution is clipped, codec of the means (auto, float32, bfloat16, int8,
    fp4), weight of this replica (tokens, equal, or a number), and at_home, the parameters that are left out, of which
    each replica trains its own (a list of parts of their names, such as lm_head)."""

    def arguments_of(self, role: str) -> Mapping[str, Any]:
        """Return the arguments of the codec, outer optimizer, merge rule or average (``role``)."""
        arguments: Mapping[str, Any] = self.arguments.get(role, {})
        return arguments

    @property
    def max_norm(self) -> float | None:
        """The norm to which contributions are clipped; None: they are not."""
        bound: float | None = self.arguments_of("average").get("max_norm")
        return bound

    @property
    def isotropic(self) -> bool:
        """Whether the outer optimizer gets isotropic means."""
        chosen: bool = self.arguments_of("outer").get("isotropic", False)
        return chosen

    @property
    def mean_codec(self) -> str:
        """The codec of means; auto: see `mean_codecs`."""
        name: str = self.arguments_of("average").get("codec", "auto")
        return name

    @property
    def at_home(self) -> tuple[str, ...]:
        """Parts of the names of parameters that stay with each replica; see `names_at_home`."""
        parts: str | tuple[str, ...] = self.arguments_of("average").get("at_home", ())
        return (parts,) if isinstance(parts, str) else parts

    @property
    def weight(self) -> str | float:
        """What a replica weighs: "tokens": as many as it has trained; "equal"; or a number, times its tokens."""
        weight: str | float = self.arguments_of("average").get("weight", "tokens")
        return weight

    @property
    def base_weight(self) -> float:
        """The weight of a replica that has trained every step."""
        return 1.0 if isinstance(self.weight, str) else float(self.weight)

    @property
    def whole_contributions(self) -> bool:
        """Whether averages need whole contributions, so that every payload is sent to every replica."""
        return self.average != "mean" or self.max_norm is not None

    def __post_init__(self) -> None:
        for role, arguments in self.arguments.items():
            if role not in REGISTRIES:
                raise ConfigurationError(f"sync.arguments has no table {role!r}; {nearest(role, REGISTRIES)}")
            if not isinstance(arguments, Mapping):
                raise ConfigurationError(
                    f"sync.arguments.{role} must be a table such as {{block_size = 64}}, got {arguments!r}."
                )
        if self.max_norm is not None:
            check_number("sync.arguments.average.max_norm", self.max_norm, gt=0)
        if not (isinstance(self.at_home, tuple) and all(isinstance(part, str) and part for part in self.at_home)):
            raise ConfigurationError(
                f"sync.arguments.average.at_home must be a list of texts such as ['lm_head'], got {self.at_home!r}."
            )
        if isinstance(self.weight, str):
            if self.weight not in ("tokens", "equal"):
                raise ConfigurationError(
                    f"sync.arguments.average.weight must be tokens, equal, or a number, got {self.weight!r}."
                )
        else:
            check_number("sync.arguments.average.weight", self.weight, ge=1e-6, le=1e6)
