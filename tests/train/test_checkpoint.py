"""A checkpoint is complete or absent, whatever kills a save or makes it fail."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.errors import CheckpointError
from diloco.train import tensor_file
from diloco.train.checkpoint import list_checkpoints, open_checkpoint, save_checkpoint
from diloco.train.checkpoint_folder import hidden_name
from tests.train.marked_checkpoints import mark_of, names, save, tree


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a loss of power would show the difference; what is asked of the disk, and when, has a test of its own."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_what_is_saved_is_what_is_loaded_and_it_says_what_it_holds(tmp_path: Path) -> None:
    place = save(tmp_path / "checkpoints", 1000, 7.0)
    assert place == tmp_path / "checkpoints" / "step-00001000"
    files = {"replica-0.json", "replica-0.safetensors", "replica-1.json", "replica-1.safetensors"}
    assert names(place) == files | {"run.json", "run.safetensors", "manifest.json"}
    checkpoint = open_checkpoint(place)
    assert (checkpoint.step, checkpoint.parts) == (1000, ("replica-0", "replica-1", "run"))
    assert checkpoint.about == {"algorithm": "streaming", "mark": 7.0}
    assert checkpoint.versions["torch"] == torch.__version__
    on_disk = sum(entry.stat().st_size for entry in place.iterdir() if entry.name != "manifest.json")
    assert checkpoint.size_bytes == on_disk
    assert mark_of(place) == 7.0
    assert checkpoint.load("replica-0", device="meta")["weight"].device.type == "meta"


def test_every_way_to_name_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, 1.0)
    save(folder, 2, 2.0)
    for path in (tmp_path, folder, folder / "latest", folder / "step-00000002"):
        assert mark_of(path) == 2.0
    assert mark_of(folder / "step-00000001") == 1.0
    (folder / "step-00000001").rename(tmp_path / "best")
    assert mark_of(tmp_path / "best") == 1.0


def test_only_the_last_ones_stay_in_the_order_of_saving(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, float(step), keep=2)
    assert names(tmp_path) == {"latest", "step-00000020", "step-00000030"}
    # a run that goes on from step 20 once more: step 30 is of the run given up, and the oldest
    save(tmp_path, 20, 20.5, keep=2)
    save(tmp_path, 25, 25.0, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000025"]
    assert [mark_of(path) for path in list_checkpoints(tmp_path)] == [20.5, 25.0]
    assert mark_of(tmp_path) == 25.0
    save(tmp_path, 5, 5.0, keep=1)
    assert names(tmp_path) == {"latest", "step-00000005"}


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    save(tmp_path, 1, 2.0)
    assert mark_of(tmp_path) == 2.0
    assert names(tmp_path) == {"latest", "step-00000001"}


def test_parts_are_taken_one_at_a_time(tmp_path: Path) -> None:
    taken: list[str] = []

    class OneByOne(Mapping[str, Any]):
        def __getitem__(self, part: str) -> Any:
            for before in taken:  # what was taken before is on the disk by now
                assert list(tmp_path.glob(f".step-00000000.*.partial/{before}.safetensors"))
            taken.append(part)
            return tree(1.0)

        def __iter__(self) -> Iterator[str]:
            return iter(["a", "b"])

        def __len__(self) -> int:
            return 2

    save_checkpoint(tmp_path, 0, OneByOne(), about={}, keep=1)
    assert taken == ["a", "b"]


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order: the files, the manifest last, their folder; the rename; the folder around it; ``latest``, likewise."""
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
    assert events[6:] == [
        sync(place / "manifest.json"),
        sync(place),
        "name step-00000003",
        sync(tmp_path),
        sync(tmp_path / "latest"),
        "name latest",
        sync(tmp_path),
    ]


# ---------------------------------------------------------------------------------------------------- kills

KILLER = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.train.marked_checkpoints import save

WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
os.fsync = lambda descriptor: None  # what a kill leaves is in the page cache, and that is what is looked at

def arm(kill_at):
    count = 0
    def tick():
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = lambda descriptor: tick()
    sys.addaudithook(lambda event, arguments: tick() if event in WATCHED else None)

