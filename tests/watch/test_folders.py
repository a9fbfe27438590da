"""Runs in folders: existing records, records that are being written, and other files in a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.errors import ConfigurationError
from diloco.events import Event, to_record
from diloco.watch import FollowedFolder, flat_settings
from tests.monitor.made_events import started, step


def write(folder: Path, *events: Event) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(to_record(event)) + "\n" for event in events)


def test_what_is_written_later_is_read_later(tmp_path: Path) -> None:
    write(tmp_path, started(), step(1))
    followed = FollowedFolder(tmp_path)
    assert not followed.read()
    assert followed.run.history.first.step == 1
    write(tmp_path, step(2))
    followed.read()
    assert followed.run.history.first.step == 2
    assert followed.run.free_bytes is not None


def test_replicas_in_processes_of_their_own_are_one_run(tmp_path: Path) -> None:
    write(tmp_path, started(), step(1))
    followed = FollowedFolder(tmp_path)
    followed.read()
    assert list(followed.run.history.processes) == [""]
    write(tmp_path / "replica-10", started(), step(3))
    write(tmp_path / "replica-2", started(), step(2))
    followed.read()
    processes = followed.run.history.processes
    assert {name: process.step for name, process in processes.items()} == {
        "replica 0": 1,
        "replica 2": 2,
        "replica 10": 3,
    }


def test_a_replica_that_goes_back_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "replica-1"):
        write(folder, started(), *(step(number) for number in range(1, 6)))
    followed = FollowedFolder(tmp_path)
    followed.read()
    write(tmp_path / "replica-1", started(2), step(3))
    while followed.read():
        pass
    followed.read()
    processes = followed.run.history.processes
    assert {name: process.step for name, process in processes.items()} == {"replica 0": 5, "replica 1": 3}
    assert len(processes["replica 0"].steps) == 5


def test_damage_is_told(tmp_path: Path) -> None:
    write(tmp_path, started())
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"half\n')
    followed = FollowedFolder(tmp_path)
    followed.read()
    (words,) = followed.run.problems
    assert words.startswith("Line 2 of ")


def test_settings_are_flat_words(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('seed = 0\n[train]\nsteps = 9\nlong = "' + "x" * 999 + '"\n')
    assert flat_settings(path) == {"seed": "0", "train.steps": "9", "train.long": "x" * 200}
    path.write_text("seed = = 0")
    assert flat_settings(path) == {}


def test_what_is_no_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        FollowedFolder(tmp_path / "absent")
    with pytest.raises(ConfigurationError, match=r"neither metrics\.jsonl nor config\.toml"):
        FollowedFolder(tmp_path)
