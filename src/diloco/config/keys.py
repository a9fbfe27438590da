"""The keys of a settings dataclass as dotted names, which TOML files, flags and comparisons share, and their values.

Settings are nested dataclasses (``RunSettings.train.steps``). A key is the path to a leaf (``"train.steps"``), and
`Values` maps keys to values, which are converted from TOML and from words of a command line alike. Layers of values are
merged as dictionaries. Only the result becomes a dataclass, so that the checks of the settings see only final values.
"""

import dataclasses
import difflib
import functools
import json
import operator
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from tyro.conf import Positional

from diloco.errors import ConfigurationError
from diloco.private_files import read_regular
from diloco.traits import Trait
from diloco.units import DURATION, RATE, Duration, Rate, parse, visible
from diloco.waiting import described

Values = dict[str, Any]
T = TypeVar("T")

POSITIONAL = get_args(Positional[int])[1]


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
    is_list: bool  # its flag takes several words
    is_table: bool  # a table of TOML, whose entries have dotted names of their own
    traits: frozenset[Trait]  # its own, and those of its section

    @property
    def is_place(self) -> bool:
        """Whether it names something that a run reads, writes or listens at."""
        return self.kind in (str, Path) and Trait.NO_PLACE not in self.traits

    @property
    def section(self) -> str:
        """``"train"`` for ``train.steps``; empty for a top-level key."""
        return self.name.rpartition(".")[0]

    @property
    def is_negatable(self) -> bool:
        """Whether it is a switch of a setting, which has a second flag ``--no-...``, and not an option of a command."""
        return self.is_switch and bool(self.section)

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
    """Return all keys of a settings dataclass by name: top-level keys first, then section by section."""
    top: dict[str, Key] = {}
    nested: dict[str, Key] = {}
    hints = get_type_hints(settings_type, include_extras=True)
    for field in dataclasses.fields(settings_type):
        hint: Any = hints[field.name]
        annotation, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        traits = frozenset(mark for mark in marks if isinstance(mark, Trait))
        if dataclasses.is_dataclass(annotation):
            for key in keys_of(annotation).values():
                name = f"{field.name}.{key.name}"
                nested[name] = dataclasses.replace(key, name=name, traits=key.traits | traits)
            continue
        factory, kind = field.default_factory, annotation
        while get_origin(kind) in (Union, types.UnionType, tuple):
            kind = next(part for part in get_args(kind) if part not in (type(None), Ellipsis))
        top[field.name] = Key(
            name=field.name,
            annotation=annotation,
            default=field.default if factory is dataclasses.MISSING else factory(),
            owner=next(base for base in settings_type.__mro__ if field.name in vars(base).get("__annotations__", {})),
            kind=kind,
            aliases=tuple(alias for mark in marks for alias in getattr(mark, "aliases", None) or ()),
            metavar=next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None),
            is_positional=POSITIONAL in marks,
            is_switch=annotation is bool,
            is_list=get_origin(annotation) is tuple,
            is_table=get_origin(annotation) is Mapping,
            traits=traits,
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
    """Return the settings with ``values``, and the defaults for all other keys."""
    known = keys_of(settings_type)
    arguments: dict[str, Any] = {}
    sections: dict[str, Values] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigurationError(f"there is no setting {name!r}{_meant(name, known)}")
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


def nearest_name(word: str, known: Iterable[str]) -> str | None:
    """Return the known key or flag that is probably meant by ``word``, of which the last part counts most.

    >>> known = ["train.steps", "sync.inner_steps", "--learning-rate", "--batch-size", "--train.steps", "--steps"]
    >>> [nearest_name(word, known) for word in ("train.stesp", "steps", "--batchsize", "--train.stesp", "--zz")]
    ['train.steps', 'train.steps', '--batch-size', '--train.steps', None]
    """
    dashes = "-" if word.startswith("-") else "_"
    meant = word.lstrip("-").replace("-" if dashes == "_" else "_", dashes)
    names: dict[str, str] = {}
    for name in (other for other in known if other.startswith("-") == word.startswith("-")):
        names = {name.lstrip("-").rpartition(".")[2]: name} | names | {name.lstrip("-"): name}
    whole = difflib.get_close_matches(meant, names, n=1, cutoff=0.75)
    close = whole or difflib.get_close_matches(meant.rpartition(".")[2], names, n=1, cutoff=0.7)
    return names[close[0]] if close else None


def _meant(name: str, known: Iterable[str]) -> str:
    return f"; did you mean {close!r}?" if (close := nearest_name(name, known)) else "."


UNSET = "none"  # stands for null, which TOML lacks, in optional settings other than text, which no preset sets


def read_toml(path: Path, settings_type: type) -> Values:
    """Return the keys that a TOML file sets, converted to the types of ``settings_type``."""
    return typed_values(read_tables(path), settings_type, str(path))


