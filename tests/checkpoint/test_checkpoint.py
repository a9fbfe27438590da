"""Saved state is loaded unchanged by every name of a checkpoint; which checkpoints are kept; when each is on disk."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from diloco.checkpoint import list_checkpoints, open_checkpoint
from tests.checkpoint.marked_checkpoints import mark_of, names, save


def test_what_is_saved_is_what_is_loaded_and_it_says_what_it_holds(tmp_path: Path) -> None:
    place = save(tmp_path / "checkpoints", 1000, 7.0)
    assert place == tmp_path / "checkpoints" / "step-00001000"
    files = {"replica-0.json", "replica-0.safetensors", "replica-1.json", "replica-1.safetensors"}
    assert names(place) == files | {"run.json", "run.safetensors", "manifest.json"}
    checkpoint = open_checkpoint(place)
    assert (checkpoint.step, [*checkpoint.parts]) == (1000, ["replica-0", "replica-1", "run"])
    assert checkpoint.about == {"algorithm": "streaming", "mark": 7.0}
    assert checkpoint.versions["torch"] == torch.__version__
    on_disk = sum(entry.stat().st_size for entry in place.iterdir() if entry.name != "manifest.json")
    assert checkpoint.size_bytes == on_disk
    assert mark_of(place) == 7.0


def test_every_way_to_name_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, 1.0)
    save(folder, 2, 2.0)
    for path in (tmp_path, folder, folder / "step-00000002"):
        assert mark_of(path) == 2.0
    assert mark_of(folder / "step-00000001") == 1.0
    (folder / "step-00000001").rename(tmp_path / "best")
    assert mark_of(tmp_path / "best") == 1.0


def test_only_the_last_ones_stay_in_the_order_of_saving(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, float(step), keep=2)
    assert names(tmp_path) == {"step-00000020", "step-00000030"}
    # a run that resumes from step 20 again: step 30 belongs to the abandoned run and is the oldest
    save(tmp_path, 20, 20.5, keep=2)
    save(tmp_path, 25, 25.0, keep=2)
    assert [checkpoint.path.name for checkpoint in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000025"]
    assert [mark_of(checkpoint.path) for checkpoint in list_checkpoints(tmp_path)] == [20.5, 25.0]
    assert mark_of(tmp_path) == 25.0
    save(tmp_path, 5, 5.0, keep=1)
    assert names(tmp_path) == {"step-00000005"}


def test_a_checkpoint_stays_until_a_newer_one_is_complete_on_all_replicas(tmp_path: Path) -> None:
    """Of the steps before the agreed one, others may still be writing the last."""
    for step, agreed in ((1, 0), (2, 0), (3, 2), (4, 4), (5, 5)):
        save(tmp_path, step, 0.0, keep=1, agreed=agreed)
        first = 1 if step < 4 else 2 if step == 4 else 3
        assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == list(range(first, step + 1))


def test_one_that_a_run_deletes_meanwhile_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, lstat = save(tmp_path, 1, 1.0), Path.lstat
    save(tmp_path, 2, 2.0)

    def late(path: Path) -> os.stat_result:
        if path.parent == old and old.exists():
            shutil.rmtree(old)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", late)
    assert open_checkpoint(tmp_path).step == 2
    assert not old.exists()


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order: the files, the manifest, their folder, the rename, the parent folder."""
    events: list[str] = []
    place, replace = tmp_path / "step-00000003", os.replace

    def synced(descriptor: int) -> None:
        events.append(f"sync {os.fstat(descriptor).st_ino}")

    def replaced(source: Path, target: Path) -> None:
        events.append(f"name {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    save(tmp_path, 3, 3.0)

    def sync(path: Path) -> str:
        return f"sync {path.stat().st_ino}"

    assert set(events[:6]) == {sync(entry) for entry in place.iterdir()} - {sync(place / "manifest.json")}
    assert events[6:] == [sync(place / "manifest.json"), sync(place), "name step-00000003", sync(tmp_path)]
