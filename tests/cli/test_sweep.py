"""``diloco sweep``: a row belongs to the settings and files that it was run with, and a study is continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.checkpoint import lock_folder, shared_lock
from diloco.cli import main
from diloco.sweep import places, read_study, run_all, study
from tests.cli.runs import SMALL, refused

POPEN = subprocess.Popen


class Sweeps:
    """Sweeps of one folder whose runs take place in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[list[str]] = []  # the arguments of `diloco` of each run that was started
        self.environments: list[Mapping[str, str]] = []
        self.interrupts = False  # whether a run is stopped after step 4 of 8
        self.meanwhile: Callable[[], object] = lambda: None  # called while a run takes place

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        if list(command[1:3]) != ["-m", "diloco"]:
            return POPEN(command, **how)
        self.commands.append([*command[3:], *(["--stop-after", "4"] if self.interrupts else [])])
        self.environments.append(how["env"])
        code = main(self.commands[-1])
        self.meanwhile()
        return POPEN(["sh", "-c", f"exit {130 if self.interrupts else code}"])

    def write(self, changes: Mapping[str, str]) -> Path:
        text = "[base]\n" + SMALL.replace("\n[", "\n[base.") + "[axes]\nseed = [0]\n"
        text = text.replace("[base.data]", f'[base.data]\npaths = ["{self.folder / "text.txt"}"]')
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path = self.folder / "study.toml"
        path.write_text(text)
        return path

    def sweep(self, changes: Mapping[str, str] | None = None, out: str = "out") -> list[dict[str, Any]]:
        """Run the study with some of its text changed, and return the rows of the file of results."""
        main(["sweep", str(self.write(changes or {})), "--out", str(self.folder / out)])
        return [json.loads(line) for line in (self.folder / out / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def sweeps(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    (tmp_path / "text.txt").write_bytes((files / "text.txt").read_bytes())
    made = Sweeps(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", type("Popen", (), {
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__new__": lambda cls, command, **how: made.start(command, **how),
    }))  # fmt: skip
    return made


def change_data(sweeps: Sweeps) -> Mapping[str, str]:
    text = (sweeps.folder / "text.txt").read_text()
    (sweeps.folder / "text.txt").write_text(text.replace("abc", "xyz"))  # as long as before
    return {}


CHANGES: dict[str, Callable[[Sweeps], Mapping[str, str]]] = {
    "a setting of [base]": lambda _: {"[base.schedule]": "[base.inner]\nlearning_rate = 0.5\n[base.schedule]"},
    "the preset": lambda _: {"algorithm =": 'preset = "tiny-muon"\nalgorithm ='},
    "the content of a file": change_data,
    "the values of an axis": lambda _: {"seed = [0]": "seed = [1]"},
}


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_a_row_is_of_the_settings_and_files_of_its_run(what: str, interrupted: bool, sweeps: Sweeps) -> None:
    """The folder of a run with other settings or other data is not continued."""
    sweeps.interrupts = interrupted
    sweeps.sweep()
    sweeps.interrupts = False
    changes = CHANGES[what](sweeps)
    row, fresh = sweeps.sweep(changes)[-1], sweeps.sweep(changes, "fresh")[-1]
    assert row["status"] == "done"
    assert row["global_params_digest"] == fresh["global_params_digest"]
    assert "--resume" not in sweeps.commands[1]
    started = len(sweeps.commands)
    assert sweeps.sweep(changes)[-1] == row
    assert len(sweeps.commands) == started, "a run that is done is not repeated"


def test_an_interrupted_run_resumes_and_ends_as_if_it_had_not_been(sweeps: Sweeps) -> None:
    sweeps.interrupts = True
    assert [row["status"] for row in sweeps.sweep()] == ["failed"]
    sweeps.interrupts = False
    (row,), (fresh,) = sweeps.sweep(), sweeps.sweep(out="fresh")
    assert "--resume" in sweeps.commands[1]
    assert row["global_params_digest"] == fresh["global_params_digest"]


def test_another_version_is_another_run(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps.sweep()
    monkeypatch.setattr(study, "__version__", "99")
    assert len(sweeps.sweep()) == 2


def test_a_folder_that_somebody_continued_with_other_settings_is_not_resumed(sweeps: Sweeps) -> None:
    sweeps.interrupts = True
    sweeps.sweep()
    sweeps.interrupts = False
    (home,) = (path for path in (sweeps.folder / "out" / "runs").iterdir() if path.is_dir())
    assert main(["train", "--resume", str(home), "--steps", "9"]) == 0
    with lock_folder(home):
        (row,) = sweeps.sweep()
        assert (row["status"], row["error"][: len(str(home))]) == ("failed", str(home)), "somebody trains there"
    (row,) = sweeps.sweep()
    assert (row["status"], row["steps"]) == ("done", 8)
    (kept,) = home.parent.glob(f"{home.name}.*[0-9]")
    assert json.loads((kept / "summary.json").read_text())["steps"] == 9


def test_a_file_that_changes_during_a_run_makes_it_fail(sweeps: Sweeps) -> None:
    sweeps.meanwhile = lambda: change_data(sweeps)
    (row,) = sweeps.sweep()
    assert row["status"] == "failed"
    assert "a file that its settings name was changed while it ran" in row["error"]


REWORDED: dict[str, Mapping[str, str]] = {
    "another order": {"batch_size = 1\nsequence_length = 16": "sequence_length = 16\nbatch_size = 1"},
    "a default": {"[base.data]": "[base.data]\nskip_bad = false"},
    "another axis": {"batch_size = 1\n": "", "seed = [0]": '"train.batch_size" = [1]'},
}


@pytest.mark.parametrize("how", REWORDED)
def test_the_same_settings_in_other_words_are_the_same_run(
    how: str, sweeps: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = sweeps.sweep()
    assert sweeps.sweep(REWORDED[how]) == [row]
    assert len(sweeps.commands) == 1
    assert ("| train.batch_size |" in capsys.readouterr().out) == (how == "another axis")


def test_a_line_that_is_no_outcome_is_refused(sweeps: Sweeps, capsys: pytest.CaptureFixture[str]) -> None:
    sweeps.sweep()
    results = sweeps.folder / "out" / "results.jsonl"
    results.write_text(results.read_text().replace('"identity"', '"id"'))
    capsys.readouterr()
    again = ["sweep", str(sweeps.write({})), "--out", str(sweeps.folder / "out")]
    assert "line 1 of" in (said := refused(again, capsys))
    assert "Delete the line, and its run is run again" in said
    results.write_text("")
    assert main(again) == 0
    assert "--resume" in sweeps.commands[-1], "the run is already in its folder"


def test_a_failed_run_is_a_row_and_is_retried(sweeps: Sweeps, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"seed = [0]": "seed = [0]\nschedule.overlap_steps = [1, 9]"}
    for _ in range(2):
        rows = {row["varied"]["sync.overlap_steps"]: row["status"] for row in sweeps.sweep(changes)}
        assert rows == {1: "done", 9: "failed"}
    assert len(sweeps.commands) == 3
    assert "exit code 2" in (sweeps.folder / "out" / "table.md").read_text()
    capsys.readouterr()
    assert main(["sweep", str(sweeps.write(changes)), "--out", str(sweeps.folder / "out"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "2 runs, 1 of them done" in said
    assert "to do  seed=0_overlap_steps=9" in said


def test_a_run_of_ones_own_code_is_resumed_with_the_names_in_the_study(sweeps: Sweeps) -> None:
    """The interrupted run's folder does not choose the code; a change of the code makes another run."""
    own = sweeps.folder / "own.py"
    own.write_text("class Quiet:\n    def __init__(self, folder): ...\n    handle = close = print\n")
    changes = {"[base.monitor]": f'[base.monitor]\nsinks = ["{own}:Quiet"]'}
    sweeps.interrupts = True
    sweeps.sweep(changes)
    sweeps.interrupts = False
    assert [row["status"] for row in sweeps.sweep(changes)] == ["done"]
    assert sweeps.commands[1][-2:] == ["--monitor.sinks", f"{own}:Quiet"]
    own.write_text(own.read_text() + "# changed\n")
    assert len(sweeps.sweep(changes)) == 2


@pytest.mark.parametrize(
    ("device", "visible", "jobs", "wanted"),
    [
        ("auto", None, None, ["0", "1"]),
        ("cuda", "5, GPU-8", None, ["5", "GPU-8"]),
        ("cuda", "3", None, ["3"]),
        ("cuda", None, 3, ["0", "1", "0"]),
        ("cuda:1", None, None, [None]),
        ("cpu", None, 3, [None] * 3),
    ],
)
def test_each_gpu_has_one_run(
    device: str, visible: str | None, jobs: int | None, wanted: list[str | None], sweeps: Sweeps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    count = 2 if visible is None else len(visible.split(","))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    runs = read_study(sweeps.write({'device = "cpu"': f'device = "{device}"'}))
    assert places(runs, jobs) == wanted


def test_a_run_of_several_processes_has_the_cores_for_itself(sweeps: Sweeps) -> None:
    study_file = sweeps.write({"seed = [0]": 'seed = [0]\ntransport.name = ["in-process", "torch"]'})
    assert places(read_study(study_file), None) == [None]


def test_ctrl_c_reaches_a_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to its process group. A second one would end the run before it has saved its state."""
    started: list[subprocess.Popen[bytes]] = []

    class Waiting(subprocess.Popen[bytes]):
        def __init__(self, command: Sequence[str], **how: Any) -> None:
            super().__init__(["sleep", "60"], **how)
            started.append(self)

    (tmp_path / "study.toml").write_text("[axes]\nseed = [0]\n")
    runs = read_study(tmp_path / "study.toml")
    monkeypatch.setattr(subprocess, "Popen", Waiting)
    running = run_all(runs, tmp_path, [None])
    next(running)
    assert os.getpgid(started[0].pid) != os.getpgrp()
    running.close()  # type: ignore[attr-defined]
    assert started[0].returncode == -signal.SIGINT


def test_a_run_sees_the_gpu_of_its_place(sweeps: Sweeps) -> None:
    runs = read_study(sweeps.write({"seed = [0]": "seed = [0, 1, 2]"}))
    (sweeps.folder / "runs").mkdir()
    for _ in run_all(runs, sweeps.folder / "runs", ["4", "GPU-8"]):
        pass
    seen = [each["CUDA_VISIBLE_DEVICES"] for each in sweeps.environments]
    assert seen[:2] == ["4", "GPU-8"]
    assert len(seen) == 3


def test_a_folder_is_one_sweeps_until_its_last_process_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs of a sweep that is killed keep running."""
    path = tmp_path / "study.toml"
    path.write_text("[axes]\nseed = [0]\n")
    with lock_folder(tmp_path) as lock, shared_lock(lock) as (files, _):
        left = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=files)
        assert f"{tmp_path} is in use by process" in refused(["sweep", str(path), "--out", str(tmp_path)], capsys)
        assert not (tmp_path / "results.jsonl").exists()
        left.communicate()
