"""Conversion between TOML, the words of a command line, and typed values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from diloco.config.keys import Key, Values, flatten, keys_of, leaf_type
from diloco.config.names import nearest_key
from diloco.config.renamed import OldKeyError, replacement
from diloco.errors import ConfigurationError
from diloco.units import DURATION, RATE, Duration, Rate, parse, visible

__all__ = [
    "MAY_BE_EMPTY",
    "convert",
    "freeze",
    "in_toml",
    "parse_toml",
    "read_tables",
    "read_toml",
    "to_toml",
    "write_values",
]

MAY_BE_EMPTY = ("prompt", "system", "evaluation.sample_prompts")
"""Settings and options to which an empty text has a meaning."""

UNSET = "none"  # stands for null, which TOML lacks, in optional settings other than text, which no preset sets


def read_toml(path: Path, settings_type: type) -> Values:
    """Return the keys that a TOML file sets, converted to the types of ``settings_type``.

    Raises:
        ConfigurationError: if the file can't be read or is not TOML, a key is unknown, or a value has the wrong type.
    """
    return _read_table(read_tables(path, "the configuration file"), "", keys_of(settings_type), str(path))


def read_tables(path: Path, called: str) -> dict[str, Any]:
    """Return the contents of a TOML file without conversion.

    Args:
        called: what error messages call the file.

    Raises:
        ConfigurationError: if the file can't be read or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, UnicodeDecodeError) and error.object.startswith((b"\xff\xfe", b"\xfe\xff")):
            reason = "it begins like UTF-16 text. Convert it to UTF-8"
        raise ConfigurationError(f"{called} {path} cannot be read: {reason}.") from error
    return _tables(text, str(path))


def parse_toml(text: str, settings_type: type, *, where: str) -> Values:
    """Return the keys that TOML text sets, as `read_toml` does; ``where`` names the source in messages.

    >>> from diloco.train.settings import RunSettings
    >>> parse_toml("[train]\\nsteps = 50", RunSettings, where="run.toml")
    {'train.steps': 50}
    >>> parse_toml("[train]\\nstesp = 50", RunSettings, where="run.toml")
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: run.toml: unknown key 'train.stesp'; did you mean 'train.steps'?
    """
    return _read_table(_tables(text, where), "", keys_of(settings_type), where)


def _tables(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))  # a byte order mark, as editors of Windows write it
    except (ValueError, RecursionError) as error:  # numbers with too many digits, too many levels of nesting
        raise ConfigurationError(f"{where} is not valid TOML: {visible(str(error))}.") from error


def _read_table(table: Mapping[str, Any], prefix: str, known: Mapping[str, Key], where: str) -> Values:
    values: Values = {}
    for word, value in table.items():
        name = f"{prefix}{word}"
        if name in known:
            values[name] = convert(known[name], value, f"{where}: {name} = {_show(value)}")
        elif not any(key.startswith(f"{name}.") for key in known):
            if isinstance(value, dict) and value and not replacement(name):
                name = next((f"{name}.{leaf}" for leaf in value if replacement(f"{name}.{leaf}")), name)
            gone = replacement(name)
            if gone:
                raise OldKeyError(f"{where}: key {name!r}; {gone}")
            hint = nearest_key(name, known, is_section=isinstance(value, dict))
            raise ConfigurationError(f"{where}: unknown key {name!r}; {hint}")
        elif isinstance(value, dict):
            values |= _read_table(value, f"{name}.", known, where)
        else:
            raise ConfigurationError(
                f"{where}: {name} = {_show(value)} is not valid; {name} is a section, written [{name}]."
            )
    return values


def convert(key: Key, value: Any, what: str, *, typed: bool = False) -> Any:
    """Convert a value to the type of its key. Lists become tuples.

    Args:
        what: the key and the value, for messages.
        typed: the value consists of words of a command line.

    Raises:
        ConfigurationError: the value has the wrong type.
    """
    leaf = leaf_type(key.annotation)
    try:
        if key.name not in MAY_BE_EMPTY and (value == "" or (isinstance(value, list) and "" in value)):
            raise msgspec.ValidationError("a value that is not empty")
        if key.is_optional and leaf not in (str, Path) and isinstance(value, str) and value.lower() == UNSET:
            return None
        if key.is_table and typed:
            value, *rest = _tables(f"table = {value}", key.flag).values()
            if rest:
                raise msgspec.ValidationError("Expected one table")
        strict = not typed or leaf in (str, Path)
        return freeze(msgspec.convert(value, key.annotation, strict=strict, dec_hook=_decode))
    except msgspec.ValidationError as error:
        words = str(error).partition(" - at ")[0]
        works = _expected(key.annotation) if words.startswith(("Expected", "Invalid", "unit")) else words
        raise ConfigurationError(f"{what} is not valid; expected {works}.") from None


