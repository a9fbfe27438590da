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

import diloco
from diloco.config import (
    CommandLine,
    Configuration,
    RunPlan,
    Values,
    flatten,
    in_toml,
    parse_toml,
    plan_run,
    read_tables,
)
from diloco.errors import ConfigurationError
from diloco.events import json_ready
from diloco.plugins import code_digest, find, is_own, names_in, own_code

__all__ = ["Run", "read_study"]


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    name: str  # the values in which it differs from the other runs
    text: str  # its settings as TOML for `diloco train`
    settings: Values  # the same as key -> value
    varied: Mapping[str, Any]  # key -> value of the axes alone

    @cached_property
    def plan(self) -> RunPlan | None:
        """The plan of the run with all of its settings, or None if it can't be run."""
        try:
            return plan_run(CommandLine(file=None, print_config=False, values={}, defaults=self.settings))
        except ConfigurationError:
            return None

    def folder(self) -> str:
        """Return the name of its folder, with a digest of every setting, the files that they name, and this version."""
        settings = json_ready(flatten(self.plan.configuration) if self.plan else self.settings)
        own = ((key, name) for key, value in own_code(self.settings).items() for name in names_in(value))
        code = [code_digest(find(key, name, object)) for key, name in own if self.plan and is_own(name)]
        about = json.dumps([diloco.__version__, settings, [*_files(settings)], code], sort_keys=True)
        return f"{self.name[:100]}-{xxhash.xxh3_64_hexdigest(about.encode())}"


def read_study(path: Path) -> list[Run]:
    """Return the runs of the study in a TOML file: every combination of the axes' points, the last axis fastest.

    Raises:
        ConfigurationError: if the file can't be read, or a key or value is not valid for a run.
    """
    tables = read_tables(path, "the study")
    if tables.keys() - {"base", "axes"} or not tables.get("axes"):
        raise ConfigurationError(
            f"{path} must have a table [axes], with a list of values for each key that is varied, and may have [base], "
            f"with keys of a run, got {', '.join(f'[{name}]' for name in tables) or 'nothing'}."
        )
    base, axes = dict(_leaves(tables.get("base", {}))), dict(_leaves(tables["axes"]))
    for names, points in axes.items():
        if not isinstance(points, list) or not points or len({*map(repr, points)}) < len(points):
            raise ConfigurationError(f"{path}, [axes]: {names} must be a list of different values, got {points!r}.")
    return [_run(path, base, dict(zip(axes, point, strict=True))) for point in itertools.product(*axes.values())]


def _run(path: Path, base: Mapping[str, Any], point: Mapping[str, Any]) -> Run:
    varied: dict[str, Any] = {}
    for names, value in point.items():
        keys = [name.strip() for name in names.split(",")]
        values = [value] if len(keys) == 1 else value
        if not isinstance(values, list) or len(values) != len(keys):
            raise ConfigurationError(f"{path}, [axes]: a point of {names} must have {len(keys)} values, got {value!r}.")
        if both := varied.keys() & keys:
            raise ConfigurationError(f"{path}: {min(both)} is on two axes. Keep it on one of them.")
        varied |= zip(keys, values, strict=True)
    shared = {key: value for key, value in base.items() if not any(f"{key}.".startswith(f"{each}.") for each in varied)}
    if given := {"out", "checkpoint.resume"} & {*shared, *varied}:
        raise ConfigurationError(f"{path}: {min(given)} can't be given, since the study sets it for each run.")
    text = "".join(f"{key} = {in_toml(value)}\n" for key, value in (shared | varied).items())
    words = "_".join(f"{key.rpartition('.')[2]}={value}" for key, value in varied.items())
    name = re.sub(r"[^A-Za-z0-9._=+-]+", "-", words)
    return Run(name, text, parse_toml(text, Configuration, where=str(path)), varied)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with dotted keys."""
    for word, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{word}.")
        else:
            yield f"{prefix}{word}", value


def _files(value: Any) -> Iterator[str]:
    """Yield digests of the files that settings name, without hidden ones."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _files(each)
    elif isinstance(value, str):
        place = value.removeprefix("hf:")
        for each in (place, place.rpartition(":")[0]):  # without the split of a data set or the name in a file
            pattern = glob.escape(each) if os.path.exists(each) else each
            if os.path.isabs(each) and (paths := {*glob.glob(pattern), *glob.glob(f"{pattern}/**", recursive=True)}):
                stated = ((path, os.stat(path)) for path in sorted(paths) if os.path.isfile(path))
                yield from (_digest(path, at.st_size, at.st_mtime_ns, at.st_ino) for path, at in stated)
                return


@cache  # by what changes with the content, since the runs of a study share their data
def _digest(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return f"{path} {hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()}"
