"""The keys of a settings dataclass as dotted names, which TOML files, flags and comparisons share.

Settings are nested dataclasses (``RunSettings.train.steps``). A key is the path to a leaf (``"train.steps"``), and
`Values` maps keys to values. Layers of values are merged as dictionaries. Only the result becomes a dataclass, so that
the checks of the settings see only final values.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tyro.conf import FlagCreatePairsOff, Positional, Suppress

from diloco.config.names import nearest_key
from diloco.errors import ConfigurationError
from diloco.units import Duration, Rate

Values = dict[str, Any]
T = TypeVar("T")

POSITIONAL, _SINGLE, _HIDDEN = (get_args(mark[int])[1] for mark in (Positional, FlagCreatePairsOff, Suppress))


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting of a run, or one option of a command."""

    name: str  # dotted path, such as ``train.steps``
    annotation: Any  # type, without the `Annotated` around it
    default: Any  # `dataclasses.MISSING` if it has none
    owner: type  # the dataclass that defines it
    kind: Any  # type of the values: ``int`` of ``int | None`` and of ``tuple[int, ...]``
    aliases: tuple[str, ...]  # short flags in addition to ``--train.steps``
    metavar: str | None  # what the help shows for a value, instead of its type
    is_positional: bool
    is_switch: bool  # its flag takes no value
    is_negatable: bool  # a switch with a second flag ``--no-...``
    is_list: bool  # its flag takes several words
    is_table: bool  # a table of TOML, whose entries have dotted names of their own

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
    def short(self) -> str | None:
        """``"--batch-size"`` also for ``train.batch_size``; None if it has no flag without its section."""
        return next((alias for alias in self.aliases if alias.startswith("--")), None)

    @property
    def help(self) -> str:
        """The docstring of the field, on one line."""
        return _docstrings(self.owner)[self.leaf]


def _keys(settings_type: Any) -> dict[str, Key]:
    """Return all keys of a settings dataclass by name: top-level keys first, then section by section.

    >>> from diloco.train.settings import RunSettings
    >>> keys_of(RunSettings)["train.stop_after"].aliases
    ('--stop-after',)
    """
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
            keys = {f"{field.name}.{name}": key for name, key in keys_of(annotation).items()}
            nested |= {name: dataclasses.replace(key, name=name) for name, key in keys.items()}
            continue
        factory, kind = field.default_factory, annotation
        while get_origin(kind) in (Union, types.UnionType, tuple):
            kind = next(part for part in get_args(kind) if part not in (type(None), Ellipsis))
        top[field.name] = Key(
            name=field.name,
            annotation=annotation,
            default=field.default if factory is dataclasses.MISSING else factory(),
            owner=next(each for each in settings_type.__mro__ if field.name in vars(each).get("__annotations__", {})),
            kind=kind,
            aliases=tuple(alias for mark in marks for alias in getattr(mark, "aliases", None) or ()),
            metavar=next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None),
            is_positional=POSITIONAL in marks,
            is_switch=annotation is bool,
            is_negatable=annotation is bool and _SINGLE not in marks,
            is_list=get_origin(annotation) is tuple,
            is_table=get_origin(annotation) is Mapping,
        )
    return {**top, **nested}


keys_of: Callable[[Any], dict[str, Key]] = functools.cache(_keys)


@functools.cache
def _docstrings(owner: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, as tyro reads them."""
    from tyro.constructors import MISSING, ConstructorRegistry, StructConstructorSpec, StructTypeInfo

    spec = ConstructorRegistry.get_struct_spec(StructTypeInfo.make(owner, MISSING, in_union_context=False))
    assert isinstance(spec, StructConstructorSpec)
    texts = {field.name: field.helptext() if callable(field.helptext) else field.helptext for field in spec.fields}
    return {name: " ".join((text or "").split()) for name, text in texts.items()}


def flatten(settings: Any) -> Values:
    """Return every key of a settings dataclass with its value; durations and rates are such that they print a unit."""
    values: Values = {}
    for name, key in keys_of(type(settings)).items():
        value = operator.attrgetter(name)(settings)
        if key.kind in (Duration, Rate) and value is not None:
            value = tuple(map(key.kind, value)) if key.is_list else key.kind(value)
        values[name] = value
    return values


def build(settings_type: type[T], values: Mapping[str, Any]) -> T:
    """Return the settings with ``values``, and the defaults for all other keys.

    Raises:
        ConfigurationError: for an unknown key, and from the settings' own checks.
    """

    known = keys_of(settings_type)
    arguments: dict[str, Any] = {}
    sections: dict[str, Values] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigurationError(f"there is no setting {name!r}; {nearest_key(name, known)}")
        section, _, leaf = name.partition(".")
        if leaf:
            sections.setdefault(section, {})[leaf] = value
        else:
            arguments[name] = value
    hints = get_type_hints(settings_type)
    return settings_type(**arguments, **{name: build(hints[name], values) for name, values in sections.items()})


def merge(below: Any, above: Any) -> Any:
    """Return the value of two layers: that of ``above``, but of a table only the entries that it names.

    >>> merge({"momentum": 0.9}, {"nesterov": True}), merge(3, 4)
    ({'momentum': 0.9, 'nesterov': True}, 4)
    """
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{name: merge(below.get(name), value) for name, value in above.items()}}
