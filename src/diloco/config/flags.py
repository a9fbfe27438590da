"""Command lines: the options of a command, or one flag for each key of a settings class.

Words are collected by flag here and converted as values of a TOML file are. tyro prints the help and the completions
of shells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import re
import shlex
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, get_args, get_origin

import msgspec
import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseCounterAction, arg

from diloco.config.keys import Key, Values, build, keys_of, layered, leaf_type
from diloco.config.names import nearest_flags
from diloco.config.renamed import replacement
from diloco.config.toml import MAY_BE_EMPTY, convert, freeze, in_toml
from diloco.errors import DEBUG, ConfigurationError
from diloco.terminal import plain
from diloco.units import Duration, Rate, escape, unescape

__all__ = ["CommandLine", "command_text", "parse_flags", "parse_options"]

ESCAPED = ("stop", "document_separator")
r"""Options whose text is looked for in other text: it may have escapes such as \n."""

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
    common: Collection[str] | None = None,
    helps: Mapping[str, str] = {},
) -> CommandLine:
    """Parse a command line that has a flag for every key of ``settings_type``.

    The result holds only what was typed, so that defaults, presets, a TOML file and flags can be layered, and a resumed
    run knows which settings to change.

    Args:
        shown: the values that the help shows as defaults.
        place: the name of the positional argument in the help, and its description.
        helps: key -> its help text, if it is not the docstring.
        common: the keys that --help shows, in this order; --help-all shows all. None: those whose flag has no section.

    Raises:
        ConfigurationError: as in `parse_options`.
        SystemExit: with code 0, for --help and --help-all.
    """
    known = keys_of(settings_type)
    file = _option("file", Path, metavar=place[0], positional=True)
    own = {key.name: key for key in (file, _option("print_config", bool), _option("help_all", bool))}
    if asked := _asked(arguments, "--help-all"):
        keys = list(known.values())
        if "--help-all" not in asked:
            keys = (
                [key for key in keys if key.aliases or not key.section]
                if common is None
                else [known[name] for name in common]
            )
        kind = _kind(keys, shown, helps, place, everything=len(keys) == len(known))
        _tyro(kind, command, description, ["--help"] if "--help-all" in asked else asked)
    values = _parse(own | known, command, arguments)
    typed = {name: value for name, value in values.items() if name not in own}
    typed = layered(settings_type, {}, typed)
    return CommandLine(file=values.get("file"), print_config=values.get("print_config", False), values=typed)


def parse_options(kind: Any, command: str, arguments: Sequence[str]) -> Any:
    """Parse the arguments of ``diloco COMMAND`` into ``kind``, a dataclass with a flag or a place for each field.

    Its docstring describes the command.

    A flag that takes text takes the next word, even one with a dash, unless that is a flag of this command. ``--debug``
    in any other place sets `DEBUG`. The words after ``--`` are positional.

    Raises:
        ConfigurationError: for an invalid command line, with the nearest flag for an unknown one.
        SystemExit: with code 0, for --help.
    """
    if asked := _asked(arguments):
        _tyro(kind, command, inspect.getdoc(kind) or "", asked)
    keys = keys_of(kind)
    values = _parse(keys, command, arguments)
    for key in keys.values():
        if key.default is dataclasses.MISSING and key.name not in values:
            name = _named(key) if key.positional else f"{key.flag} {_metavar(key)}"
            raise ConfigurationError(f"missing argument {name}: {key.help} See `diloco {command} --help`.")
    return build(kind, values)


def _option(name: str, annotation: Any, **more: Any) -> Key:
    return Key(name=name, annotation=annotation, default=None, owner=CommandLine, negatable=False, **more)


def _asked(arguments: Sequence[str], *more: str) -> list[str]:
    """Return the words that ask for the help (``more``: other words for it) or the completions of a shell, if any."""
    words = [*itertools.takewhile(lambda word: word != "--", arguments)]
    for word, shell in itertools.pairwise(words):
        if word == "--tyro-print-completion" and shell in ("bash", "zsh", "tcsh"):
            return [word, shell]
    return [word for word in words if word in ("-h", "--help", *more)]


def _tyro(kind: Any, command: str, description: str, words: Sequence[str]) -> None:
    with contextlib.redirect_stdout(plain(sys.stdout)):  # tyro colours its help
        tyro.cli(kind, prog=f"diloco {command}", description=description, args=words)


def _parse(keys: Mapping[str, Key], command: str, arguments: Sequence[str]) -> Values:
    """Return the value of each key that was typed."""
    try:
        return _Words(keys, arguments, command).values()
    except _MisuseError as misuse:
        raise ConfigurationError(f"{misuse} See `diloco {command} --help`.") from None


class _MisuseError(Exception):
    """A sentence about an invalid command line."""


class _Words:
    """The words of a command line, by the key that they belong to."""

    def __init__(self, keys: Mapping[str, Key], arguments: Sequence[str], command: str) -> None:
        self._keys, self._command = keys, command
        self._flags = {flag: key for key in keys.values() if not key.positional for flag in (key.flag, *key.aliases)}
        switches = [key for key in keys.values() if key.is_switch and key.negatable]
        self._negations = {_negation(flag): key for key in switches for flag in (key.flag, *key.aliases)}
        self._words = [*arguments]

    def values(self) -> Values:
        """Return the values of all keys, converted."""
        values: Values = {}
        places: list[str] = []
        while self._words:
            word = self._words.pop(0)
            flag, equals, text = word.partition("=")
            flag = flag.replace("_", "-") if flag not in self._flags else flag
            after = [text] if equals else []
            if word == "--":
                places += self._words
                break
            if not _looks_like_a_flag(word):
                places.append(word)
            elif flag in self._negations or (flag in self._flags and self._flags[flag].is_switch):
                self._refuse_value(flag, after or self._words[:1], bool(equals))
                key = self._negations.get(flag) or self._flags[flag]
                values[key.name] = flag not in self._negations
            elif flag in self._flags:
                key = self._flags[flag]
                taken = self._taken(key, flag, after)
                if key.is_list and key.name in values:
                    raise _MisuseError(f"{flag} was given twice. Give all of its values after one {flag}.")
                values[key.name] = self._value(key, flag, taken)
            elif (table := self._table(flag)) is not None:
                entry = flag.removeprefix(table.flag).replace("-", "_")
                alone = not after and (not self._words or self._is_flag(self._words[0]))
                values[f"{table.name}{entry}"] = alone or _entry(flag, self._taken(_option(flag, str), flag, after)[0])
            elif word == "--debug":
                DEBUG.set(True)
            else:
                raise self._unknown(word.partition("=")[0])
        return values | self._places(places)

    def _is_flag(self, word: str) -> bool:
        flag = word.partition("=")[0].replace("_", "-")
        return (
            self._table(flag) is not None or flag in self._flags or flag in self._negations or flag in ("-h", "--help")
        )

    def _table(self, flag: str) -> Key | None:
        """Return the table of which ``flag`` sets an entry, if any."""
        tables = (key for key in self._keys.values() if key.is_table and flag.startswith(f"{key.flag}."))
        return None if "" in flag.split(".") else next(tables, None)

    def _unknown(self, word: str) -> _MisuseError:
        if gone := replacement(word.replace("_", "-"), self._command):
            return _MisuseError(f"there is no flag {word} any more: {gone}")
        near = " or ".join(nearest_flags(word, sorted({*self._flags, *self._negations, "--help"})))
        return _MisuseError(f"there is no flag {word}{f'; did you mean {near}?' if near else '.'}")

    def _refuse_value(self, flag: str, after: Sequence[str], equals: bool) -> None:
        if equals or (after and after[0].lower() in ("yes", "no", "true", "false", "on", "off", "0", "1")):
            other = f" or {_negation(flag)}" if _negation(flag) in self._negations else ""
            raise _MisuseError(f"{flag} takes no value, so {after[0]} has no meaning. Use {flag}{other}.")

    def _taken(self, key: Key, flag: str, after: list[str]) -> list[str]:
        """Return the words of a flag: one, or for a list all up to the next flag."""
        text = leaf_type(key.annotation) in (str, Path)
        while self._words and (key.is_list or not after):
            word = self._words[0]
            if self._is_flag(word) or (_looks_like_a_flag(word) and not text):
                break
            after.append(self._words.pop(0))
        if not after and not key.is_list:
            self_made = self._words and self._is_flag(self._words[0]) and text
            hint = f" For the value {self._words[0]} itself, use {flag}={self._words[0]}." if self_made else ""
            raise _MisuseError(f"{flag} needs a value.{hint}")
        if key.name not in MAY_BE_EMPTY and ("" in after or (not after and text)):
            raise _MisuseError(f"{flag} needs a value that is not empty. Is a variable of the shell not set?")
        return after

    def _value(self, key: Key, flag: str, words: Sequence[str]) -> Any:
        texts = [unescape(word) for word in words] if key.name in ESCAPED else [*words]
        value: Any = texts if key.is_list else texts[0]
        try:
            return convert(key, value, f"{flag} {' '.join(words)}", typed=True)
        except ConfigurationError as error:
            raise _MisuseError(str(error)) from None

    def _places(self, words: list[str]) -> Values:
        """Return the values of the positional arguments."""
        values: Values = {}
        for key in (key for key in self._keys.values() if key.positional):
            if words and "" in words:
                raise _MisuseError("an argument is empty. Is a variable of the shell not set?")
            if key.is_list and words:
                values[key.name], words = self._value(key, _named(key), words), []
            elif words:
                values[key.name] = self._value(key, _named(key), words[:1])
                words = words[1:]
        if words:
            hint = replacement("--", self._command)
            raise _MisuseError(f"too many arguments: {' '.join(words)}{f'; {hint}' if hint else '.'}")
        return values


def _looks_like_a_flag(word: str) -> bool:
    return word.startswith("-") and not re.match(r"-(\.?\d|$)", word)


def _entry(flag: str, word: str) -> Any:
    """Return the value of an entry of a table: a value of TOML that a file of settings can hold, or else a text."""
    try:
        values = tomllib.loads(f"value = {word}")
        return freeze(values["value"]) if len(values) == 1 else word
    except msgspec.ValidationError:
        return word  # such as a date
    except tomllib.TOMLDecodeError as error:
        if word[:1] in ("[", "{"):
            raise _MisuseError(f"{flag} {word} is not valid TOML: {error}. A text that begins so has quotes.") from None
        return word


def _named(key: Key) -> str:
    return key.metavar or key.name.upper()


def _negation(flag: str) -> str:
    section, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{section}{dot}no-{name}"


def _kind(
    keys: Iterable[Key],
    shown: Mapping[str, Any],
    helps: Mapping[str, str],
    place: tuple[str, str],
    *,
    everything: bool,
) -> Any:
    """Return a `TypedDict` from which tyro prints the help of these keys and of the arguments of every such command."""
    fields: dict[str, Any] = {
        "file": NotRequired[Annotated[Positional[Path], arg(metavar=place[0], help=place[1], help_behavior_hint="")]],
    }
    sections: dict[str, dict[str, Any]] = {}
    for key in keys:
        whole = everything and key.section
        target = sections.setdefault(key.section, {}) if whole else fields
        annotation = key.annotation
        if key.is_table or leaf_type(annotation) in (Duration, Rate):  # tyro prints the metavar, and needs no more
            annotation = tuple[str, ...] if key.is_list else str
        if key.is_switch and not key.negatable:
            annotation = FlagCreatePairsOff[bool]
        target[key.leaf if whole else key.name] = NotRequired[
            Annotated[annotation, _argument(key, shown.get(key.name), helps.get(key.name, key.help), whole=bool(whole))]
        ]
    for section, contents in sections.items():
        # without a help text, tyro would spend a long time on looking for one
        fields[section] = Annotated[_make_typed_dict(section, contents), arg(help="")]
    more = {"print_config": "Print the resolved settings as TOML and the facts that follow, and exit."}
    more |= {} if everything else {"help_all": "Show all settings."}
    for name, text in more.items():
        fields[name] = Annotated[UseCounterAction[int], arg(help=text, help_behavior_hint="")]
    return _make_typed_dict("Flags", fields)


def _argument(key: Key, default: Any, text: str, *, whole: bool) -> Any:
    """Return the flag of one key: short alias first, no type, and the default unless the help text states it."""
    unset = default is None or default == () or default == {} or (default is False and not key.negatable)
    silent = unset or "efault:" in text
    hint = "" if silent else f"(default: {_show(default)})"
    long = [alias for alias in key.aliases if alias.startswith("--")]
    if whole or not long:
        return arg(help=text, aliases=key.aliases, metavar=_metavar(key), help_behavior_hint=hint)
    return arg(help=text, name=long[0].removeprefix("--"), metavar=_metavar(key), help_behavior_hint=hint)


def _show(value: Any) -> str:
    """Return a default as it would be typed. Text is quoted only if surrounding spaces would be lost otherwise."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return in_toml(value)
    if isinstance(value, tuple):
        return " ".join(map(_show, value))
    return repr(value) if isinstance(value, str) and value != value.strip() else str(value)


