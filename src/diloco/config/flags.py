"""Command lines, parsed by tyro: the options of a command, or one flag for each key of a settings class.

An invalid command line raises `ConfigurationError` with a sentence instead of printing tyro's error box.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import re
import shlex
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, UseCounterAction, arg

from diloco.config.keys import Key, Values, keys_of, nearest_flags
from diloco.config.toml import ESCAPED, MAY_BE_EMPTY, UNSET, in_toml, parse_toml
from diloco.errors import DEBUG, ConfigurationError
from diloco.terminal import plain
from diloco.units import escape, unescape

__all__ = ["CommandLine", "command_text", "parse_flags", "parse_options"]

# TypedDict is called with names that a type checker can't know.
_make_typed_dict: Any = TypedDict


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The arguments of a command that takes a TOML file and a flag for every key, as typed."""

    file: Path | None  # the TOML file
    print_config: bool
    values: Values  # the keys that were set by flags
    defaults: Values = field(default_factory=dict)  # keys below the file, as for a start by ``torchrun``


def parse_flags(
    settings_type: type,
    command: str,
    description: str,
    arguments: Sequence[str],
    *,
    shown: Mapping[str, Any],
    place: tuple[str, str] = ("[run.toml]", "TOML file with any of the keys below."),
    hidden: Collection[str] = (),
) -> CommandLine:
    """Parse a command line that has a flag for every key of ``settings_type``.

    The result holds only what was typed, since tyro fills a `TypedDict` without defaults. Defaults, presets, a TOML
    file and flags can thus be layered, and a resumed run knows which settings to change. Tyro is slow for each flag,
    so it gets only the keys that may have been typed, except for --help.

    Args:
        shown: the values that the help shows as defaults.
        place: the name of the positional argument in the help, and its description.
        hidden: keys that the help leaves out.

    Raises:
        ConfigurationError: as in `parse_options`, and for a table or list of lists that is not valid TOML.
        SystemExit: with code 0, for --help.
    """
    known = keys_of(settings_type)
    named = {word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("-")}
    leaves = {name.rpartition(".")[2].lstrip("-").removeprefix("no-").replace("-", "_") for name in named}
    if any(map(_shows, named)):
        keys = [key for key in known.values() if key.name not in hidden]
    else:
        keys = [key for key in known.values() if key.leaf in leaves or named.intersection(key.aliases)]
    flags = _flags_of(_kind(known.values(), shown, place))
    parsed = parse_options(_kind(keys, shown, place), command, description, arguments, flags)
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


def _kind(keys: Iterable[Key], shown: Mapping[str, Any], place: tuple[str, str]) -> Any:
    """Return a `TypedDict` with a flag for each of these keys, the TOML file, and --print-config."""
    fields: dict[str, Any] = {
        "file": NotRequired[
            Annotated[
                Positional[Path],
                arg(metavar=place[0], help=place[1], help_behavior_hint=""),
            ]
        ],
        # A counter, because tyro inverts a switch that is absent from the result by default.
        "print_config": Annotated[
            UseCounterAction[int],
            arg(help="Print the resolved settings as TOML and the facts that follow, and exit.", help_behavior_hint=""),
        ],
    }
    sections: dict[str, dict[str, Any]] = {}
    for key in keys:
        target = sections.setdefault(key.section, {}) if key.section else fields
        annotation = str if _is_structured(key.annotation) else key.annotation
        target[key.leaf] = NotRequired[Annotated[annotation, _argument(key, shown.get(key.name))]]
    for section, contents in sections.items():
        # without a help text, tyro would spend a long time on looking for one
        fields[section] = Annotated[_make_typed_dict(section, contents), arg(help="")]
    return _make_typed_dict("Flags", fields)


def _is_structured(annotation: Any) -> bool:
    """Return whether a flag takes its value as TOML: a table, or a list of lists."""
    origin, parts = get_origin(annotation), get_args(annotation)
    return origin is Mapping or (origin is tuple and get_origin(parts[0]) is tuple)


def _argument(key: Key, default: Any) -> Any:
    """Return the flag of one key: short alias first, no type, and the default unless the help text states it."""
    silent = default is None or default == () or "efault:" in key.help
    hint = "" if silent else f"(default: {_show(default)})"
    return arg(help=key.help, aliases=key.aliases, metavar=_metavar(key.annotation), help_behavior_hint=hint)


def _show(value: Any) -> str:
    """Return a default as it would be typed. Text is quoted only if surrounding spaces would be lost otherwise."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return in_toml(value)
    if isinstance(value, tuple):
        return " ".join(map(_show, value))
    return repr(value) if isinstance(value, str) and value != value.strip() else str(value)


def _metavar(annotation: Any) -> str | None:
    """Return the placeholder of a value: the type in capitals, or the choices; None for a switch.

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