before = Path(sys.argv[2]) / "before"
save(before, 1, 1.0)
save(before, 2, 2.0)
for scenario, step in (("first", 3), ("next", 3), ("again", 2)):
    for kill_at in range(1, 1000):
        folder = Path(sys.argv[2]) / scenario / f"{kill_at:03d}"
        if scenario != "first":
            shutil.copytree(before, folder)
        child = os.fork()
        if child == 0:
            arm(kill_at)
            save(folder, step, 3.0, keep=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, status
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
"""
"""Saves again and again, each time killed one system call later, until a save gets through; for three scenarios."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    arguments = [sys.executable, "-c", KILLER, str(Path(__file__).parents[2]), str(folder)]
    subprocess.run(arguments, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    return folder


@pytest.mark.parametrize("scenario", ["first", "next", "again"])
def test_kill_9_at_any_system_call_leaves_the_last_complete_checkpoint(scenario: str, killed: Path) -> None:
    marks: list[float] = []
    folders = [killed / scenario / f"{kill_at:03d}" for kill_at in range(1, 1 + len(names(killed / scenario)))]
    for folder in folders:
        complete = list_checkpoints(folder) if folder.exists() else []
        for path in complete:
            mark_of(path)
        if complete:
            marks.append(mark_of(folder))
            assert mark_of(folder / "latest") == marks[-1]
        else:
            assert scenario == "first"
            marks.append(0.0)
            with pytest.raises(CheckpointError, match=r"no complete checkpoint|is not there"):
                open_checkpoint(folder)
        if scenario == "again":
            assert mark_of(folder / "step-00000002") == marks[-1]
    # a kill comes before or after the new one is complete, and never again before once it was after
    assert marks == sorted(marks)
    assert set(marks) == {0.0 if scenario == "first" else 2.0, 3.0}
    assert len(marks) > 25
    for folder in folders:
        save(folder, 4, 4.0, keep=1)
        assert names(folder) == {"latest", "step-00000004"}
        assert mark_of(folder) == 4.0


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("step", [2, 3], ids=["again", "next"])
def test_an_error_at_any_system_call_leaves_what_was_complete_and_no_rest(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, from the k-th call on, for every k until the save gets through."""
    calls, fail_from = 0, 0

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if fail_from and calls >= fail_from:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(tensor_file, "open", failing(open), raising=False)
    monkeypatch.setattr(os, "replace", failing(os.replace))
    outcomes, messages = [], []
    for attempt in range(1, 100):
        folder = tmp_path / str(attempt)
        save(folder, 1, 1.0)
        save(folder, 2, 2.0)
        calls, fail_from = 0, attempt
        try:
            save(folder, step, 3.0)
        except CheckpointError as error:
            messages.append(str(error))
        else:
            break
        finally:
            fail_from = 0
        outcomes.append(mark_of(folder))
        assert not [name for name in names(folder) if name.endswith("partial")]
        assert mark_of(folder / "step-00000001") == 1.0
    assert all("No space left on device" in message for message in messages)
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes)
    assert outcomes[0] == 2.0
    assert mark_of(folder) == 3.0


def test_a_state_that_cannot_be_saved_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    for parts, about, what in (
        ({"good": [], "bad": {"a": {"b": {1, 2}}}}, {}, "Part 'bad': 'a.b' in the state is a builtins.set"),
        ({"good": []}, {"loss": float("nan")}, "hold what JSON can't"),
        ({"good": []}, {"path": tmp_path}, "hold what JSON can't"),
        ({"../bad": []}, {}, r"named '\.\./bad'; .* would work"),
        ({"manifest": []}, {}, "'manifest' is taken"),
        ({"Good": []}, {}, "named 'Good'"),
    ):
        with pytest.raises(CheckpointError, match=what):
            save_checkpoint(tmp_path, 2, parts, about=about, keep=1)
        assert names(tmp_path) == {"latest", "step-00000001"}
        assert mark_of(tmp_path) == 1.0


@pytest.mark.parametrize(("step", "keep"), [(-1, 1), (0, 0)])
def test_impossible_numbers_are_refused(step: int, keep: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"step={step} and keep={keep} were given"):
        save_checkpoint(tmp_path / "new", step, {}, about={}, keep=keep)
    assert not (tmp_path / "new").exists()


def test_an_interrupt_leaves_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 1.0)

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, 2.0)
    assert names(tmp_path) == {"latest", "step-00000001"}


def test_rests_of_dead_saves_go_and_other_files_stay(tmp_path: Path) -> None:
    place = save(tmp_path, 1, 1.0)
    for fate in ("partial", "deleted", "replaced"):
        shutil.copytree(place, hidden_name(place, fate))
    hidden_name(tmp_path / "latest", "partial").write_text("step-0")
    mine = {"notes.txt", ".step-00000001.mine", "step-1", "step-00000001.old"}
    for name in mine:
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    save(tmp_path, 2, 2.0)
    assert names(tmp_path) == mine | {"latest", "step-00000001", "step-00000002"}


def test_one_that_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 1.0)
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if target.suffix == ".deleted":
            raise PermissionError("in use")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"step-00000002 is saved, but .*step-00000001 can't be deleted: in use"):
        save(tmp_path, 2, 2.0, keep=1)
    assert mark_of(tmp_path) == 2.0
