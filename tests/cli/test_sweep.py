"""``diloco sweep``: concurrent runs, the table, and continuing a study."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.sweep.execute import run_all, sweep_lock
from diloco.sweep.study import read_study
from tests.cli.runs import SMALL


def test_a_study_is_run_and_goes_on_where_it_was_interrupted(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = SMALL.replace("[data]", f'[data]\npaths = ["{files / "text.txt"}"]')
    path = tmp_path / "study.toml"
    path.write_text(_nested(base) + "\n[axes]\nseed = [0]\nschedule.overlap_steps = [1, 9]\n")
    command = ["sweep", str(path), "--out", str(tmp_path / "out"), "--jobs", "2"]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "2 runs, 0 of them done; 2 at a time" in said
    outcomes = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert {outcome["varied"]["schedule.overlap_steps"]: outcome["status"] for outcome in outcomes} == {
        1: "done",
        9: "failed",
    }
    assert "exit code 2: " in (tmp_path / "out/table.md").read_text()
    assert main([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "2 runs, 1 of them done" in said
    assert "to do  seed=0_overlap_steps=9" in said


def test_a_run_of_ones_own_code_goes_on_with_the_names_in_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted run's folder does not choose the code."""
    started: list[list[str]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, words: list[str], **more: object) -> None:
            started.append(words)
            super().__init__(["true"])

    monkeypatch.setattr("diloco.sweep.execute.subprocess.Popen", Recorded)
    path = tmp_path / "study.toml"
    sinks = 'codec.name = "own.py:Codec"\nmonitor.sinks = ["own:One", "own:Two"]\nmerge.rule = "alpha"\n'
    path.write_text(f"[base]\n{sinks}[axes]\nseed = [0]\n")
    (run,) = read_study(path)
    (tmp_path / run.name / "checkpoints").mkdir(parents=True)
    (tmp_path / run.name / "checkpoints" / "latest").touch()
    list(run_all([run], tmp_path, 1))
    (words,) = started
    named = ["--codec.name", "own.py:Codec", "--monitor.sinks", "own:One", "own:Two"]
    assert words[-len(named) :] == named


def _nested(text: str) -> str:
    """Return the sections of a run's file as sections of [base]."""
    head, *sections = text.split("\n[")
    return "[base]\n" + head + "".join(f"\n[base.{section}" for section in sections)


def test_a_folder_is_one_sweeps_until_its_last_process_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs of a sweep that is killed keep running."""
    path = tmp_path / "study.toml"
    path.write_text("[axes]\nseed = [0]\n")
    command = ["sweep", str(path), "--out", str(tmp_path)]
    with sweep_lock(tmp_path) as inherited:
        left = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=inherited)
    assert main(command) == 2
    assert "another `diloco sweep`, or a run that it started, is still working in" in capsys.readouterr().err
    assert not (tmp_path / "results.jsonl").exists()
    left.communicate()
    with sweep_lock(tmp_path):
        pass
