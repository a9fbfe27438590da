"""Conversion to TOML and back: valid files, the record of a run, and errors for invalid files."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import Configuration, build, compose, keys_of, parse_arguments, plan_run, to_toml, typed_values
from diloco.errors import ConfigurationError
from diloco.units import Duration, Rate
from tests.command_lines import command_line, load_configuration, toml_file

WRONG_FILES = [
    ("[sync]\ninner-steps = 5", ["'sync.inner-steps'", "did you mean 'sync.inner_steps'?"]),
    ("[checkpoint]\ncolour = 1", ["'checkpoint.colour'", "unknown key"]),
    ("[train]\nsteps = 5.0", ["train.steps = 5.0", "Expected int, got"]),
    ("[train]\ninit_from = 3", ["train.init_from = 3", "path in quotes"]),
    ('[data]\npaths = "a.txt"', ["data.paths", "Expected array, got str"]),
    ("[network]\nsilence = 15", ["network.silence = 15 is not valid", "expected a number with us, ms, s,"]),
    ('[emulate]\nbandwidth = ["100MB"]', ["emulate.bandwidth", "such as '500Mbit'"]),
    *(
        (f"[sync.arguments]\n{role} = {value}", [f"sync.arguments.{role} must be a table"])
        for role in ("codec", "outer", "merge", "average")
        for value in (3, "'mean'", "['lm_head']")
    ),
    ("[sync.arguments.codecs]\na = 3", ["no table 'codecs'; did you mean 'codec'?"]),
    ('algorithm = "stream"', ["algorithm", "expected one of streaming, diloco, data-parallel"]),
    ("train = 5", ["train = 5", "train is a section, written [train]"]),
    ("[optimizer.arguments]\nwhen = 2020-01-01", ["optimizer.arguments", "a number, a string, a list or a table"]),
    ('[train]\ninit_from = "a\\u0000b"', ["train.init_from", "without null characters"]),
    ("steps = " + "[" * 3000, ["run.toml", "not valid TOML"]),
    ('preset = "tinny"', ["there is no preset 'tinny'", "did you mean 'tiny'?"]),
    ("[train]\nsteps = 0", ["train.steps must be a whole number of at least 1, got 0"]),
    ("[monitor]\nprometheus = ':0'", ["monitor.prometheus must be PORT or HOST:PORT, got ':0'"]),
]


@pytest.mark.parametrize(("text", "words"), WRONG_FILES, ids=[text.replace("\n", " ") for text, _ in WRONG_FILES])
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    file = toml_file(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        compose(command_line(file))
    message = str(caught.value)
    for word in words:
        assert word in message


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_byte_order_mark_is_no_part_of_the_settings(tmp_path: Path, ends: str) -> None:
    (tmp_path / "marked.toml").write_bytes(f"\ufeffseed = 3{ends}[train]{ends}steps = 50{ends}".encode())
    configuration = load_configuration([str(tmp_path / "marked.toml")])
    assert (configuration.seed, configuration.train.steps) == (3, 50)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.toml cannot be read: No such file"):
        load_configuration([str(tmp_path / "absent.toml")])
    (tmp_path / "binary.toml").write_text("preset = 'tiny'", encoding="utf-16")
    with pytest.raises(ConfigurationError, match=r"binary\.toml cannot be read: .* Convert it to UTF-8"):
        load_configuration([str(tmp_path / "binary.toml")])


def values_for(annotation: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a setting's type."""
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    scalars = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        Duration: st.floats(0, 1e9),
        Rate: st.floats(0, 1e15),
        bool: st.booleans(),
        str: text,
        Path: text.map(lambda words: Path(words.replace("\0", "0"))),  # no file system has paths with nulls
    }
    if annotation in scalars:
        return scalars[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is tuple and parts[-1] is Ellipsis:
        return st.lists(values_for(parts[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_for, parts))
    if type(None) in parts:
        return st.none() | values_for(next(part for part in parts if part is not type(None)))
    leaves = st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | text
    nested = st.recursive(leaves, lambda inner: st.lists(inner).map(tuple) | st.dictionaries(text, inner), max_leaves=4)
    return st.dictionaries(text, nested, max_size=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Section:
    count: int = 3
    ratio: float | None = 1.0
    unset: int | None = None
    name: str | None = None
    choice: Literal["alpha", "rebase"] | None = None
    words: tuple[str, ...] = ()
    wait: Duration = 1.5
    rates: tuple[Rate, ...] = ()
    table: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """Every kind of key that the settings have, without checks, so that any value is valid."""

    flag: bool = False
    where: Path | None = None
    pair: tuple[float, float] = (0.5, 0.25)
    places: tuple[Path, ...] = ()
    section: _Section = dataclasses.field(default_factory=_Section)


SETTINGS = st.fixed_dictionaries({name: values_for(key.annotation) for name, key in keys_of(_Settings).items()}).map(
    lambda values: build(_Settings, values)
)


PRESET = st.fixed_dictionaries(
    {"section.count": st.integers(), "section.unset": st.integers(), "section.ratio": st.none() | st.floats()}
)


@given(SETTINGS, st.just({}) | PRESET)
def test_settings_survive_the_way_through_toml_also_with_a_preset_below(
    settings: _Settings, beneath: dict[str, Any]
) -> None:
    """A key that is None here, but not in the preset, must not get the preset's value when it is read back."""
    text = to_toml(settings, beneath=beneath)
    assert build(_Settings, beneath | typed_values(tomllib.loads(text), _Settings, "test")) == settings


@pytest.mark.parametrize(
    "flags",
    [
        {"preset": "tiny"},
        {"preset": "tiny-muon"},
        {"train.steps": 50, "seed": 3},
        {"optimizer.clip_norm": None},
        {"sync.outer_learning_rate": None},
    ],
    ids=str,
)
def test_the_record_of_a_run_begins_the_same_run(tmp_path: Path, flags: dict[str, Any]) -> None:
    plan = plan_run(command_line(**flags))
    again = plan_run(command_line(toml_file(tmp_path, plan.record)))
    assert again.configuration == plan.configuration
    # The same without the preset as a layer below.
    values = typed_values(tomllib.loads(plan.record), Configuration, "config.toml")
    assert build(Configuration, values) == plan.configuration


def test_the_record_leaves_out_what_belongs_to_one_start_only() -> None:
    plan = plan_run(parse_arguments(["--out", "x", "--stop-after", "5"]))
    assert (plan.configuration.out, plan.configuration.train.stop_after) == (Path("x"), 5)
    assert "stop_after" not in plan.record
    assert "out" not in tomllib.loads(plan.record)