def _metavar(key: Key) -> str | None:
    """Return the placeholder of a value: the type in capitals, or the choices; None for a switch."""
    leaf = leaf_type(key.annotation)
    if key.is_switch or key.metavar:
        return key.metavar
    if get_origin(leaf) is Literal:
        return f"{{{','.join(get_args(leaf))}}}"
    words = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", Duration: "TIME", Rate: "RATE"}
    return words.get(leaf, "TOML") + ("..." if key.is_list else "")


def command_text(command: str, *places: object, flags: Mapping[str, object] | None = None) -> str:
    """Return ``diloco COMMAND`` with its arguments, quoted for a shell. Every command that is printed is made here.

    Args:
        places: its positional arguments.
        flags: flag -> value. False is written as the flag's negation, None as the word None, a tuple as several words,
            and a table as TOML.

    >>> command_text("train", "my run.toml", flags={"--steps": 5, "--network.compress": False, "--run": "-a"})
    "diloco train 'my run.toml' --steps 5 --network.no-compress --run=-a"
    """
    words = ["diloco", command]
    words += [f"./{place}" if str(place).startswith("-") else str(place) for place in places]
    for flag, value in (flags or {}).items():
        if isinstance(value, bool):
            words.append(flag if value else _negation(flag))
        elif isinstance(value, Mapping):
            words += [flag, in_toml(value)]
        else:
            texts = [str(item) for item in (value if isinstance(value, tuple) else [value])]
            texts = [escape(text) for text in texts] if flag.lstrip("-").replace("-", "_") in ESCAPED else texts
            dashed = texts[:1] and texts[0].startswith("-")
            words += [f"{flag}={texts[0]}", *texts[1:]] if dashed else [flag, *texts]
    return shlex.join(words)
