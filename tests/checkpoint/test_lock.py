"""One process writes to a folder. Its lock ends with it, however it ends."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from diloco.checkpoint import LOCK_FILE, lock_folder, shared_lock
from diloco.errors import ConfigurationError
from tests.processes import Processes, receive, report

Child = Literal["none", "forked", "started", "shares"]


def work_in(rank: int, folder: Path, child: Child) -> None:
    """Lock the folder, start a child, report the process that would be left, and wait."""
    waits = [sys.executable, "-c", "input()"]
    with lock_folder(folder) as lock:
        if child == "none":
            report(os.getpid())
        elif child == "forked":
            if (pid := os.fork()) == 0:
                signal.pause()
            report(pid)
        else:
            with shared_lock(lock if child == "shares" else None) as (files, variables):
                environment = os.environ | variables
                report(subprocess.Popen(waits, stdin=subprocess.PIPE, pass_fds=files, env=environment).pid)
        receive()


def try_to_lock(folder: Path) -> str:
    try:
        with lock_folder(folder):
            return ""
    except ConfigurationError as error:
        return str(error)


def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(1, work_in, tmp_path, "none")
        pid = processes.next_report(0)
        refused = try_to_lock(tmp_path)
        for words in (str(tmp_path), f"process {pid} on {socket.gethostname()}, since 20", "Wait until it has ended"):
            assert words in refused
        processes.send(0, "end")
        processes.results()
    assert try_to_lock(tmp_path) == ""


@pytest.mark.parametrize(("child", "kept"), [("none", False), ("forked", False), ("started", False), ("shares", True)])
def test_a_killed_process_leaves_no_lock_except_to_a_child_that_shares_it(
    child: Child, kept: bool, tmp_path: Path
) -> None:
    with Processes() as processes:
        processes.start(1, work_in, tmp_path, child)
        left = processes.next_report(0)
        if child == "shares":
            os.kill(left, signal.SIGSTOP)  # it would end when its parent's pipe does
        processes.kill(0)
        assert (tmp_path / LOCK_FILE).exists(), "nobody has to delete it by hand"
        try:
            assert bool(try_to_lock(tmp_path)) == kept
        finally:
            if child != "none":
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
