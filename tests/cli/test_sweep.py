"""``diloco sweep``: a row belongs to the settings and files that it was run with, and a study is continued."""

import json
import math
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity.__main__ import Variant, main_row
from benchmarks.parity.stacked import lines
from diloco.checkpoint import lock_folder
from diloco.cli import main
from diloco.config import flatten
from diloco.errors import ConfigurationError
from diloco.events import json_ready
from diloco.sweep import places, read_study, run_all, table
from tests.cli.runs import SMALL

POPEN = subprocess.Popen


class Sweeps:
    """Sweeps of one folder whose runs take place in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[list[str]] = []  # the arguments of `diloco` of each run that was started
        self.interrupts = False  # whether a run is stopped after step 4 of 8
        self.meanwhile: Callable[[], object] = lambda: None  # called while a run takes place

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        if list(command[1:3]) != ["-m", "diloco"]:
            return POPEN(command, **how)
        self.commands.append([*command[3:], *(["--stop-after", "4"] if self.interrupts else [])])
        code = main(self.commands[-1])
        self.meanwhile()
        return POPEN(["sh", "-c", f"exit {130 if self.interrupts else code}"])

    def write(self, changes: Mapping[str, str]) -> Path:
        text = "[base]\n" + SMALL.replace("\n[", "\n[base.") + "[axes]\nseed = [0]\n"
        text = text.replace("[base.data]", f'[base.data]\npaths = ["{self.folder / "text.jsonl"}"]')
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
    (tmp_path / "text.jsonl").write_bytes((files / "text.jsonl").read_bytes())
    study = Sweeps(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", type("Popen", (), {
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__new__": lambda cls, command, **how: study.start(command, **how),
    }))  # fmt: skip
    return study


def change_data(sweeps: Sweeps) -> Mapping[str, str]:
    text = (sweeps.folder / "text.jsonl").read_text()
    (sweeps.folder / "text.jsonl").write_text(text.replace("abc", "xyz"))  # as long as before
    return {}


CHANGES: dict[str, Callable[[Sweeps], Mapping[str, str]]] = {
    "nothing": lambda _: {},
    "a setting of [base]": lambda _: {"[base.sync]": "[base.optimizer]\nlearning_rate = 0.5\n[base.sync]"},
    "the content of a file": change_data,
}


@pytest.mark.parametrize("what", CHANGES)
def test_row_is_of_the_settings_and_files_of_its_run(what: str, sweeps: Sweeps) -> None:
    """Also after a run that was interrupted, which resumes if nothing has changed."""
    sweeps.interrupts = True
    assert [row["error"] != "" for row in sweeps.sweep()] == [True]
    sweeps.interrupts = False
    changes = CHANGES[what](sweeps)
    row = sweeps.sweep(changes)[-1]
    assert row["error"] == ""
    if resumed := "--resume" in sweeps.commands[1]:
        assert row["global_params_digest"] == sweeps.sweep(changes, "fresh")[-1]["global_params_digest"]
    assert resumed == (what == "nothing")
    started = len(sweeps.commands)
    assert sweeps.sweep(changes)[-1] == row
    assert len(sweeps.commands) == started, "a run that is done was repeated"


def test_folder_continued_with_other_settings_is_not_resumed(sweeps: Sweeps) -> None:
    sweeps.interrupts = True
    sweeps.sweep()
    sweeps.interrupts = False
    (home,) = (path for path in (sweeps.folder / "out" / "runs").iterdir() if path.is_dir())
    assert main(["train", "--resume", str(home), "--steps", "9"]) == 0
    with lock_folder(home):
        (row,) = sweeps.sweep()
        assert row["error"].startswith(str(home)), "somebody trains there"
    (row,) = sweeps.sweep()
    assert (row["error"], row["steps"]) == ("", 8)
    (kept,) = home.parent.glob(f"{home.name}.*[0-9]")
    assert json.loads((kept / "summary.json").read_text())["steps"] == 9


def test_file_that_changes_during_a_run_makes_it_fail(sweeps: Sweeps) -> None:
    sweeps.meanwhile = lambda: change_data(sweeps)
    assert "a file that its settings name was changed while it ran" in sweeps.sweep()[0]["error"]


def test_failed_run_is_a_row_and_is_retried(sweeps: Sweeps, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"heldout_fraction = 0.3\n": "", "seed = [0]": "seed = [0]\ndata.heldout_fraction = [0.3, 0.999999]"}
    for _ in range(2):
        rows = {row["varied"]["data.heldout_fraction"]: row["error"] for row in sweeps.sweep(changes)}
        assert rows[0.3] == ""
        assert rows[0.999999].startswith("exit code 1: ")
    assert len(sweeps.commands) == 3
    capsys.readouterr()
    assert main(["sweep", str(sweeps.write(changes)), "--out", str(sweeps.folder / "out"), "--dry-run"]) == 0
    assert "2 runs, 1 of them done" in (said := capsys.readouterr().out)
    assert "to do  seed=0_heldout_fraction=0.999999" in said


def test_run_of_own_code_resumes_and_a_change_of_the_code_is_another_run(sweeps: Sweeps) -> None:
    own = sweeps.folder / "own.py"
    own.write_text("class Quiet:\n    def __init__(self, folder): ...\n    handle = close = print\n")
    changes = {"[base.monitor]": f'[base.monitor]\nsinks = ["{own}:Quiet"]'}
    sweeps.interrupts = True
    sweeps.sweep(changes)
    sweeps.interrupts = False
    assert [row["error"] for row in sweeps.sweep(changes)] == [""]
    assert sweeps.commands[1][-2:] == ["--monitor.sinks", f"{own}:Quiet"]
    own.write_text(own.read_text() + "# changed\n")
    sweeps.sweep(changes)
    assert len(sweeps.commands) == 3


@pytest.mark.parametrize(("visible", "jobs", "wanted"), [
    (None, None, ["0", "1"]), ("5, GPU-8", None, ["5", "GPU-8"]), ("3", None, ["3"]), (None, 3, ["0", "1", "0"]),
])  # fmt: skip
def test_each_gpu_has_one_run(visible: str | None, jobs: int | None, wanted: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert places(jobs) == [{"CUDA_VISIBLE_DEVICES": name} for name in wanted]


def test_ctrl_c_reaches_a_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to its process group. A second one would end the run before it has saved its state."""
    started: list[tuple[subprocess.Popen[bytes], Mapping[str, str]]] = []

    class Waiting(subprocess.Popen[bytes]):
        def __init__(self, command: Sequence[str], **how: Any) -> None:
            super().__init__(["sleep", "60"], **how)
            started.append((self, how["env"]))

    (tmp_path / "study.toml").write_text("[axes]\nseed = [0]\n")
    monkeypatch.setattr(subprocess, "Popen", Waiting)
    running = run_all(read_study(tmp_path / "study.toml"), tmp_path, [{"CUDA_VISIBLE_DEVICES": "GPU-8"}])
    next(running)
    ((process, environment),) = started
    assert os.getpgid(process.pid) != os.getpgrp()
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-8"
    running.close()  # type: ignore[attr-defined]  # a generator
    assert process.returncode == -signal.SIGINT


