"""Conversion between TOML files and typed values. An unknown key or a wrong type is an error that names the key."""

from __future__ import annotations

import json
import re
import tomllib
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from diloco.config.keys import Key, Values, flatten, keys_of, nearest_key
from diloco.errors import ConfigurationError
from diloco.units import visible

__all__ = [
    "ESCAPED",
    "MAY_BE_EMPTY",
    "UNSET",
    "in_toml",
    "parse_toml",
    "read_tables",
    "read_toml",
    "to_toml",
    "write_values",
]

_ONCE_SINGLE = {"evaluation.sample_prompt": "evaluation.sample_prompts"}
"""Keys that had a single value in records of earlier versions -> the keys that hold a list today."""

MAY_BE_EMPTY = ("prompt", "system", "evaluation.sample_prompts")
"""Settings and options to which an empty text has a meaning."""

ESCAPED = ("stop", "document_separator", "data.document_separator")
r"""Settings and options whose text is looked for in other text: on a command line it may have escapes such as \n."""

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
        if _ONCE_SINGLE.get(name) in known:
            name, value = _ONCE_SINGLE[name], [value]
        if name in known:
            try:
                if name not in MAY_BE_EMPTY and (value == "" or (isinstance(value, list) and "" in value)):
                    raise _MismatchError("a value that is not empty")
                values[name] = _convert(value, known[name].annotation)
            except _MismatchError as mismatch:
                raise ConfigurationError(
                    f"{where}: {name} = {_show(value)} is not valid; expected {mismatch}."
                ) from None
        elif not any(key.startswith(f"{name}.") for key in known):
            hint = nearest_key(name, known, is_section=isinstance(value, dict))
            raise ConfigurationError(f"{where}: unknown key {name!r}; {hint}")
        elif isinstance(value, dict):
            values |= _read_table(value, f"{name}.", known, where)
        else:
            raise ConfigurationError(
                f"{where}: {name} = {_show(value)} is not valid; {name} is a section, written [{name}]."
            )
    return values


class _MismatchError(Exception):
    """A value of the wrong type; the message names the expected type."""


def _convert(value: Any, annotation: Any) -> Any:
    """Convert a value from TOML to the type ``annotation``. Lists become tuples."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        inner = next(part for part in parts if part is not type(None))
        return None if value == UNSET and inner not in (str, Path) else _convert(value, inner)
    if origin is Literal:
        if isinstance(value, str) and value in parts:
            return value
        raise _MismatchError(f"one of {', '.join(parts)}")
    if origin is tuple:
        if not isinstance(value, list):
            raise _MismatchError(_expected(annotation))
        if parts[-1] is Ellipsis:
            parts = (parts[0],) * len(value)
        elif len(parts) != len(value):
            raise _MismatchError(_expected(annotation))
        return tuple(_convert(item, part) for item, part in zip(value, parts, strict=True))
    if origin is not None and isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is annotation:  # not isinstance, since a bool is not valid as an int
        return value
    raise _MismatchError(_expected(annotation))


def _freeze(value: Any) -> Any:
    """Return a value of a free-form table with tuples instead of lists."""
    if isinstance(value, list):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    if isinstance(value, bool | int | float | str):
        return value
    raise _MismatchError("true or false, a number, a string, a list or a table")


_WORDS = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    Path: ("a path in quotes", "paths in quotes"),
}


def _expected(annotation: Any, *, plural: bool = False) -> str:
    if annotation in _WORDS:
        return _WORDS[annotation][plural]
    parts = get_args(annotation)
    if get_origin(annotation) is not tuple:
        return "tables" if plural else "a table"
    count = "" if parts[-1] is Ellipsis else f"{len(parts)} "
    return f"{'lists' if plural else 'a list'} of {count}{_expected(parts[0], plural=True)}"


def _show(value: Any) -> str:
    try:
        return in_toml(_freeze(value))
    except _MismatchError:
        return str(value)


def to_toml(
    settings: Any,
    *,
    beneath: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
) -> str:
    """Return a settings dataclass as TOML, which `parse_toml` reads back, with or without ``beneath`` as a layer below.

    Keys that are None are omitted, except where the layer below would set them; there they are written as "none".

    Args:
        beneath: the values of the preset that may be below the file when it is read.
        given: the values before derivation. Keys that are None here but have a value in ``settings`` are marked as
            derived.
        without: keys to omit.
    """
    known, below = keys_of(type(settings)), beneath or {}
    marked = {name for name, value in (given or {}).items() if value is None}
    values = {
        name: UNSET if value is None else value
        for name, value in flatten(settings).items()
        if name not in without and (value is not None or known[name].default is not None or below.get(name) is not None)
    }
    return write_values(values, derived=marked)


def write_values(values: Mapping[str, Any], *, derived: set[str] | frozenset[str] = frozenset()) -> str:
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


def _key(word: str) -> str:
    return word if re.fullmatch(r"[A-Za-z0-9_-]+", word) else in_toml(word)


def in_toml(value: Any) -> str:
    """Return a value as it is written in a TOML file; "none" for None."""
    if value is None:
        return UNSET
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
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