def command_text(command: str, *places: object, flags: Mapping[str, object] | None = None) -> str:
    """Return ``diloco COMMAND`` with its arguments, quoted for a shell. Every command that is printed is made here.

    Args:
        places: its positional arguments.
        flags: flag -> value. False is written as the flag's negation, None as the word None, a tuple as several words,
            and a table as TOML.

    >>> command_text("train", "my run.toml", flags={"--steps": 5, "--swarm.relay": False, "--run": "-a"})
    "diloco train 'my run.toml' --steps 5 --swarm.no-relay --run=-a"
    """
    words = ["diloco", command]
    words += [f"./{place}" if str(place).startswith("-") else str(place) for place in places]
    for flag, value in (flags or {}).items():
        nested = isinstance(value, tuple) and any(isinstance(item, tuple) for item in value)
        if isinstance(value, bool):
            words.append(flag if value else _negation(flag))
        elif isinstance(value, Mapping) or nested:
            words += [flag, in_toml(value)]
        else:
            texts = [str(item) for item in (value if isinstance(value, tuple) else [value])]
            texts = [escape(text) for text in texts] if flag.lstrip("-").replace("-", "_") in ESCAPED else texts
            dashed = texts[:1] and texts[0].startswith("-")
            words += [f"{flag}={texts[0]}", *texts[1:]] if dashed else [flag, *texts]
    return shlex.join(words)


def _negation(flag: str) -> str:
    section, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{section}{dot}no-{name}"


def parse_options(
    kind: Any, command: str, description: str, arguments: Sequence[str], flags: Mapping[str, Any] | None = None
) -> Any:
    """Parse the arguments of ``diloco COMMAND`` into ``kind``, a dataclass or TypedDict from which tyro makes flags.

    A flag that takes text takes the next word, even one with a dash, unless that is a flag of this command. ``--debug``
    in any other place sets `DEBUG`. The words after ``--`` are positional.

    Args:
        flags: every flag of the command with the type of its value, if ``kind`` has only some of them.

    Raises:
        ConfigurationError: for an invalid command line, with the nearest flag for an unknown one.
        SystemExit: with code 0, for --help.
    """
    program, box = f"diloco {command}", io.StringIO()
    try:
        words = _with_values(arguments, _flags_of(kind) if flags is None else flags)
        shows = any(map(_shows, words))
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stderr(box))
            # tyro colours its help, and on a terminal also its error box, of which it writes a part here
            stack.enter_context(contextlib.redirect_stdout(plain(sys.stdout) if shows else io.StringIO()))
            stack.enter_context(contextlib.nullcontext() if shows else _wide_terminal())
            return tyro.cli(kind, prog=program, description=description, args=words)
    except _MisuseError as misuse:
        sentence = str(misuse)
    except SystemExit as stop:
        if stop.code != 2:
            raise
        sentence = _as_sentence(box.getvalue())
    raise ConfigurationError(f"{sentence} See `{program} --help`.")


def _shows(word: str) -> bool:
    """Return whether a word asks for the help, or tyro for the completions of a shell (``--tyro-print-completion``)."""
    return word in ("-h", "--help") or word.startswith("--tyro-")


class _MisuseError(Exception):
    """A sentence about an invalid command line."""


_OMITTED, _PAIRS_OFF, _POSITIONAL = (
    get_args(mark[int])[1] for mark in (OmitArgPrefixes, FlagCreatePairsOff, Positional)
)


def _flags_of(kind: Any, section: str = "") -> dict[str, Any]:
    """Return every flag of ``kind`` with the type of its value; None for one without a value."""
    flags: dict[str, Any] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks: tuple[Any, ...] = ()
        while get_origin(hint) in (Annotated, NotRequired):
            hint, *more = get_args(hint)
            marks += tuple(more)
        if _POSITIONAL in marks:
            continue
        flag = f"--{section}{name.replace('_', '-')}"
        if dataclasses.is_dataclass(hint) or is_typeddict(hint):
            flags |= _flags_of(hint, "" if _OMITTED in marks else f"{flag[2:]}.")
            continue
        counted = hint is bool or name == "print_config"
        named = {flag, *(alias for mark in marks for alias in getattr(mark, "aliases", None) or ())}
        named |= {_negation(flag)} if hint is bool and _PAIRS_OFF not in marks else set()
        flags |= dict.fromkeys(named, None if counted else hint)
    return flags


