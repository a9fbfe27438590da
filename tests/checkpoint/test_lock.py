"""One process writes to a folder. Its lock ends with it, however it ends."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.checkpoint import LOCK_FILE, lock_folder
from diloco.errors import ConfigurationError
from tests.processes import Processes, receive, report


def work_in(rank: int, folder: Path, child: str) -> None:
    """Lock the folder, start a child that gets the lock or not, report the process that would be left, and wait."""
    with lock_folder(folder) as lock:
        files = (lock,) if child == "shares" else ()
        waits = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=files)
        report((os.getpid(), waits.pid))
        receive()


def try_to_lock(folder: Path) -> str:
    try:
        with lock_folder(folder):
            return ""
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize(("child", "kept"), [("started", False), ("shares", True)])
def test_a_killed_process_leaves_no_lock_except_to_a_child_that_shares_it(
    child: str, kept: bool, tmp_path: Path
) -> None:
    with Processes() as processes:
        processes.start(1, work_in, tmp_path, child)
        pid, left = processes.next_report(0)
        refused = try_to_lock(tmp_path)
        for words in (str(tmp_path), f"process {pid} on {socket.gethostname()}, since 20", "Wait until it has ended"):
            assert words in refused
        os.kill(left, signal.SIGSTOP)  # it would end when its parent's pipe does
        processes.kill(0)
        assert (tmp_path / LOCK_FILE).exists(), "nobody has to delete it by hand"
        try:
            assert bool(try_to_lock(tmp_path)) == kept
        finally:
            os.kill(left, signal.SIGKILL)


def test_a_file_that_its_owner_deletes_meanwhile_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes would each have a lock: one of the deleted file and one of the next."""
    lock, calls = fcntl.flock, list[int]()

    def late(file: int, kind: int) -> None:
        if not calls:
            (tmp_path / LOCK_FILE).unlink()  # after it was opened, before it is locked
        calls.append(file)
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock_folder(tmp_path):
        assert len(calls) == 2
        assert "in use" in try_to_lock(tmp_path)
