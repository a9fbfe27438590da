"""Preset, TOML file and command line: the order, the names, the types, and the way back to TOML."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import Configuration, load_configuration, to_toml
from diloco.config.configuration import compose, parse_arguments
from diloco.config.flags import CommandLine
from diloco.config.keys import build, flatten, keys_of
from diloco.config.presets import RUN_PRESETS, preset_values
from diloco.config.run_plan import plan_run
from diloco.config.toml import parse_toml
from diloco.errors import ConfigurationError
from diloco.model.presets import get_preset, preset_names
from diloco.train.resolve import resolve


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def from_file(file: str | None, **flags: Any) -> Configuration:
    """As `load_configuration`, without the time that parsing flags takes."""
    values = {name.replace("__", "."): value for name, value in flags.items()}
    return compose(CommandLine(file=None if file is None else Path(file), print_config=False, values=values))


def test_the_order_is_preset_then_file_then_flags(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", "seed = 3\n[inner]\nlearning_rate = 1\n[transport]\nreplicas = 2\n")
    run = load_configuration(["--replicas", "8", file])
    assert run.train.sequence_length == get_preset("tiny").sequence_length
    assert run.schedule.inner_steps == 10
    assert (run.inner.learning_rate, type(run.inner.learning_rate)) == (1.0, float)
    assert (run.seed, run.transport.replicas) == (3, 8)


def test_a_preset_may_stand_in_the_file_or_on_the_command_line(tmp_path: Path) -> None:
    other = next(name for name in preset_names() if name != "tiny")
    third = next(name for name in preset_names() if name not in ("tiny", other))
    file = write(tmp_path / "run.toml", f'preset = "{other}"')
    assert load_configuration([file]).model == get_preset(other).model
    run = load_configuration([file, "--preset", third])
    assert (run.preset, run.model) == (third, get_preset(third).model)


SHORT_FLAGS: dict[str, tuple[str, Any]] = {
    "--steps 7": ("train.steps", 7),
    "--stop-after 3": ("train.stop_after", 3),
    "--seed 5": ("seed", 5),
    "--model hf:gpt2": ("model.source", "hf:gpt2"),
    "--replicas 2": ("transport.replicas", 2),
    "--algorithm diloco": ("algorithm", "diloco"),
    "--inner-steps 50": ("schedule.inner_steps", 50),
    "--fragments 2": ("fragments.num_fragments", 2),
    "--overlap-steps 3": ("schedule.overlap_steps", 3),
    "--merge-alpha 0.5": ("merge.alpha", 0.5),
    "--codec int8": ("codec.name", "int8"),
    "--transport torch": ("transport.name", "torch"),
    "--data a b": ("data.paths", (Path("a"), Path("b"))),
    "--resume runs/x": ("checkpoint.resume", Path("runs/x")),
    "--out runs/y": ("out", Path("runs/y")),
    "--init-from w.safetensors": ("train.init_from", Path("w.safetensors")),
    "--data-parallel-steps 0": ("train.data_parallel_steps", 0),
    "--preset 2m": ("preset", "2m"),
}
DOTTED_FLAGS: dict[str, tuple[str, Any]] = {
    "--train.steps 7": ("train.steps", 7),
    "--schedule.inner-steps 50": ("schedule.inner_steps", 50),
    "--fragments.num_fragments 2": ("fragments.num_fragments", 2),
    "--inner.clip-norm None": ("inner.clip_norm", None),
    "--train.compile": ("train.compile", True),
    "--codec.no-error-feedback": ("codec.error_feedback", False),
    "--outer.betas 0.8 0.9": ("outer.betas", (0.8, 0.9)),
    "--schedule.offsets 0 5": ("schedule.offsets", (0, 5)),
    "--monitor.console quiet": ("monitor.console", "quiet"),
    "--evaluation.every-steps=0": ("evaluation.every_steps", 0),
}


@pytest.mark.parametrize("flags", [SHORT_FLAGS, DOTTED_FLAGS], ids=["short", "dotted"])
def test_flags_set_their_key_and_nothing_else(flags: dict[str, tuple[str, Any]]) -> None:
    line = parse_arguments([word for flag in flags for word in flag.split()])
    assert line.values == dict(flags.values())
    values = flatten(compose(line))
    assert {name: values[name] for name in line.values} == line.values


def test_every_key_has_a_dotted_flag_and_says_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for key in keys_of(Configuration).values():
        flag = f"--{key.name.replace('_', '-')}"
        assert flag in shown or flag.replace(f".{key.leaf}", f".no-{key.leaf}") in shown
        for alias in key.aliases:
            assert f"{alias} " in shown
    assert "None" not in shown.replace("None: no clipping", "")


def test_shares_of_a_preset_follow_the_length_of_the_run(tmp_path: Path) -> None:
    values = preset_values("tiny", steps=30)
    assert (values["train.data_parallel_steps"], values["inner.warmup_steps"]) == (10, 7)
    file = write(tmp_path / "run.toml", "[train]\nsteps = 30\n")
    for run in (load_configuration(["--steps", "30"]), load_configuration([file])):
        assert (run.train.steps, run.train.data_parallel_steps, run.inner.warmup_steps) == (30, 10, 7)
    given_too = load_configuration([file, "--data-parallel-steps", "20"])
    assert given_too.train.data_parallel_steps == 20
    for steps in (1, 2, 3):
        resolve(from_file(None, train__steps=steps), num_layers=4)


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("algorithm", ["streaming", "diloco", "data-parallel", "none"])
def test_every_preset_runs_with_every_algorithm(name: str, algorithm: str) -> None:
    run = from_file(None, preset=name, algorithm=algorithm)
    resolved = resolve(run, num_layers=run.model.layers)
    assert resolved.train.sequence_length == get_preset(name).sequence_length


def test_every_model_preset_has_a_run_preset() -> None:
    assert set(RUN_PRESETS) == set(preset_names())


def test_another_inner_optimizer_does_not_inherit_arguments(tmp_path: Path) -> None:
    assert from_file(None, inner__name="SGD").inner.arguments == {}
    assert from_file(None, inner__name="AdamW").inner.arguments["weight_decay"] == 0.1
    file = write(tmp_path / "run.toml", '[inner]\nname = "SGD"\n[inner.arguments]\nmomentum = 0.9\n')
    assert from_file(file).inner.arguments == {"momentum": 0.9}
    assert from_file(file, inner__name="Adam").inner.arguments == {}


WRONG_FILES = [
    ("[train]\nstesp = 5", ["run.toml", "unknown key 'train.stesp'", "did you mean 'train.steps'?"]),
    ("steps = 5", ["unknown key 'steps'", "did you mean 'train.steps'?"]),
    ("[schedule]\ninner-steps = 5", ["'schedule.inner-steps'", "did you mean 'schedule.inner_steps'?"]),
    ("[shedule]\nxyz = 5", ["'shedule'", "did you mean '[schedule]'?"]),
    ("[codec]\ncolour = 1", ["'codec.colour'", "[codec] has: block_size, error_feedback, name."]),
    ('[train]\nsteps = "many"', ['train.steps = "many" was given', "a whole number is needed"]),
    ("[train]\nsteps = 5.0", ["train.steps = 5.0", "a whole number is needed"]),
    ("[train]\nsteps = true", ["train.steps = true", "a whole number is needed"]),
    ("[train]\ncompile = 1", ["train.compile = 1", "true or false is needed"]),
    ('[inner]\nlearning_rate = "big"', ["inner.learning_rate", "a number is needed"]),
    ("[train]\ninit_from = 3", ["train.init_from = 3", "a path in quotes is needed"]),
    ('[data]\npaths = "a.txt"', ["data.paths", "a list of paths in quotes is needed"]),
    ("[data]\npaths = [1]", ["data.paths = [1]", "a path in quotes is needed"]),
    ("[outer]\nbetas = [0.9]", ["outer.betas = [0.9]", "a list of 2 numbers is needed"]),
    ('[fragments]\npatterns = ["a"]', ["fragments.patterns", "a list of strings is needed"]),
    ('algorithm = "stream"', ["algorithm", "one of streaming, diloco, data-parallel, none is needed"]),
    ("train = 5", ["train = 5", "it is a section, written [train]"]),
    ("[inner]\narguments = 3", ["inner.arguments = 3", "a table is needed"]),
    ("[inner.arguments]\nwhen = 2020-01-01", ["inner.arguments", "numbers, strings, lists and tables"]),
    ("[train\nx", ["run.toml", "not valid TOML", "line 1"]),
    ('preset = "tinny"', ["there is no preset 'tinny'", "did you mean 'tiny'?"]),
    ("[train]\nsteps = 0", ["train.steps=0", "at least 1"]),
    ("[monitor]\nevery_steps = 0", ["monitor.every_steps=0", "at least 1"]),
]


@pytest.mark.parametrize(("text", "words"), WRONG_FILES, ids=[text.replace("\n", " ") for text, _ in WRONG_FILES])
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    file = write(tmp_path / "run.toml", text)
    with pytest.raises(ConfigurationError) as caught:
        from_file(file)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert message.endswith("Nothing was started.")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.toml cannot be read: No such file"):
        load_configuration([str(tmp_path / "absent.toml")])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"binary\.toml cannot be read"):
        load_configuration([str(tmp_path / "binary.toml")])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--stepz 5", ["--stepz", "--steps"]),
        ("--train.stepz 5", ["--train.stepz", "--train.steps"]),
        ("--schedule.iner-steps 5", ["--schedule.iner-steps", "--schedule.inner-steps"]),
        ("--steps many", ["--steps", "many"]),
        ("--algorithm stream", ["--algorithm", "stream", "data-parallel"]),
        ("--steps", ["--steps"]),
        ("a.toml b.toml", ["b.toml"]),
    ],
)
def test_a_wrong_flag_names_the_nearest_and_ends_with_2(
    flags: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        load_configuration(flags.split())
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in words:
        assert word in captured.err


def test_checks_see_final_values_only(tmp_path: Path) -> None:
    """Neither the file nor the flags alone would pass, and the error of the whole is the settings' own."""
    file = write(tmp_path / "run.toml", "[transport]\nlatency_s = [0.1, 0.2]\nstep_time_s = [1]")
    assert load_configuration([file, "--replicas", "2"]).transport.latency_s == (0.1, 0.2)
    with pytest.raises(ConfigurationError, match="latency_s has 2 values for 4 replicas"):
        load_configuration([file])