def _with_values(arguments: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    """Return the arguments as tyro reads them: ``--flag=value`` for values that begin with a dash.

    Raises:
        _MisuseError: for an unknown flag, or a flag with a value that has no meaning, or without the one it needs.
    """
    words, first = [*arguments], []
    for place, word in enumerate(words):
        if word == "--" and not _takes_text(flags.get("".join(words[:place][-1:]))):
            first = [f"./{each}" if each.startswith("-") else each for each in words[place + 1 :]]
            del words[place:]
            break
    typed: list[tuple[str, bool, list[str]]] = [("", False, first)]  # flag, whether "=" is after it, words after it
    for word in words:
        name, equals, value = word.partition("=")
        flag, (before, _, after) = name.replace("_", "-"), typed[-1]
        is_flag, hint = flag in flags or _shows(flag), None if after else flags.get(before)
        if _takes_text(hint) and not (is_flag and _is_list(hint)):
            if is_flag:
                raise _MisuseError(f"{before} needs a value. For the value {word} itself, use {before}={word}.")
            after.append(word)
        elif not word.startswith("-") or re.match(r"-(\.?\d|$)", word):
            after.append(word)
        elif is_flag:
            typed.append((flag, bool(equals), [value] if equals else []))
        elif word == "--debug":
            DEBUG.set(True)
        else:
            near = " or ".join(nearest_flags(name, sorted(flags)))
            raise _MisuseError(f"there is no flag {name}{f'; did you mean {near}?' if near else '.'}")
    checked: list[str] = []
    for flag, has_equals, after in typed:
        values = _values(flag, has_equals, after, flags)
        if flag and (has_equals or (values and values[0].startswith("-"))):
            values[0] = f"{flag}={values[0]}"
        elif flag:
            checked.append(flag)
        checked += values
    return checked


def _values(flag: str, equals: bool, after: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    """Return the words after a flag, with the value of the flag as tyro reads it: without escapes, and None for "none".

    Raises:
        _MisuseError: as `_with_values`.
    """
    values, hint, name = [*after], flags.get(flag), flag.lstrip("-").replace("-", "_")
    if flag in flags and hint is None:
        if equals or (values and values[0].lower() in _SWITCHED):
            other = f" or {_negation(flag)}" if _negation(flag) in flags else ""
            raise _MisuseError(f"{flag} takes no value, so {values[0]} has no meaning. Use {flag}{other}.")
    elif flag in flags and not values and not _is_list(hint):
        raise _MisuseError(f"{flag} needs a value.")
    if name not in MAY_BE_EMPTY and ("" in values or (not values and _takes_text(hint))):
        what = f"{flag} needs a value that is not empty" if flag else "an argument is empty"
        raise _MisuseError(f"{what}. Is a variable of the shell not set?")
    for place, value in enumerate(values if _is_list(hint) else values[:1]):
        if name in ESCAPED:
            values[place] = unescape(value)
        elif type(None) in get_args(hint) and not _takes_text(hint) and value.lower() == UNSET:
            values[place] = "None"
    return values


_SWITCHED = ("yes", "no", "true", "false", "on", "off", "0", "1")


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is tuple


def _takes_text(hint: Any) -> bool:
    """Return whether values of this type are texts or paths."""
    return hint in (str, Path) or any(map(_takes_text, get_args(hint)))


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    """Keep tyro from wrapping its sentences inside the ``with`` block."""
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


def _as_sentence(box: str) -> str:
    """Return the message in tyro's error box as a sentence.

    Args:
        box: the box as tyro prints it, without wrapped lines. On an ASCII-only terminal it has no frame.
    """
    lines = box.strip("\n").splitlines()
    framed = [line.strip()[2:-2] for line in lines if line.strip().startswith("│")]
    rows = framed or [line[2:] for line in lines[2:]]  # the rows below the title and its rule
    rows = list(itertools.takewhile(lambda row: not row.strip() or set(row.strip()) - {"─", "-"}, rows))
    words = " ".join(row.strip() for row in rows)
    if words.startswith("Unrecognized options: "):
        return f"too many arguments: {words.removeprefix('Unrecognized options: ').replace(', ', ' ')}."
    if words.startswith("Missing from "):
        return _missing(rows[1:])
    if match := re.match(r"Missing value for argument '([^'/]*)", words):
        return f"{_named(match[1])} needs a value."
    if match := re.match(r"invalid choice '(.*)' for argument '([^'/]*).*Expected one of \((.*?),?\)\.$", words):
        choices = match[3].replace("'", "").replace("None", UNSET)
        return f"{_named(match[2])} {match[1]} is unknown; choose one of {choices}."
    if match := re.match(r"Error parsing (--[^/: ]*)[^:]*: (.*)", words):
        unset = f" or {UNSET}" if "{None}|" in match[2] else ""
        for reason, works in _NUMBERS.items():
            if reason in match[2]:
                value = match[2].partition(reason)[2].strip().strip("'")
                return f"{match[1]} takes {works}{unset}, not {value}."
        return f"{match[1]}: {match[2].rstrip('.')}."
    if match := re.match(r"Error parsing [^:]*: (.*)", words):  # raised by a check of the options class
        return match[1]
    return words


def _missing(rows: Sequence[str]) -> str:
    """Return the sentence about missing arguments.

    Args:
        rows: the name of each argument, with its help text below in a more indented row.
    """
    indent = min(len(row) - len(row.lstrip()) for row in rows)
    names = [row.split()[0] for row in rows if len(row) - len(row.lstrip()) == indent]
    helps = [row.strip().removesuffix("(required)").strip() for row in rows if len(row) - len(row.lstrip()) > indent]
    meaning = "" if len(helps) != len(names) else ": " + " ".join(helps)
    return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} missing{meaning or '.'}"


def _named(name: str) -> str:
    return name if name.startswith("-") else name.upper()
