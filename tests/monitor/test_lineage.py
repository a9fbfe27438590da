"""Signed lines of who contributed what, and what is found if one is changed."""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import main
from diloco.errors import ConfigurationError, DataError
from diloco.monitor import MonitorSettings, make_sinks, verify_lineage
from tests.monitor.made_events import committed, started
from tests.runs import SMALL, write_text


def told(folder: Path, replica: int, rounds: int = 3, *, key: str = "d", start: int = 0, **change: Any) -> None:
    """Let the process of a replica tell of its rounds."""
    sink = make_sinks(MonitorSettings(console="quiet", sinks=("lineage",)), folder, is_terminal=False)
    sink.handle(started(start))
    for number in range(start // 10, start // 10 + rounds):
        fields = {"weight": 1.5 - replica, "digest": f"{key}{number}", "view": 1, "total_weight": 2.0, **change}
        event = committed(replica, 0, number, step=10 * number + 10)
        sink.handle(dataclasses.replace(event, **fields))
    sink.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    told(tmp_path, 0)
    told(tmp_path / "replica-1", 1)
    return tmp_path


def test_contributions_are_rebuilt_from_the_files_alone(run: Path) -> None:
    table, problems = verify_lineage(run)
    assert [line.split()[::2] for line in table.splitlines()[1:]] == [["0", "3", "%"], ["1", "3", "%"]]
    assert "75.00 %" in table
    assert problems == []
    assert (run / "lineage.key").stat().st_mode & 0o777 == 0o600


def test_replicas_whose_files_are_elsewhere_have_the_rest_of_the_weight(tmp_path: Path) -> None:
    told(tmp_path, 0)
    table, problems = verify_lineage(tmp_path)
    assert [line.split()[-2:] for line in table.splitlines()[1:]] == [["75.00", "%"], ["25.00", "%"]]
    assert problems == []


def test_a_resumption_supersedes_what_followed_its_step(run: Path) -> None:
    for folder, replica in ((run, 0), (run / "replica-1", 1)):
        with (folder / "lineage.jsonl").open("ab") as file:
            file.write(b'{"entry": {"vi')  # it was killed while it wrote
        told(folder, replica, start=10, key="e")
    table, problems = verify_lineage(run)
    assert "of 4 rounds" in table
    assert problems == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b'"weight":1.5', b'"weight":9.5'), *lines[3:]], 3),
        (lambda lines: [*lines[:2], *lines[3:]], 3),
        (lambda lines: lines[1:], 1),
        (lambda lines: [*lines[:2], b"{}", *lines[2:]], 3),
        (lambda lines: [*lines[:2], b"[" * 99_999, *lines[2:]], 3),
    ],
    ids=["changed", "left out", "cut off", "inserted", "nested"],
)
def test_a_file_that_was_changed_is_refused(run: Path, change: Callable[[list[bytes]], list[bytes]], line: int) -> None:
    path = run / "lineage.jsonl"
    path.write_bytes(b"\n".join(change(path.read_bytes().split(b"\n"))))
    with pytest.raises(DataError, match=rf"line {line}: .* is not what its process has written"):
        verify_lineage(run)


def test_replicas_that_say_different_things_are_named(run: Path) -> None:
    told(run / "replica-1", 1, start=10, rounds=1, key="x")
    assert verify_lineage(run)[1] == ["Fragment 0, outer step 1: the replicas differ about the digest."]
    told(run, 0, start=10, rounds=1, key="x", total_weight=3.0)
    assert "the replicas differ about the total_weight" in verify_lineage(run)[1][0]
    told(run / "replica-1", 1, start=10, rounds=1, key="x", total_weight=3.0)
    assert "the weights are [1.5, 0.5], but the mean was divided by 3.0" in verify_lineage(run)[1][0]


