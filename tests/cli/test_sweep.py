"""``diloco sweep``: runs side by side, a table, and going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.cli import main
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
    assert "2 runs, 0 of them done; 2 side by side" in said
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


def _nested(text: str) -> str:
    """The sections of a run's file as sections of [base]."""
    head, *sections = text.split("\n[")
    return "[base]\n" + head + "".join(f"\n[base.{section}" for section in sections)
