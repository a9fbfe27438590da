"""Command lines, read by tyro: the options of a command, or a flag for every key of some settings.

A command line that can't be read is answered with a sentence instead of tyro's box.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, Union, get_args, get_origin

import tyro
from tyro.conf import Positional, UseCounterAction, arg

from diloco.config.keys import Key, Values, keys_of
from diloco.config.toml import parse_toml
from diloco.errors import ConfigurationError

__all__ = ["CommandLine", "parse_flags", "parse_options"]

# TypedDict is called with names that a type checker cannot know.
_make_typed_dict: Any = TypedDict


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What was typed after a command that takes a TOML file and a flag for every key."""

    file: Path | None  # the TOML file
    print_config: bool
    values: Values  # the keys that were set by flags


def parse_flags(
    settings_type: type, command: str, description: str, arguments: Sequence[str], *, shown: Mapping[str, Any]
) -> CommandLine:
    """Read a command line with a flag for every key of ``settings_type``.

    Only what was typed comes back (tyro fills a `TypedDict` without defaults), so that defaults, presets, a TOML file
    and flags can be layered, and a resumed run can tell what is to change. Tyro takes long for each flag, so it is
    asked with those of the keys that may have been typed first, and with all where it shows or refuses something.

    Args:
        shown: values that the help shows as defaults.

    Raises:
        ConfigurationError: as `parse_options`, and for a table or list of lists that is not TOML.
        SystemExit: with code 0, for --help.
    """
    known = keys_of(settings_type)
    flags = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    leaves = {flag.rpartition(".")[2].lstrip("-").removeprefix("no-").replace("-", "_") for flag in flags}
    typed = [key for key in known.values() if key.leaf in leaves or flags.intersection(key.aliases)]
    shows = "-h" in flags or any(flag.startswith(("--help", "--tyro")) for flag in flags)
    try:
        parsed = parse_options(_kind(known.values() if shows else typed, shown), command, description, arguments)
    except ConfigurationError:
        parsed = parse_options(_kind(known.values(), shown), command, description, arguments)
    values: Values = {}
    for name, value in parsed.items():
        if name in known:
            values[name] = value
        elif isinstance(value, dict):
            values |= {f"{name}.{leaf}": entry for leaf, entry in value.items()}
    for name in values:
        if _is_structured(known[name].annotation):
            values |= parse_toml(f"{name} = {values[name]}", settings_type, where=f"--{name.replace('_', '-')}")
    return CommandLine(file=parsed.get("file"), print_config=parsed["print_config"] > 0, values=values)


def _kind(keys: Iterable[Key], shown: Mapping[str, Any]) -> Any:
    """A `TypedDict` with a flag for each of these keys, and what else such a command takes."""
    fields: dict[str, Any] = {
        "file": NotRequired[
            Annotated[
                Positional[Path],
                arg(metavar="[run.toml]", help="TOML file with any of the keys below.", help_behavior_hint=""),
            ]
        ],
        # A counter, because tyro turns a switch that is not in the result by default into its opposite.
        "print_config": Annotated[
            UseCounterAction[int],
            arg(help="Print the resolved TOML and what follows from it; train nothing.", help_behavior_hint=""),
        ],
    }
    sections: dict[str, dict[str, Any]] = {}
    for key in keys:
        target = sections.setdefault(key.section, {}) if key.section else fields
        annotation = str if _is_structured(key.annotation) else key.annotation
        target[key.leaf] = NotRequired[Annotated[annotation, _argument(key, shown.get(key.name))]]
    for section, contents in sections.items():
        fields[section] = Annotated[_make_typed_dict(section, contents), arg(help="")]  # else it looks for one for long
    return _make_typed_dict("Flags", fields)


def _is_structured(annotation: Any) -> bool:
    """Whether a flag takes its value as TOML: a table, or a list of lists."""
    origin, parts = get_origin(annotation), get_args(annotation)
    return origin is Mapping or (origin is tuple and get_origin(parts[0]) is tuple)


def _argument(key: Key, default: Any) -> Any:
    """How tyro shows one key: short flag first, without types, and with the default where the help does not name it."""
    silent = default is None or default == () or "efault:" in key.help
    hint = "" if silent else f"(default: {_show(default)})"
    return arg(help=key.help, aliases=key.aliases, metavar=_metavar(key.annotation), help_behavior_hint=hint)


def _show(value: Any, *, in_table: bool = False) -> str:
    """A default as somebody would type it; text is quoted only where spaces around it would get lost."""
    if in_table:
        return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_show(item, in_table=True)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple):
        return " ".join(_show(item) for item in value)
    return repr(value) if isinstance(value, str) and value != value.strip() else str(value)


