"""`diloco` as a user types it, in processes of its own that do not take seconds to import torch."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.processes import Processes

__all__ = ["LIMIT_S", "Command"]

LIMIT_S = 300.0
"""Far more than any command of a test takes, for machines that are busy."""

T = TypeVar("T")


class Command:
    """One that runs, in a process group of its own.

    Args:
        processes: it becomes one of these, and ends with them.
        arguments: of `diloco`.
        said: file for what it says on its standard output and error output.
        module: another one to run in place of `diloco`.
    """

    def __init__(self, processes: Processes, arguments: Sequence[object], said: Path, module: str = "diloco") -> None:
        said.touch()
        self.processes, self.said = processes, said
        (self.rank,) = processes.start(1, run_module, module, [str(argument) for argument in arguments], said)
        self.pid = processes.pid(self.rank)
        """Of the process and of its group."""

    @property
    def words(self) -> str:
        """All that it has said so far."""
        return self.said.read_text()

    def until(self, look: Callable[[], T], what: str) -> T:
        """What ``look`` finds, as soon as that is anything; the command must still run then, or have said it."""
        until_s = time.monotonic() + LIMIT_S
        while True:
            runs = self.processes.is_running(self.rank)
            if found := look():
                return found
            assert runs, f"ended without {what}:\n{self.words}"
            assert time.monotonic() < until_s, f"no {what} in time:\n{self.words}"
            time.sleep(0.05)  # files of another program tell of nothing, and each look may read all of one

    def end(self, code: int = 0, limit_s: float = LIMIT_S) -> None:
        """Wait for it to end with ``code``."""
        assert self.wait(limit_s) == code, self.words

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code, when it has ended."""
        return self.processes.exit_code(self.rank, limit_s)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return None if self.processes.is_running(self.rank) else self.wait()


def run_module(rank: int, module: str, arguments: list[str], said: Path) -> None:
    """In the process: ``python -m module``."""
    os.setsid()
    with said.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
