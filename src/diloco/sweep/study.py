"""A study: the settings that all runs share, the axes along which they differ, and the resulting runs."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import xxhash

from diloco import __version__
from diloco.config import (
    CommandLine,
    Configuration,
    RunPlan,
    Values,
    flatten,
    in_toml,
    keys_of,
    parse_toml,
    plan_run,
    read_tables,
)
from diloco.errors import ConfigurationError
from diloco.events import json_ready
from diloco.plugins import code_digest, find, is_own, names_in, own_code

__all__ = ["Run", "read_study"]

_LONGEST_NAME = 100
_NOT_VARIED = ("out", "checkpoint.resume")


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    name: str  # the values in which it differs from the other runs
    settings: Values  # key -> value of everything that the study sets
    varied: Values  # key -> value of the axes alone

    def to_toml(self) -> str:
        """Return the settings as TOML for `diloco train`."""
        return "".join(f"{key} = {in_toml(value)}\n" for key, value in self.settings.items())

    @cached_property
    def plan(self) -> RunPlan | None:
        """The plan of the run with all of its settings, or None if it can't be run."""
        try:
            return plan_run(CommandLine(file=None, print_config=False, values={}, defaults=self.settings))
        except ConfigurationError:
            return None

    def identity(self) -> str:
        """Return a digest of what decides the result: every setting, the files that they name, and this version."""
        settings = json_ready(flatten(self.plan.configuration) if self.plan else self.settings)
        files = {text: _content(text) for text in _texts(settings)}
        code = [_code(key, name) for key, value in own_code(self.settings).items() for name in names_in(value)]
        about = json.dumps([__version__, settings, files, code], sort_keys=True)
        return xxhash.xxh3_64_hexdigest(about.encode())

    def folder(self) -> str:
        """Return the name of its folder. A run with other settings or other data has another one."""
        return f"{self.name[:_LONGEST_NAME]}-{self.identity()}"


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, list | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _texts(value)


def _content(text: str) -> list[str]:
    """Return digests of the files that the value of a setting names, without hidden ones."""
    place = text.removeprefix("hf:")
    for each in (place, place.rpartition(":")[0]):  # without the split of a data set or the name in a file
        pattern = glob.escape(each) if os.path.exists(each) else each
        if os.path.isabs(each) and (paths := glob.glob(pattern)):
            return [_digest(path) for path in sorted({*paths, *glob.glob(f"{pattern}/**", recursive=True)})]
    return []


def _digest(path: str) -> str:
    try:
        status = os.stat(path)
        return _digest_once(path, status.st_size, status.st_mtime_ns, status.st_ino) if os.path.isfile(path) else path
    except OSError as error:  # the run says so
        return str(error)


@cache  # by what changes with the content, since the runs of a study share their data
def _digest_once(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return f"{path} {hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()}"


def _code(key: str, name: str) -> str:
    """Return a digest of the user's own code that a setting names; "" if it can't be used, as the run will say."""
    try:
        return code_digest(find(key, name, object)) if is_own(name) else ""
    except ConfigurationError:
        return ""


def read_study(path: Path) -> tuple[Run, ...]:
    """Return the runs of the study in a TOML file: every combination of the axes' points, the last axis fastest.

    ``[base]`` holds keys of a run, and ``[axes]`` holds a list of values for each key that is varied. Keys separated by
    commas are varied together: ``"sync.inner_steps, sync.overlap_steps" = [[10, 1], [30, 3]]`` has two points,
    not four.

    Raises:
        ConfigurationError: if the file can't be read, or a key or value is not valid for a run.
    """
    tables = read_tables(path, "the study")
    if unknown := sorted(tables.keys() - {"base", "axes"}):
        raise ConfigurationError(
            f"{path} has an unknown table [{unknown[0]}]. A study has [base], with keys of a run, and [axes], with a "
            "list of values for each key that is varied."
        )
    base = _checked(_flat(tables.get("base", {})), f"{path}, [base]")
    axes: dict[tuple[str, ...], tuple[tuple[Any, ...], ...]] = {}  # keys varied together -> their points
    for names, points in _flat(tables.get("axes", {})).items():
        keys = tuple(name.strip() for name in names.split(","))
        if not isinstance(points, list) or not points:
            raise ConfigurationError(f"{path}, [axes]: {names} must be a list of at least one value, got {points!r}.")
        if len({repr(point) for point in points}) < len(points):
            raise ConfigurationError(f"{path}, [axes]: {names} has the same value twice.")
        axes[keys] = tuple(_point(keys, point, f"{path}, [axes]") for point in points)
    varied_keys = [*itertools.chain(*axes)]
    for key in varied_keys:
        if varied_keys.count(key) > 1:
            raise ConfigurationError(f"{path}: {key} is on two axes. Keep it on one of them.")
    if not axes:
        raise ConfigurationError(f"{path} has no [axes]. Add at least one key with a list of values.")
    runs = []
    for chosen in itertools.product(*axes.values()):
        pairs = zip(axes, chosen, strict=True)
        varied = {key: value for keys, values in pairs for key, value in zip(keys, values, strict=True)}
        runs.append(Run(_name(varied), base | varied, varied))
    return tuple(runs)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys. A table that is the value of a key, such as ``optimizer.arguments``, is kept."""
    flat: dict[str, Any] = {}
    known = keys_of(Configuration)
    for word, value in table.items():
        name = f"{prefix}{word}"
        if isinstance(value, dict) and name not in known:
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _point(keys: tuple[str, ...], point: Any, where: str) -> tuple[Any, ...]:
    values = [point] if len(keys) == 1 else point
    if not isinstance(values, list) or len(values) != len(keys):
        raise ConfigurationError(
            f"{where}: {', '.join(keys)} are varied together, so each point must be a list of {len(keys)} values, got "
            f"{point!r}."
        )
    checked = _checked(dict(zip(keys, values, strict=True)), where)
    if inside := [key for key in keys if key not in checked]:
        table = next(key for key in checked if inside[0].startswith(f"{key}."))
        raise ConfigurationError(
            f"{where}: {inside[0]} is part of {table}, which can only be varied as a whole: "
            f'"{table}" = [{{ {inside[0].removeprefix(f"{table}.")} = ... }}, ...].'
        )
    return tuple(checked[key] for key in keys)


def _checked(values: Mapping[str, Any], where: str) -> Values:
    """Return the values converted to the types of a run's settings."""
    for key in _NOT_VARIED:
        if key in values:
            raise ConfigurationError(f"{where}: {key} can't be given, since the study sets it for each run.")
    text = "".join(f"{key} = {in_toml(value)}\n" for key, value in values.items())
    return parse_toml(text, Configuration, where=where)


def _name(varied: Values) -> str:
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in varied.items()]
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", ",".join(words).replace(",", "_"))
