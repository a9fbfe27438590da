"""Studies: their files, their runs, and the table of the outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config import Configuration, parse_toml
from diloco.errors import ConfigurationError
from diloco.sweep import read_study, table

STUDY = """
[base]
seed = 3
train.steps = 50
[axes]
"sync.inner_steps, sync.overlap_steps" = [[10, 1], [30, 3]]
sync.codec = ["fp4", "float32"]
"""


def study(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return path


def test_runs_are_all_combinations_and_each_is_a_configuration(tmp_path: Path) -> None:
    runs = read_study(study(tmp_path, STUDY))
    assert [run.name for run in runs] == [
        "inner_steps=10_overlap_steps=1_name=fp4",
        "inner_steps=10_overlap_steps=1_name=float32",
        "inner_steps=30_overlap_steps=3_name=fp4",
        "inner_steps=30_overlap_steps=3_name=float32",
    ]
    for run in runs:
        assert parse_toml(run.to_toml(), Configuration, where="") == run.settings
        assert run.settings == {"seed": 3, "train.steps": 50, **run.varied}


def test_tables_that_are_values_stay_tables_and_long_names_are_told_apart(tmp_path: Path) -> None:
    tables = ", ".join(f'{{momentum = {momentum}, extra = "{"x" * 200}"}}' for momentum in (0.9, 0.8))
    text = f'[axes]\n"optimizer.arguments" = [{tables}]'
    runs = read_study(study(tmp_path, text))
    assert runs[0].settings["optimizer.arguments"]["momentum"] == 0.9
    assert len({run.folder() for run in runs}) == 2
    assert all(len(run.folder()) <= 120 for run in runs)


@pytest.mark.parametrize(
    "axis",
    [
        "optimizer.learning_rate = [0.12345678, 0.12345679]",
        '"sync.overlap_steps" = ["none", 1]',
        'data.text_field = ["a b", "a-b"]',
    ],
)
def test_runs_whose_names_or_results_are_alike_have_folders_of_their_own(axis: str, tmp_path: Path) -> None:
    one, two = read_study(study(tmp_path, f"[axes]\n{axis}"))
    assert one.folder().lower() != two.folder().lower()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[base", "is not valid TOML"),
        ("[bases]\nseed = 1", r"has an unknown table \[bases\]. A study has \[base\]"),
        ("[base]\nseed = 1", r"has no \[axes\]"),
        ("[axes]\nseed = 1", "seed must be a list of at least one value, got 1"),
        ("[axes]\nseed = []", "at least one value"),
        ("[axes]\nseed = [1, 1]", "seed has the same value twice"),
        ("[axes]\nsede = [1]", "unknown key 'sede'; did you mean 'seed'"),
        ('[axes]\nseed = ["one"]', 'seed = "one" is not valid'),
        ("[base]\ntrain.stesp = 1\n[axes]\nseed = [1]", "unknown key 'train.stesp'"),
        ('[base]\nout = "x"\n[axes]\nseed = [1]', "out can't be given, since the study sets it for each run"),
        (
            '[axes]\n"seed, train.steps" = [[1]]',
            r"so each point must be a list of 2 values, got \[1\]",
        ),
        ('[axes]\n"inner.arguments.momentum" = [0.9]', r"varied as a whole: \"optimizer.arguments\" = \[\{ momentum = ..."),
        ('[axes]\nseed = [1]\n"seed, train.steps" = [[1, 2]]', "seed is on two axes"),
    ],
)
def test_what_can_not_be_a_study_is_refused_before_anything_runs(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read_study(study(tmp_path, text))


SUMMARY = {"heldout_loss": 2.0, "sent_bytes_per_replica": 1000, "tokens_per_s": 5.0, "wall_s": 1.0}


def test_a_failed_run_is_part_of_its_row_in_the_table() -> None:
    rows = [
        {"run": f"{h}{c}", "varied": {"sync.inner_steps": h, "sync.codec": c}, "status": "done", **SUMMARY}
        for h in (10, 100)
        for c in ("fp4", "int8")
    ]
    rows[3] = rows[3] | {"status": "failed", "error": "exit code 1: a | b"}
    assert "| 100 | int8 |  |  | 0, 1 failed: exit code 1: a / b |  |  |" in table(rows)
