"""Conversion between TOML, the words of a command line, and typed values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from diloco.config.keys import RENAMED_VALUES, Key, OldKeyError, Values, flatten, keys_of, nearest_key, replacement
from diloco.errors import ConfigurationError
from diloco.units import DURATION, RATE, Duration, Rate, parse, visible

MAY_BE_EMPTY = ("prompt", "system", "evaluation.sample_prompts")
"""Settings and options to which an empty text has a meaning."""

UNSET = "none"  # stands for null, which TOML lacks, in optional settings other than text, which no preset sets


def read_toml(path: Path, settings_type: type) -> Values:
    """Return the keys that a TOML file sets, converted to the types of ``settings_type``.

    Raises:
        ConfigurationError: if the file can't be read or is not TOML, a key is unknown, or a value has the wrong type.
    """
    return typed_values(read_tables(path), settings_type, str(path))


def read_tables(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file without conversion.

    Raises:
        ConfigurationError: if the file can't be read or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows write a byte order mark
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. Convert it to UTF-8.") from error
    return parse_tables(text, str(path))


def parse_toml(text: str, settings_type: type, *, where: str) -> Values:
    """Return the keys that TOML text sets, as `read_toml` does; ``where`` names the source in messages.

    >>> from diloco.train.settings import RunSettings
    >>> parse_toml("[train]\\nsteps = 50", RunSettings, where="run.toml")
    {'train.steps': 50}
    >>> parse_toml("[train]\\nstesp = 50", RunSettings, where="run.toml")
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: run.toml: unknown key 'train.stesp'; did you mean 'train.steps'?
    """
    return typed_values(parse_tables(text, where), settings_type, where)


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
            for old in (name, *(f"{name}.{leaf}" for leaf in (value if isinstance(value, dict) else ()))):
                if hint := replacement(old):
                    raise OldKeyError(f"{where}: key {old!r}; {hint}")
            raise ConfigurationError(f"{where}: unknown key {name!r}; {nearest_key(name, known)}")
    return values


_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "a path in quotes",
    Duration: DURATION.expected,
    Rate: RATE.expected,
}


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
        if key.name not in MAY_BE_EMPTY and (value == "" or (isinstance(value, list) and "" in value)):
            raise msgspec.ValidationError("a value that is not empty")
        return freeze(msgspec.convert(value, key.annotation, strict=is_text or not typed, dec_hook=_decode))
    except msgspec.ValidationError as error:
        if new := RENAMED_VALUES.get(f"{key.name}={value}"):
            raise OldKeyError(f"{what}; it is now {new}.") from None
        works = str(error).partition(" - at ")[0]
        if works.startswith(("Expected", "Invalid")):
            choices = ", ".join(get_args(key.kind)) if get_origin(key.kind) is Literal else ""
            works = f"one of {choices}" if choices else _EXPECTED.get(key.kind, "a table")
            works = f"a list, each item {works}" if key.is_list else works
        raise ConfigurationError(f"{what} is not valid; expected {works}.") from None


def _decode(kind: type, value: Any) -> Any:
    """Convert a value of TOML to a type that msgspec does not know."""
    if kind is Path:
        if not isinstance(value, str) or "\0" in value:
            raise msgspec.ValidationError("a path in quotes, without null characters")
        return Path(value)
    quantity = DURATION if kind is Duration else RATE
    try:
        return kind(parse(str(value), "", quantity))
    except ConfigurationError:
        raise msgspec.ValidationError(quantity.expected) from None


def freeze(value: Any) -> Any:
    """Return a value with tuples instead of lists."""
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, dict):
        return {key: freeze(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str | Path):
        return value
    raise msgspec.ValidationError("true or false, a number, a string, a list or a table")


def to_toml(settings: Any, *, beneath: Mapping[str, Any] = {}, given: Mapping[str, Any] = {}) -> str:
    """Return a settings dataclass as TOML, which `parse_toml` reads back, with or without ``beneath`` as a layer below.

    Keys that are None are omitted, except where the layer below would set them; there they are written as "none".

    Args:
        beneath: the values of the preset that may be below the file when it is read.
        given: the values before derivation. Keys that are None here but have a value in ``settings`` are marked as
            derived.
    """
    sections: dict[str, str] = {"": ""}
    values = flatten(settings)
    for name, key in keys_of(type(settings)).items():
        value = values[name]
        if value is not None or key.default is not None or beneath.get(name) is not None:
            mark = "  # derived" if value is not None and given.get(name, value) is None else ""
            line = f"{key.leaf} = {json.dumps(UNSET) if value is None else in_toml(value)}{mark}\n"
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
        if (visible_text := text.encode("utf-8", "backslashreplace").decode()) != text:
            raise ConfigurationError(
                f"{visible_text} is not text in UTF-8, which the run's settings must be. Give it another name; in an "
                "ASCII locale (LC_ALL=C), set PYTHONUTF8=1."
            )
        # A JSON string is a TOML basic string, but does not escape all that is not shown.
        quoted = json.dumps(text, ensure_ascii=False)
        return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)
    return UNSET if value is None else str(value).lower()


def _key(word: object) -> str:
    return str(word) if re.fullmatch(r"[A-Za-z0-9_-]+", str(word)) else in_toml(str(word))