def read_tables(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file without conversion."""
    try:
        text = read_regular(path).decode("utf-8-sig")  # editors of Windows write a byte order mark
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. Convert it to UTF-8.") from error
    return parse_tables(text, str(path))


def parse_tables(text: str, where: str) -> dict[str, Any]:
    """Return the contents of TOML text without conversion."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers with too many digits, too many levels of nesting
        raise ConfigurationError(f"{where} is not valid TOML: {visible(str(error))}.") from error


def typed_values(tables: Mapping[str, Any], settings_type: type, where: str, section: str = "") -> Values:
    """Return the values of the nested tables of a section, converted to the types of ``settings_type``."""
    known = keys_of(settings_type)
    sections = {key.section for key in known.values()}
    values: Values = {}
    for word, value in tables.items():
        name = f"{section}.{word}" if section else word
        shown = f"{where}: {name} = {in_toml(value)}"
        if name in known:
            values[name] = convert(known[name], value, shown)
        elif name in sections and isinstance(value, dict):
            values |= typed_values(value, settings_type, where, name)
        elif name in sections:
            raise ConfigurationError(f"{shown} is not valid; {name} is a section, written [{name}].")
        else:
            raise ConfigurationError(f"{where}: unknown key {name!r}{_meant(name, [*known, *sections])}")
    return values


def convert(key: Key, value: Any, what: str, *, typed: bool = False) -> Any:
    """Convert a value to the type of its key. Lists become tuples.

    Args:
        what: the key and the value, for messages.
        typed: the value consists of words of a command line.

    Raises:
        ConfigurationError: the value has the wrong type.
    """
    is_text = key.kind in (str, Path)
    if type(None) in get_args(key.annotation) and not is_text and isinstance(value, str) and value.lower() == UNSET:
        return None
    try:
        if Trait.MAY_BE_EMPTY not in key.traits and (value == "" or (isinstance(value, list) and "" in value)):
            raise msgspec.ValidationError("expected a value that is not empty")
        return freeze(msgspec.convert(value, described(key.annotation), strict=is_text or not typed, dec_hook=_decode))
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the second for bytes that aren't text
        works = str(error).partition(" - at ")[0]
        if get_origin(key.kind) is Literal:
            works = f"expected one of {', '.join(get_args(key.kind))}"
        raise ConfigurationError(f"{what} is not valid: {works.replace('`', '')}.") from None


def _decode(kind: type, value: Any) -> Any:
    if kind is Path:
        if not isinstance(value, str) or "\0" in value:
            raise msgspec.ValidationError("expected a path in quotes, without null characters")
        return Path(value)
    quantity = DURATION if kind is Duration else RATE
    try:
        return kind(parse(str(value), "", quantity))
    except ConfigurationError:
        raise msgspec.ValidationError(f"expected {quantity.expected}") from None


def freeze(value: Any) -> Any:
    """Return a value with tuples instead of lists."""
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, dict):
        return {key: freeze(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str | Path):
        return value
    raise msgspec.ValidationError("expected true or false, a number, a string, a list or a table")


def to_toml(settings: Any, *, beneath: Mapping[str, Any] = {}) -> str:
    """Return a settings dataclass as TOML, which `read_toml` reads back, with or without ``beneath`` as a layer below.

    Keys that are None are omitted, except where the layer below would set them; there they are written as "none".

    Args:
        beneath: the values of the preset that may be below the file when it is read.
    """
    sections: dict[str, str] = {"": ""}
    values = flatten(settings)
    for name, key in keys_of(type(settings)).items():
        value = values[name]
        if value is not None or key.default is not None or beneath.get(name) is not None:
            line = f"{key.leaf} = {json.dumps(UNSET) if value is None else in_toml(value)}\n"
            sections[key.section] = sections.get(key.section, "") + line
    top = sections.pop("")
    return "\n".join([*([top] if top else []), *(f"[{section}]\n{lines}" for section, lines in sections.items())])


def in_toml(value: Any) -> str:
    """Return a value as it is written in a TOML file; "none" for None."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(in_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(name)} = {in_toml(item)}' for name, item in value.items())}}}"
    if isinstance(value, str | Path) or (isinstance(value, float) and type(value) is not float):  # durations and rates
        text = str(value)
        if (shown := text.encode("utf-8", "backslashreplace").decode()) != text:
            ways = "Give it another name; in an ASCII locale (LC_ALL=C), set PYTHONUTF8=1."
            raise ConfigurationError(f"{shown} is not text in UTF-8, which the run's settings must be. {ways}")
        # A JSON string is a TOML basic string, but does not escape all that is not shown.
        quoted = json.dumps(text, ensure_ascii=False)
        return "".join(character if character.isprintable() else f"\\U{ord(character):08x}" for character in quoted)
    return UNSET if value is None else str(value).lower()


def _key(word: object) -> str:
    return str(word) if re.fullmatch(r"[A-Za-z0-9_-]+", str(word)) else in_toml(str(word))