def _decode(kind: type, value: Any) -> Any:
    """Convert a value of TOML to a type that msgspec does not know."""
    if kind is Path and isinstance(value, str):
        if "\0" in value:
            raise msgspec.ValidationError("a path without null characters")
        return Path(value)
    if kind in (Duration, Rate):
        try:
            return kind(parse(str(value), "", DURATION if kind is Duration else RATE))
        except ConfigurationError:
            raise msgspec.ValidationError("unit") from None
    raise msgspec.ValidationError("Expected another type")


def freeze(value: Any) -> Any:
    """Return a value with tuples instead of lists."""
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, dict):
        return {key: freeze(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str | Path):
        return value
    raise msgspec.ValidationError("true or false, a number, a string, a list or a table")


_WORDS = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    Path: ("a path in quotes", "paths in quotes"),
    Duration: ("a number with a unit, such as '15s'", "numbers with a unit, such as '15s'"),
    Rate: ("a number with a unit, such as '100Mbit'", "numbers with a unit, such as '100Mbit'"),
}


def _expected(annotation: Any) -> str:
    leaf, parts = leaf_type(annotation), get_args(annotation)
    if get_origin(annotation) is tuple:
        return f"a list of {'' if parts[-1] is Ellipsis else f'{len(parts)} '}{_WORDS[leaf][1]}"
    if get_origin(leaf) is Literal:
        return f"one of {', '.join(get_args(leaf))}"
    return _WORDS[leaf][0] if leaf in _WORDS else "a table"


def _show(value: Any) -> str:
    try:
        return in_toml(freeze(value))
    except (msgspec.ValidationError, ConfigurationError):
        return str(value)


def to_toml(
    settings: Any,
    *,
    beneath: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
) -> str:
    """Return a settings dataclass as TOML, which `parse_toml` reads back, with or without ``beneath`` as a layer below.

    Keys that are None are omitted, except where the layer below would set them; there they are written as "none".

    Args:
        beneath: the values of the preset that may be below the file when it is read.
        given: the values before derivation. Keys that are None here but have a value in ``settings`` are marked as
            derived.
    """
    known, below = keys_of(type(settings)), beneath or {}
    marked = {name for name, value in (given or {}).items() if value is None}
    values = {
        name: UNSET if value is None else value
        for name, value in flatten(settings).items()
        if value is not None or known[name].default is not None or below.get(name) is not None
    }
    return write_values(values, derived=marked)


def write_values(values: Mapping[str, Any], *, derived: Collection[str] = frozenset()) -> str:
    """Return dotted keys as TOML: top-level keys, then a table for each section. Values that are tables become inline.

    >>> print(write_values({"seed": 1, "train.steps": 50, "data.paths": (Path("a"), Path("b"))}), end="")
    seed = 1
    <BLANKLINE>
    [train]
    steps = 50
    <BLANKLINE>
    [data]
    paths = ["a", "b"]
    """
    sections: dict[str, list[str]] = {"": []}
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        mark = "  # derived" if name in derived else ""
        sections.setdefault(section, []).append(f"{leaf} = {in_toml(value)}{mark}\n")
    top = "".join(sections.pop(""))
    tables = [f"[{section}]\n{''.join(lines)}" for section, lines in sections.items()]
    return "\n".join([top, *tables] if top else tables)


def in_toml(value: Any) -> str:
    """Return a value as it is written in a TOML file; "none" for None."""
    if value is None:
        return UNSET
    if isinstance(value, bool):
        return "true" if value else "false"
    if type(value) in (int, float):
        return repr(value)
    if isinstance(value, float):  # a duration or a rate
        return f'"{value}"'
    if isinstance(value, str | Path):
        if (visible_text := str(value).encode("utf-8", "backslashreplace").decode()) != str(value):
            raise ConfigurationError(
                f"{visible_text} is not text in UTF-8, which the run's settings must be. Give it another name; in an "
                "ASCII locale (LC_ALL=C), set PYTHONUTF8=1."
            )
        # A JSON string is a TOML basic string, but does not escape all that is not shown.
        text = json.dumps(str(value), ensure_ascii=False)
        return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text)
    if isinstance(value, tuple | list):
        return f"[{', '.join(in_toml(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(str(key))} = {in_toml(item)}' for key, item in value.items())}}}"
    raise ConfigurationError(
        f"{value!r} of type {type(value).__name__} cannot be written to a TOML file, which holds only booleans, "
        "numbers, strings, paths, lists and tables."
    )


def _key(word: str) -> str:
    return word if re.fullmatch(r"[A-Za-z0-9_-]+", word) else in_toml(word)