def values_for(annotation: Any) -> st.SearchStrategy[Any]:
    """Any value of a setting's type."""
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    scalars = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: text,
        Path: text.map(Path),
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
    groups: tuple[tuple[str, ...], ...] = ()
    table: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """Every kind of key that the settings have, without checks, so that any value will do."""

    flag: bool = False
    where: Path | None = None
    pair: tuple[float, float] = (0.5, 0.25)
    places: tuple[Path, ...] = ()
    section: _Section = dataclasses.field(default_factory=_Section)


SETTINGS = st.fixed_dictionaries({name: values_for(key.annotation) for name, key in keys_of(_Settings).items()}).map(
    lambda values: build(_Settings, values)
)


@given(settings=SETTINGS)
def test_settings_survive_the_way_through_toml(settings: _Settings) -> None:
    text = to_toml(settings)
    tomllib.loads(text)
    assert build(_Settings, parse_toml(text, _Settings, where="test")) == settings


@given(settings=SETTINGS, preset_count=st.integers(), preset_unset=st.integers(), preset_ratio=st.none() | st.floats())
def test_settings_survive_with_a_preset_below(
    settings: _Settings, preset_count: int, preset_unset: int, preset_ratio: float | None
) -> None:
    """A key that is None here and is not in the preset must not come back as the preset's."""
    beneath = {"section.count": preset_count, "section.unset": preset_unset, "section.ratio": preset_ratio}
    text = to_toml(settings, beneath=beneath)
    assert build(_Settings, beneath | parse_toml(text, _Settings, where="test")) == settings


