"""A save that is killed, fails or is interrupted leaves earlier complete checkpoints and no partial files."""

import builtins
import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diloco.checkpoint import CheckpointWriter, list_checkpoints, open_checkpoint, save_checkpoint
from diloco.errors import CheckpointError
from tests.checkpoint.marked_checkpoints import kill_at_every_call, mark_of, names, save, tree
from tests.processes import Processes
from tests.same import same


def save_and_be_killed(rank: int, top: Path) -> None:
    save(top / "before", 1, 1.0)
    save(top / "before", 2, 2.0)
    for scenario, step in (("first", 3), ("next", 3), ("again", 2)):
        before = None if scenario == "first" else top / "before"
        every = 1 if scenario == "next" else 2
        kill_at_every_call(top / scenario, before, partial(save, step=step, mark=3.0, keep=1), every)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    with Processes() as processes:
        processes.start(1, save_and_be_killed, folder)
        processes.results(120)
    return folder


@pytest.mark.parametrize("scenario", ["first", "next", "again"])
def test_kill_9_at_any_system_call_leaves_the_last_complete_checkpoint(scenario: str, killed: Path) -> None:
    marks: list[float] = []
    folders = sorted((killed / scenario).iterdir())
    for folder in folders:
        complete = list_checkpoints(folder)
        for checkpoint in complete:
            mark_of(checkpoint.path)
        if complete:
            marks.append(mark_of(folder))
        else:
            assert scenario == "first"
            marks.append(0.0)
            with pytest.raises(CheckpointError, match=r"no complete checkpoint|does not exist"):
                open_checkpoint(folder)
        if scenario == "again":
            assert mark_of(folder / "step-00000002") == marks[-1]
    # a kill happens before or after the new one is complete; once it was after, every later kill is too
    assert marks == sorted(marks)
    assert set(marks) == {0.0 if scenario == "first" else 2.0, 3.0}
    assert len(marks) > (20 if scenario == "next" else 10)
    for folder in folders:
        save(folder, 4, 4.0, keep=1)
        assert names(folder) == {"step-00000004"}
        assert mark_of(folder) == 4.0


@pytest.mark.parametrize("step", [2, 3], ids=["again", "next"])
def test_an_error_at_any_system_call_leaves_what_was_complete_and_no_rest(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the k-th call on, for every k until the save succeeds."""
    calls, fail_from = 0, 0

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if fail_from and calls >= fail_from:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*arguments)

        return call

    for owner, name in ((os, "fsync"), (builtins, "open"), (os, "replace")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    marks, messages = [], []
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
        marks.append(mark_of(folder))
        assert not [name for name in names(folder) if name.endswith("partial")]
        assert mark_of(folder / "step-00000001") == 1.0
    assert all("No space left on device" in message for message in messages)
    assert len(marks) > 15
    assert marks == sorted(marks)
    assert marks[0] == 2.0
    assert mark_of(folder) == 3.0


@pytest.mark.parametrize(
    ("parts", "about", "words"),
    [
        ({"good": [], "bad": {"a": {"b": {1, 2}}}}, {}, "'a.b' in the state is a builtins.set"),
        ({"good": []}, {"loss": float("nan")}, "not JSON compliant"),
    ],
)
def test_a_state_that_cannot_be_saved_changes_nothing(parts: Any, about: Any, words: str, tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    with pytest.raises(CheckpointError, match=f"failed: .*{words}"):
        save_checkpoint(tmp_path, 2, parts, about=about, keep=1)
    assert names(tmp_path) == {"step-00000001"}
    assert mark_of(tmp_path) == 1.0


def test_an_interrupt_leaves_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 1.0)

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, 2.0)
    assert names(tmp_path) == {"step-00000001"}


def test_training_goes_on_while_the_state_of_its_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (goes_on.wait(), fsync(file)))
    writer, state = CheckpointWriter(), tree(2.0)
    writer.save(tmp_path, 2, {"state": state}, about={}, keep=1)
    assert writer.poll() is None
    state["weight"].fill_(3.0)
    goes_on.set()
    assert writer.poll(wait=True) == tmp_path / "step-00000002"
    assert writer.poll() is None, "each is reported once"
    assert same(open_checkpoint(tmp_path).load("state"), tree(2.0))


def test_a_run_that_fails_meanwhile_completes_what_is_being_written(tmp_path: Path) -> None:
    writer = CheckpointWriter()
    writer.save(tmp_path, 2, {"state": tree(2.0)}, about={}, keep=1)
    writer.close()
    assert same(open_checkpoint(tmp_path).load("state"), tree(2.0))