def _metavar(annotation: Any) -> str | None:
    """A word for the value: the type in capitals, or the choices; None for a switch.

    >>> _metavar(int | None), _metavar(tuple[Path, ...]), _metavar(Literal["a", "b"])
    ('INT', 'PATH...', '{a,b}')
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is bool:
        return None
    if _is_structured(annotation):
        return "TOML"
    if origin in (Union, types.UnionType):
        return _metavar(next(part for part in parts if part is not type(None)))
    if origin is Literal:
        return f"{{{','.join(parts)}}}"
    if origin is tuple:
        words = [(_metavar(part) or "").removesuffix("...") for part in parts if part is not Ellipsis]
        return f"{words[0]}..." if parts[-1] is Ellipsis else " ".join(words)
    return {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}.get(annotation)


def parse_options(kind: Any, command: str, description: str, arguments: Sequence[str]) -> Any:
    """``arguments`` of ``diloco command`` as a ``kind``, a dataclass or TypedDict that tyro makes flags of.

    Raises:
        ConfigurationError: for a command line that can't be read; it names the nearest flag.
        SystemExit: with code 0, for --help.
    """
    program, said = f"diloco {command}", io.StringIO()

    def read(given: Sequence[str]) -> Any:
        return tyro.cli(kind, prog=program, description=description, args=list(given))

    try:
        with contextlib.redirect_stderr(said):
            parsed = read(arguments)
    except SystemExit as stop:
        if stop.code != 2:
            raise
    else:
        sys.stderr.write(said.getvalue())
        return parsed
    refusal, text = io.StringIO(), io.StringIO()
    with _wide_terminal():
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(refusal):
            read(arguments)
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
            read(["--help"])
    flags = sorted(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text.getvalue())))
    raise ConfigurationError(f"{_as_sentence(refusal.getvalue(), flags)} See `{program} --help`.")


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    """Inside, no sentence of tyro's is broken into lines."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "4000"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


_NUMBERS = {
    "invalid literal for int() with base 10: ": "a whole number",
    "could not convert string to float: ": "a number",
}


def _as_sentence(box: str, flags: Sequence[str]) -> str:
    """What tyro's box says.

    Args:
        box: as tyro prints it, no line of it broken; it has no frame where the terminal takes only ASCII.

    >>> box = '''
    ... ╭─ Unrecognized options ───────────────╮
    ... │ Unrecognized options: --stepz, 5     │
    ... │ ──────────────────────────────────── │
    ... │ For full helptext, run train --help  │
    ... ╰──────────────────────────────────────╯'''
    >>> _as_sentence(box, ["--steps", "--seed"])
    'there is no flag --stepz; did you mean --steps?'
    """
    lines = box.strip("\n").splitlines()
    framed = [line.strip()[2:-2] for line in lines if line.strip().startswith("│")]
    rows = framed or [line[2:] for line in lines[2:]]  # below the title and a line
    rows = list(itertools.takewhile(lambda row: not row.strip() or set(row.strip()) - {"─", "-"}, rows))
    words = " ".join(row.strip() for row in rows)
    if words.startswith("Unrecognized options: "):
        return _unknown(words.removeprefix("Unrecognized options: ").split(", "), flags)
    if words.startswith("Missing from "):
        return _missing(rows[1:])
    if found := re.match(r"Missing value for argument '([^'/]*)", words):
        return f"{_named(found[1])} needs a value."
    if found := re.match(r"invalid choice '(.*)' for argument '([^'/]*).*Expected one of \((.*?),?\)\.$", words):
        return f"{_named(found[2])} {found[1]} is unknown; choose one of {found[3].replace(chr(39), '')}."
    if found := re.match(r"Error parsing (--[^/: ]*)[^:]*: (.*)", words):
        for reason, works in _NUMBERS.items():
            if found[2].startswith(reason):
                return f"{found[1]} takes {works}, not {found[2].removeprefix(reason).strip(chr(39))}."
        return f"{found[1]}: {found[2].rstrip('.')}."
    if found := re.match(r"Error parsing [^:]*: (.*)", words):  # by a check of our own
        return found[1]
    return words


def _unknown(tokens: Sequence[str], flags: Sequence[str]) -> str:
    odd = [token.partition("=")[0] for token in tokens if token.startswith("-")]
    if not odd:
        return f"{', '.join(tokens)} is more than this command takes."
    said = []
    for flag in odd:
        near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.6)
        said.append(f"there is no flag {flag}{f'; did you mean {near[0]}?' if near else '.'}")
    return " ".join(said)


def _missing(rows: Sequence[str]) -> str:
    """Names of what is missing, each with its help below it, indented further."""
    indent = min(len(row) - len(row.lstrip()) for row in rows)
    names = [row.split()[0] for row in rows if len(row) - len(row.lstrip()) == indent]
    told = [row.strip().removesuffix("(required)").strip() for row in rows if len(row) - len(row.lstrip()) > indent]
    meaning = "" if len(told) != len(names) else ": " + " ".join(told)
    return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} missing{meaning or '.'}"


def _named(name: str) -> str:
    return name if name.startswith("-") else name.upper()
