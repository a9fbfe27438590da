"""Command lines: the options of a command, or one flag for each key of a settings class.

Words are collected by flag here and converted as values of a TOML file are. A word that begins with a dash is a flag,
unless it is a number; ``=`` gives any word as a value. tyro prints the help.
"""

import contextlib
import inspect
import itertools
import re
import shlex
import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, get_args, get_origin

import msgspec
import tyro
from tyro.conf import Positional, UseCounterAction, arg

from diloco.algorithm import check_ranges
from diloco.config.keys import (
    POSITIONAL,
    Key,
    Values,
    build,
    convert,
    freeze,
    in_toml,
    keys_of,
    merge,
    nearest_name,
    parse_tables,
)
from diloco.errors import DEBUG, ConfigurationError
from diloco.terminal import plain
from diloco.traits import Trait
from diloco.units import Duration, Rate

# TypedDict is called with names that a type checker can't know.
_make_typed_dict: Any = TypedDict


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The arguments of a command that takes a TOML file and a flag for every key, as typed."""

    file: Annotated[Positional[Path | None], arg(metavar="[run.toml]")] = None
    """TOML file with any of the keys below."""
    print_config: bool = False
    """Print the settings as TOML, with what follows from them, and exit."""
    resume_or_start: Annotated[str | None, arg(metavar="RUN")] = None
    """Resume from this run folder or mirror, or begin there if it has no checkpoint."""
    found: bool = False
    """swarm: found the run although --join names addresses, if none of its peers can be found."""
    help_all: bool = False
    """Show all settings."""
    values: Values = field(default_factory=dict)  # the keys that were set by flags
    defaults: Values = field(default_factory=dict)  # keys below the file, as for a start by ``torchrun``


def parse_flags(
    settings_type: type,
    command: str,
    description: str,
    arguments: Sequence[str],
    *,
    shown: Mapping[str, Any],
    common: Collection[str] = (),
) -> CommandLine:
    """Parse a command line that has a flag for every key of ``settings_type``, and a TOML file or its own place.

    The result holds only what was typed, since it is one of several layers, and a resumed run changes only that.

    Args:
        shown: the values that the help shows as defaults.
        common: the keys that --help shows, in this order; by default, those whose flag has no section.

    Raises:
        SystemExit: with code 0, for --help and --help-all.
    """
    known = keys_of(settings_type)
    places = [name for name, key in known.items() if key.is_positional]
    unfit = {"values", "defaults"} | ({"resume_or_start", "found"} if command == "plan" else set())
    unfit |= {"file"} if places else set()
    own = {name: key for name, key in keys_of(CommandLine).items() if name not in unfit}
    if asked := _help_asked(arguments):
        everything = asked == {"--help-all"}
        usual = common or [name for name, key in known.items() if key.aliases or not key.section]
        options = [key for name, key in own.items() if name not in ("file", "help_all" if everything else "")]
        names = [name for name in (known if everything else usual) if name not in places]
        keys = [*(known[name] for name in places), *([] if places else [own["file"]]), *map(known.get, names), *options]
        _show_help(filter(None, keys), command, description, shown, in_sections=everything)
    values = _parse(own | known, command, arguments)
    typed = {name: value for name, value in values.items() if name not in own}
    return CommandLine(**{name: value for name, value in values.items() if name in own}, values=typed)


def parse_options(kind: Any, command: str, arguments: Sequence[str]) -> Any:
    """Parse the arguments of ``diloco COMMAND`` into ``kind``, a dataclass with a flag or a place for each field.

    Its docstring describes the command. ``--debug`` in any place sets `DEBUG`. The words after ``--`` are positional.

    Raises:
        SystemExit: with code 0, for --help.
    """
    keys = keys_of(kind)
    if _help_asked(arguments) - {"--help-all"}:
        defaults = {name: key.default for name, key in keys.items()}
        _show_help(keys.values(), command, inspect.getdoc(kind) or "", defaults)
    values = _parse(keys, command, arguments)
    for key in keys.values():
        if key.default is MISSING and key.name not in values:
            name = _metavar(key) if key.is_positional else f"{key.flag} {_metavar(key)}"
            raise ConfigurationError(f"missing argument {name}: {key.help} See `diloco {command} --help`.")
    options = build(kind, values)
    check_ranges(options, "--")
    return options


def _help_asked(arguments: Sequence[str]) -> set[str]:
    return {"-h", "--help", "--help-all"} & {*itertools.takewhile(lambda word: word != "--", arguments)}


def _parse(keys: Mapping[str, Key], command: str, arguments: Sequence[str]) -> Values:
    try:
        return _Scan(keys, arguments).values()
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} See `diloco {command} --help`.") from None


class _Scan:
    """Words of a command line, which become values one flag after the other."""

    def __init__(self, keys: Mapping[str, Key], words: Iterable[str]) -> None:
        options = [key for key in keys.values() if not key.is_positional]
        self._positional = [key for key in keys.values() if key.is_positional]
        self._tables = [key for key in keys.values() if key.is_table]
        self._flags = {flag: key for key in options for flag in (key.flag, *key.aliases)}
        self._negations = {_negation(flag): key for flag, key in self._flags.items() if key.is_negatable}
        self._words, self._places = deque(words), list[str]()
        self._values: Values = {}

    def values(self) -> Values:
        """Read all words, and return the values by key."""
        while self._words:
            word = self._words.popleft()
            if word == "--":
                self._places += self._words
                break
            if word == "--debug":
                DEBUG.set(True)
            elif _is_flag(word):
                self._read_flag(word)
            else:
                self._places.append(word)
        self._read_places()
        return self._values

    def _read_flag(self, word: str) -> None:
        flag, equals, text = word.partition("=")
        flag = flag if flag in self._flags else flag.replace("_", "-")
        given = text if equals else None
        key = self._flags.get(flag) or self._negations.get(flag)
        table = next((table for table in self._tables if _names_entry(flag, table)), None)
        if key and key.is_switch:
            self._read_switch(key, flag, given)
        elif table:
            self._read_entry(table, flag, given)
        elif key:
            self._read_option(key, flag, given)
        else:
            near = nearest_name(flag, [*self._flags, *self._negations, "--help"])
            raise ConfigurationError(f"there is no flag {flag}{f'; did you mean {near}?' if near else '.'}")

    def _read_switch(self, key: Key, flag: str, given: str | None) -> None:
        if given is None and self._words and self._words[0].lower() in _TRUTHS:
            given = self._words[0]
        if given is not None:
            other = f" or {_negation(flag)}" if _negation(flag) in self._negations else ""
            raise ConfigurationError(f"{flag} takes no value, got {given}. Use {flag}{other}.")
        self._values[key.name] = flag not in self._negations

    def _read_entry(self, table: Key, flag: str, given: str | None) -> None:
        texts = self._texts(given)
        entry: Any = _toml_value(flag, texts[0]) if texts else True
        for part in reversed(flag.removeprefix(f"{table.flag}.").replace("-", "_").split(".")):
            entry = {part: entry}
        self._values[table.name] = merge(self._values.get(table.name), entry)

    def _read_option(self, key: Key, flag: str, given: str | None) -> None:
        value = _value(key, flag, self._texts(given, several=key.is_list), self._words)
        before = self._values.get(key.name)
        self._values[key.name] = (*before, *value) if key.is_list and before else merge(before, value)

    def _texts(self, given: str | None, *, several: bool = False) -> list[str]:
        """Return the text after the equals sign of a flag, and the words that follow it, if they belong to it."""
        texts = [] if given is None else [given]
        while self._words and not _is_flag(self._words[0]) and (several or not texts):
            texts.append(self._words.popleft())
        return texts

    def _read_places(self) -> None:
        """Give the words without a flag to the keys that need none."""
        places = self._places
        for key in self._positional:
            if places:
                count = len(places) if key.is_list else 1
                self._values[key.name] = _value(key, _metavar(key), places[:count], self._words)
                places = places[count:]
        if places:
            raise ConfigurationError(f"too many arguments: {' '.join(places)}; put a flag in front of each.")


_TRUTHS = ("true", "false", "yes", "no", "on", "off")


def _names_entry(flag: str, table: Key) -> bool:
    """Return whether a flag such as ``--sync.arguments.outer.nesterov`` names an entry of a table."""
    return flag.startswith(f"{table.flag}.") and "" not in flag.split(".")


def _is_flag(word: str) -> bool:
    return re.match(r"-(?!\.?\d|$)", word) is not None


def _value(key: Key, flag: str, texts: list[str], following: Iterable[str]) -> Any:
    if not texts and not (key.is_list and Trait.MAY_BE_EMPTY in key.traits):
        word = next(iter(following), None)
        raise ConfigurationError(
            f"{flag} needs a value.{f' For the value {word} itself, use {flag}={word}.' if word else ''}"
        )
    value: Any = texts
    if not key.is_list:
        value = _toml_value(flag, texts[0]) if key.is_table else texts[0]
    return convert(key, value, " ".join([flag, *texts]), typed=True)


def _toml_value(flag: str, word: str) -> Any:
    """Return the value of a table or of one of its entries: a value of TOML, or else a text."""
    with contextlib.suppress(msgspec.ValidationError, ConfigurationError):  # a date, or no TOML
        values = parse_tables(f"value = {word}", flag)
        if len(values) == 1:
            return freeze(values["value"])
    if word.startswith(("[", "{")):
        raise ConfigurationError(f"{flag} {word} is not valid TOML. A text that begins so has quotes.")
    return word


def _negation(flag: str) -> str:
    section, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{section}{dot}no-{name}"


def _show_help(
    keys: Iterable[Key],
    command: str,
    description: str,
    shown: Mapping[str, Any],
    *,
    in_sections: bool = False,
) -> None:
    fields: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for key in keys:
        inside = in_sections and key.section
        target = sections.setdefault(key.section, {}) if inside else fields
        text, default = key.help, shown.get(key.name)
        silent = default in (None, (), {}, "", MISSING) or "efault:" in text
        silent = silent or (default is False and not key.is_negatable)
        hint = "" if silent else f"(default: {_show(default)})"
        about = arg(
            name=key.short.removeprefix("--") if key.short and not inside else None,
            aliases=key.aliases if inside or not key.short else None,
            help=text,
            help_behavior_hint=None if key.default is MISSING else hint,
            metavar=None if key.is_switch else _metavar(key),
        )
        kind: Any = tuple[str, ...] if key.is_list else str
        if key.is_switch:
            kind = bool if key.is_negatable else UseCounterAction[int]
        shape = Annotated[kind, about, POSITIONAL] if key.is_positional else Annotated[kind, about]
        target[key.leaf if inside else key.name] = shape if key.default is MISSING else NotRequired[shape]
    for section, contents in sections.items():
        # without a help text, tyro would spend a long time on looking for one
        fields[section] = Annotated[_make_typed_dict(section, contents), arg(help="")]
    with contextlib.redirect_stdout(plain(sys.stdout)):  # tyro colours its help
        tyro.cli(_make_typed_dict("Flags", fields), prog=f"diloco {command}", description=description, args=["-h"])


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(_show, value))
    return in_toml(value) if isinstance(value, Mapping) else str(value)


def _metavar(key: Key) -> str:
    if key.metavar or key.is_positional:
        return key.metavar or key.name.upper()
    if get_origin(key.kind) is Literal:
        return f"{{{','.join(get_args(key.kind))}}}"
    words = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", Duration: "TIME", Rate: "RATE"}
    return words.get(key.kind, "TOML") + ("..." if key.is_list else "")


def command_text(command: str, *places: object, flags: Mapping[str, object] = {}) -> str:
    """Return ``diloco COMMAND`` with its arguments, quoted for a shell. Every command that is printed is made here.

    Args:
        places: its positional arguments.
        flags: flag -> value. False is written as the flag's negation, None as the word None, a tuple as several words,
            and a table as TOML.

    >>> command_text("train", "my run.toml", flags={"--steps": 5, "--data.streaming": False, "--run": "-a"})
    "diloco train 'my run.toml' --steps 5 --data.no-streaming --run=-a"
    """
    words = ["diloco", command]
    words += [f"./{place}" if str(place).startswith("-") else str(place) for place in places]
    for flag, value in flags.items():
        if isinstance(value, bool):
            words.append(flag if value else _negation(flag))
            continue
        items = value if isinstance(value, tuple) else (value,)
        texts = [in_toml(item) if isinstance(item, Mapping) else str(item) for item in items]
        plain_first = not texts or not texts[0].startswith("-")
        words += [flag] if plain_first else []
        words += [f"{flag}={text}" if text.startswith("-") else text for text in texts]
    return shlex.join(words)