def test_none_is_left_out_and_what_was_derived_is_marked() -> None:
    asked = load_configuration(["--codec", "int8"])
    run = resolve(asked, num_layers=4)
    text = to_toml(run, beneath=preset_values("tiny"), given=flatten(asked))
    assert 'rule = "rebase"  # derived\n' in text
    assert 'name = "int8"\n' in text
    assert "offsets" not in text
    assert [line for line in text.splitlines() if '"none"' in line] == ['activation_checkpointing = "none"'], "a word"


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize(
    "flags", [{}, {"train.steps": 50, "seed": 3}, {"inner.clip_norm": None}, {"outer.learning_rate": None}]
)
def test_the_record_of_a_run_begins_the_same_run(tmp_path: Path, preset: str, flags: dict[str, Any]) -> None:
    plan = plan_run(CommandLine(file=None, print_config=False, values={"preset": preset, **flags}))
    file = Path(write(tmp_path / "config.toml", plan.record))
    again = plan_run(CommandLine(file=file, print_config=False, values={}))
    assert again.configuration == plan.configuration
    # And for a reader that knows nothing of presets.
    assert build(Configuration, parse_toml(plan.record, Configuration, where="config.toml")) == plan.configuration


def test_the_record_leaves_out_what_belongs_to_one_start_only() -> None:
    plan = plan_run(parse_arguments(["--out", "x", "--stop-after", "5"]))
    assert (plan.configuration.out, plan.configuration.train.stop_after) == (Path("x"), 5)
    assert "stop_after" not in plan.record
    assert "out" not in tomllib.loads(plan.record)