def test_runs_are_all_combinations_and_each_is_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text('[base]\nseed = 3\nsync.codec = "int8"\n[axes]\n"train.steps, sync.overlap_steps" = '
                    '[[10, 1], [30, 3]]\nsync.codec = ["fp4", "float32"]\n')  # fmt: skip
    runs = read_study(path)
    assert [run.name for run in runs] == [
        f"steps={steps}_overlap_steps={overlap}_codec={codec}"
        for steps, overlap in ((10, 1), (30, 3)) for codec in ("fp4", "float32")
    ]  # fmt: skip
    for run in runs:
        assert {"seed": 3, **run.varied}.items() <= flatten(run.plan.configuration).items()
    folders = {run.folder() for run in runs}
    assert len(folders) == 4
    path.write_text(path.read_text().replace("seed = 3", "seed = 4"))
    assert not folders & {run.folder() for run in read_study(path)}, "runs of other settings share folders"


@pytest.mark.parametrize(("text", "words"), [
    ("[bases]\nseed = 1", r"must have a table \[axes\].*got \[bases\]"),
    ("axes = 3", r"must have a table \[axes\].*got axes"),
    ("base = 3\n[axes]\nseed = [1]", r"must have a table .*got base, \[axes\]"),
    ("[axes]\nseed = 1", "seed must be a list of different values, got 1"),
    ("[axes]\nseed = [1, 1]", "seed=1 and seed=1 are the same run"),
    ('[axes]\nnetwork.silence = ["60s", "1min"]', "silence=60s and silence=1min are the same run"),
    ("[axes]\nsync.overlap_steps = [1, 90]", "overlap_steps=90: overlap_steps with inner_steps=10 must be"),
    ("[axes]\nsede = [1]", "unknown key 'sede'; did you mean 'seed'"),
    ('[base]\nout = "x"\n[axes]\nseed = [1]', "out can't be given: each run needs its own"),
    ('[axes]\n"seed, train.steps" = [[1]]', r"must have 2 values, got \[1\]"),
    ('[axes]\nseed = [1]\n"seed, train.steps" = [[1, 2]]', "seed is on two axes"),
])  # fmt: skip
def test_study_that_can_not_be_run_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        read_study(tmp_path / "study.toml")


def test_an_error_belongs_to_its_run_and_not_to_another_of_the_same_name(sweeps: Sweeps) -> None:
    """Names have no characters that a folder may not have."""
    (sweeps.folder / "a b.jsonl").write_bytes((sweeps.folder / "text.jsonl").read_bytes())
    (sweeps.folder / "a,b.jsonl").write_text('{"text": "short"}\n')
    places = [[str(sweeps.folder / name)] for name in ("a b.jsonl", "a,b.jsonl")]
    changes = {f'paths = ["{sweeps.folder / "text.jsonl"}"]\n': "", "seed = [0]": f"data.paths = {json.dumps(places)}"}
    rows = sweeps.sweep(changes)
    assert [row["error"] == "" for row in rows] == [True, False]
    assert rows[0]["run"] == rows[1]["run"]


def test_a_run_that_has_diverged_has_the_highest_loss() -> None:
    rows = [{"varied": {"seed": n}, "error": "", "heldout_loss": loss} for n, loss in enumerate((math.nan, 2.0))]
    assert table([json_ready(row) for row in rows]).splitlines()[-1] == "| nan | 2.0000, nan | 2 |  |"


def test_the_tables_of_parity_say_that_a_run_diverged() -> None:
    rows: list[dict[str, Any]] = [
        {"heldout_loss": loss, "seed": seed, "wall_s": 60, "sent_bytes_per_replica": 0, "shared_start_steps": 0}
        for seed, loss in enumerate((2.0, "NaN", 2.0))
    ]
    cells = main_row(Variant("int8", ""), dict(enumerate(rows)), {0: 2.0, 1: 1.0, 2: math.inf})
    assert cells[1:4] == ["diverged", "diverged", "+0.00 % / diverged / the other diverged"]
    (cells,) = lines(
        [{"heldout_loss": loss, "means": [loss] * 3, "seed": seed} for seed, loss in ((0, 2.0), (1, math.nan))]
    )
    assert cells == ["", "2.0000, diverged", "diverged", "", "diverged"]
