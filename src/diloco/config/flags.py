"""The command line of `diloco train`: a flag for every key, made by tyro from the settings' own types and docstrings.

Only what was typed comes back (tyro fills a `TypedDict` without defaults), so that defaults, presets, a TOML file and
flags can be layered, and a resumed run can tell what somebody wants changed.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, Union, get_args, get_origin

from tyro.conf import Positional, UseCounterAction, arg

from diloco.config.keys import Key, Values, keys_of
from diloco.config.toml import parse_toml
from diloco.config.usage import parse_arguments_of

__all__ = ["CommandLine", "parse_flags"]

# TypedDict is called with names that a type checker cannot know.
_make_typed_dict: Any = TypedDict


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What somebody typed after `diloco train`."""

    file: Path | None
    """The TOML file."""
    print_config: bool
    values: Values
    """The keys that were set by flags."""


def parse_flags(
    arguments: Sequence[str],
    settings_type: type,
    *,
    shown: Mapping[str, Any],
    program: str,
    description: str,
) -> CommandLine:
    """Read the command line.

    Args:
        arguments: what follows the command.
        settings_type: the dataclass whose keys become flags.
        shown: values that the help shows as defaults.
        program: how the command is called, for usage and messages.
        description: what stands above the list of flags.

    Raises:
        ConfigurationError: a usage error, naming the nearest flag, or a table or list of lists that is no TOML.
        SystemExit: with code 0, for --help.
    """
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
    known = keys_of(settings_type)
    for key in known.values():
        target = sections.setdefault(key.section, {}) if key.section else fields
        annotation = str if _is_structured(key.annotation) else key.annotation
        target[key.leaf] = NotRequired[Annotated[annotation, _argument(key, shown.get(key.name))]]
    for section, contents in sections.items():
        fields[section] = _make_typed_dict(section, contents)
    typed: Any = _make_typed_dict("Flags", fields)
    parsed = parse_arguments_of(typed, program=program, description=description, arguments=arguments)
    values: Values = {}
    for name, value in parsed.items():
        if name in sections:
            values |= {f"{name}.{leaf}": entry for leaf, entry in value.items()}
        elif name in known:
            values[name] = value
    for name in values:
        if _is_structured(known[name].annotation):
            values |= parse_toml(f"{name} = {values[name]}", settings_type, where=f"--{name.replace('_', '-')}")
    return CommandLine(file=parsed.get("file"), print_config=parsed["print_config"] > 0, values=values)


def _is_structured(annotation: Any) -> bool:
    """Whether a flag takes the value as TOML: a table, or a list of lists."""
    origin, parts = get_origin(annotation), get_args(annotation)
    return origin is Mapping or (origin is tuple and get_origin(parts[0]) is tuple)


def _argument(key: Key, default: Any) -> Any:
    """How tyro shows one key: short flag first, no type noise, and the default where the help does not say it."""
    silent = default is None or default == () or "efault:" in key.help
    hint = "" if silent else f"(default: {_show(default)})"
    return arg(help=key.help, aliases=key.aliases, metavar=_metavar(key.annotation), help_behavior_hint=hint)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_show_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple):
        return " ".join(_show(item) for item in value)
    return repr(value) if isinstance(value, str) and value != value.strip() else str(value)


def _show_toml(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _metavar(annotation: Any) -> str | None:
    """A word for the value: the type in capitals, or the choices; None where there is no value (a switch).

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
