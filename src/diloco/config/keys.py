"""The keys of a settings dataclass as dotted names, which TOML files, flags and comparisons share.

Settings are nested dataclasses (``RunSettings.train.steps``). A key is the path to a leaf (``"train.steps"``), and
`Values` maps keys to values. Layers of values are merged as dictionaries. Only the result becomes a dataclass, so that
the checks of the settings see only final values.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, Suppress

from diloco.units import Duration, Rate

__all__ = ["Key", "Values", "build", "flatten", "keys_of", "layered", "leaf_type"]

Values = dict[str, Any]
T = TypeVar("T")

_POSITIONAL, _SINGLE, _NO_PREFIX, _HIDDEN = (
    get_args(mark[int])[1] for mark in (Positional, FlagCreatePairsOff, OmitArgPrefixes, Suppress)
)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting of a run, or one option of a command."""

    name: str  # dotted path, such as ``train.steps``
    annotation: Any  # type, without the `Annotated` around it
    default: Any  # `dataclasses.MISSING` if it has none
    owner: type  # the dataclass that defines it
    aliases: tuple[str, ...] = ()  # short flags in addition to ``--steps``
    metavar: str | None = None
    positional: bool = False
    negatable: bool = True  # whether a switch has a second flag ``--no-...``

    @property
    def section(self) -> str:
        """``"train"`` for ``train.steps``; empty for a top-level key."""
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        """``"steps"`` for ``train.steps``."""
        return self.name.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """``"--batch-size"`` for ``train.batch_size``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """The docstring of the field, on one line."""
        return " ".join(_docstrings(self.owner).get(self.leaf, "").split())

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value."""
        return self.annotation is bool

    @property
    def is_list(self) -> bool:
        """Whether its flag takes several words."""
        return get_origin(self.annotation) is tuple

    @property
    def is_table(self) -> bool:
        """Whether it is a table of TOML, whose entries have dotted names of their own."""
        return get_origin(self.annotation) is Mapping

    @property
    def is_optional(self) -> bool:
        """Whether it may be None."""
        return type(None) in get_args(self.annotation)


def leaf_type(annotation: Any) -> Any:
    """Return the type of the values: ``int`` of ``int | None`` and of ``tuple[int, ...]``."""
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return leaf_type(next(part for part in get_args(annotation) if part not in (type(None), Ellipsis)))
    return annotation


def keys_of(settings_type: Any) -> dict[str, Key]:
    """Return all keys of a settings dataclass by name: top-level keys first, then section by section.

    >>> from diloco.train.settings import RunSettings
    >>> keys_of(RunSettings)["train.stop_after"].aliases
    ('--stop-after',)
    """
    if settings_type not in _KEYS:
        _KEYS[settings_type] = _collect(settings_type)
    return _KEYS[settings_type]


_KEYS: dict[Any, dict[str, Key]] = {}


def _collect(settings_type: Any) -> dict[str, Key]:
    top: dict[str, Key] = {}
    nested: dict[str, Key] = {}
    hints = get_type_hints(settings_type, include_extras=True)
    for field in dataclasses.fields(settings_type):
        annotation: Any = hints[field.name]
        marks: tuple[Any, ...] = ()
        while get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            marks = (*marks, *more)
        if _HIDDEN in marks:
            continue
        if dataclasses.is_dataclass(annotation):
            prefix = "" if _NO_PREFIX in marks else f"{field.name}."
            for key in keys_of(annotation).values():
                nested[f"{prefix}{key.name}"] = dataclasses.replace(key, name=f"{prefix}{key.name}")
            continue
        made = field.default_factory
        top[field.name] = Key(
            name=field.name,
            annotation=annotation,
            default=field.default if made is dataclasses.MISSING else made(),
            owner=next(each for each in settings_type.__mro__ if field.name in vars(each).get("__annotations__", {})),
            aliases=tuple(alias for mark in marks for alias in getattr(mark, "aliases", None) or ()),
            metavar=next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None),
            positional=_POSITIONAL in marks,
            negatable=_SINGLE not in marks,
        )
    return {**top, **nested}


@functools.cache
def _docstrings(owner: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, as tyro reads them."""
    from tyro.constructors import MISSING, ConstructorRegistry, StructConstructorSpec, StructTypeInfo

    spec = ConstructorRegistry.get_struct_spec(StructTypeInfo.make(owner, MISSING, in_union_context=False))
    assert isinstance(spec, StructConstructorSpec)
    texts = {field.name: field.helptext() if callable(field.helptext) else field.helptext for field in spec.fields}
    return {name: text or "" for name, text in texts.items()}


def flatten(settings: Any) -> Values:
    """Return every key of a settings dataclass with its value; durations and rates are such that they print a unit."""
    return {
        name: _with_unit(functools.reduce(getattr, name.split("."), settings), leaf_type(key.annotation))
        for name, key in keys_of(type(settings)).items()
    }


def _with_unit(value: Any, kind: Any) -> Any:
    if kind not in (Duration, Rate) or value is None:
        return value
    return tuple(map(kind, value)) if isinstance(value, tuple) else kind(value)


def build(settings_type: type[T], values: Mapping[str, Any]) -> T:
    """Return the settings with ``values``, and the defaults for all other keys.

    Raises:
        ConfigurationError: from the settings' own checks.
    """
    arguments: dict[str, Any] = {}
    sections: dict[str, Values] = {}
    hints = get_type_hints(settings_type)
    fields = {field.name for field in dataclasses.fields(settings_type)}  # type: ignore[arg-type]  # a dataclass
    unprefixed = {name: hints[name] for name in fields if dataclasses.is_dataclass(hints[name])}
    for name, value in layered(settings_type, {}, values).items():
        section, _, rest = name.partition(".")
        if rest:
            sections.setdefault(section, {})[rest] = value
        elif name in fields:
            arguments[name] = value
        else:
            owner = next(each for each, kind in unprefixed.items() if name in keys_of(kind))
            sections.setdefault(owner, {})[name] = value
    nested = {name: build(hints[name], rest) for name, rest in sections.items()}
    return settings_type(**arguments, **nested)


def layered(settings_type: Any, below: Mapping[str, Any], above: Mapping[str, Any]) -> Values:
    """Return the values of both layers; those of ``above`` win, and of a table those entries that it names.

    An entry of a table may also be named by a longer key.

    >>> from diloco.train.settings import RunSettings
    >>> layered(RunSettings, {"optimizer.arguments": {"momentum": 0.9}}, {"optimizer.arguments.nesterov": True})
    {'optimizer.arguments': {'momentum': 0.9, 'nesterov': True}}
    """
    tables = [name for name, key in keys_of(settings_type).items() if key.is_table]
    values = dict(below)
    for name, value in above.items():
        table = next((each for each in tables if name.startswith(f"{each}.")), None)
        if table is not None:
            for part in reversed(name.removeprefix(f"{table}.").split(".")):
                value = {part: value}
            name = table
        values[name] = _merged(values[name], value) if name in tables and name in values else value
    return values


def _merged(below: Mapping[str, Any], above: Any) -> Any:
    if not isinstance(above, Mapping):
        return above
    both = {name: _merged(below[name], above[name]) for name in above if isinstance(below.get(name), Mapping)}
    return {**below, **above, **both}