@pytest.mark.parametrize("change", [{"weight": math.nan}, {"total_weight": 0.0}, {"contributors": ([1], 0)}], ids=str)
def test_what_a_stranger_has_signed_must_be_a_round(run: Path, change: dict[str, Any]) -> None:
    told(run / "replica-1", 1, start=10, rounds=1, **change)
    with pytest.raises(DataError, match=rf"replica-1.*line 6: .*{next(iter(change))}"):
        verify_lineage(run)


def test_a_run_that_goes_on_without_its_key_begins_a_file(run: Path) -> None:
    """A mirror has the file and not the key, so the run that resumes from it on another machine has another one."""
    (run / "lineage.key").unlink()
    told(run, 0, start=30, rounds=1)
    table, problems = verify_lineage(run)
    assert problems == []
    assert "of 4 rounds" in table
    (before,) = run.glob("lineage-*.jsonl")
    assert before.read_bytes().count(b"\n") == 4


@pytest.mark.skipif(os.name == "nt", reason="Windows has no FIFO")
def test_a_file_that_is_none_is_refused(run: Path) -> None:
    (run / "lineage.jsonl").unlink()
    os.mkfifo(run / "lineage.jsonl")
    with pytest.raises(DataError, match="it is not a regular file"):
        verify_lineage(run)


def test_a_run_is_verified_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, data = tmp_path / "run", str(write_text(tmp_path))
    words = [*SMALL.split(), data, "--replicas", "3", "--steps", "20", "--inner-steps", "5", "--sinks", "lineage"]
    assert main(["train", *words, "--out", str(out), "--monitor.console", "quiet"]) == 0
    assert main(["status", str(out), "--verify"]) == 0
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()[1:]] == ["33.33"] * 3
    lines = [json.loads(line)["entry"] for line in (out / "lineage.jsonl").read_bytes().splitlines()]
    assert {line["weight"] for line in lines[1:]} == {1.0}
    assert all(line["digest"] for line in lines[1:])
    assert main(["status", str(tmp_path), "--verify"]) == 1
    assert "has no lineage.jsonl" in capsys.readouterr().err


def test_a_start_leaves_what_is_there_on_disk(run: Path) -> None:
    """It is lost otherwise if the process is killed before its first round, or if the disk is full."""
    path = run / "lineage.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"entry": {"vi')
    sink = make_sinks(MonitorSettings(console="quiet", sinks=("lineage",)), run, is_terminal=False)
    assert path.read_bytes() == before
    sink.close()


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_rounds_that_were_cut_off_at_the_end_are_named(run: Path, kept: int) -> None:
    """Cut at the end of a line, the file is what a killed process leaves. No other replica's file is."""
    path = run / "replica-1" / "lineage.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
    table, problems = verify_lineage(run)
    lost = min(3, 4 - kept)
    words = f"Replica 1 gave to rounds that its file lacks, {lost} in all, the first fragment 0, outer step {3 - lost}."
    assert words in table
    assert "Replica 0" not in table
    assert problems == []


def test_rounds_before_a_replica_came_are_not_missing_in_its_file(run: Path) -> None:
    for name in ("lineage.jsonl", "lineage.key"):
        (run / "replica-1" / name).unlink()
    told(run / "replica-1", 1, start=20, rounds=1)
    assert "lacks" not in verify_lineage(run)[0]


def test_a_stranger_signs_a_start_that_is_no_step(tmp_path: Path) -> None:
    sink = make_sinks(MonitorSettings(console="quiet", sinks=("lineage",)), tmp_path, is_terminal=False)
    sink.handle(started("x"))  # type: ignore[arg-type]  # on purpose
    sink.close()
    with pytest.raises(DataError, match="line 1: Expected `int`, got `str`"):
        verify_lineage(tmp_path)


def test_a_key_that_is_cut_is_refused(run: Path) -> None:
    """Regression: what a process left that was killed at its first start ended every later one with a traceback."""
    (run / "lineage.key").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"lineage.key is damaged. Delete it"):
        told(run, 0, start=30)