def test_input_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "tokenizer.json").write_text("{}")
    plan = plan_run(parse_arguments(["--data", "a", "~/b", "--init-from", "w", "--data.tokenizer", "tokenizer.json"]))
    configuration = plan.configuration
    assert configuration.data.paths == (tmp_path / "a", tmp_path / "home" / "b")
    assert configuration.train.init_from == tmp_path / "w"
    assert configuration.data.tokenizer == str(tmp_path / "tokenizer.json")
    assert plan_run(parse_arguments([])).configuration.data.tokenizer == "bytes"


def test_a_key_of_an_earlier_version_is_the_first_of_several_now() -> None:
    text = '[evaluation]\nsample_prompt = "import "\nsample_tokens = 9'
    values = parse_toml(text, Configuration, where="test")
    assert values == {"evaluation.sample_prompts": ("import ",), "evaluation.sample_tokens": 9}


def test_only_what_was_typed_comes_back() -> None:
    line = parse_arguments(["--steps", "5", "--print-config"])
    assert (line.file, line.print_config, line.values) == (None, True, {"train.steps": 5})
    assert compose(line).train.steps == 5


def test_tables_and_lists_of_lists_are_given_as_toml() -> None:
    configuration = load_configuration(["--inner.arguments", "{weight_decay = 0.0, betas = [0.8, 0.9]}"])
    assert configuration.inner.arguments == {"weight_decay": 0.0, "betas": (0.8, 0.9)}
    arguments = ["--fragments.strategy", "patterns", "--fragments.patterns", '[["layers.*"], ["head.*", "norm.*"]]']
    assert load_configuration(arguments).fragments.patterns == (("layers.*",), ("head.*", "norm.*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--inner.arguments", "{weight"], "--inner.arguments is not valid TOML"),
        (["--inner.arguments", "3"], "inner.arguments"),
        (["--data", "text.txt", "run.toml"], "--data was given run.toml"),
    ],
)
def test_toml_in_the_wrong_place_or_shape_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_configuration(arguments)
