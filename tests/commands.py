"""`diloco` as a user types it, in processes of its own that do not take seconds to import torch."""

from __future__ import annotations

import os
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
    """

    def __init__(self, processes: Processes, arguments: Sequence[object], said: Path) -> None:
        said.touch()
        self.processes, self.said = processes, said
        (self.rank,) = processes.start(1, diloco, [str(argument) for argument in arguments], said)

    @property
    def words(self) -> str:
        """All that it has said so far."""
        return self.said.read_text()

    @property
    def pid(self) -> int:
        """Of the process and of its group."""
        return self.processes.pid(self.rank)

    def until(self, look: Callable[[], T], what: str) -> T:
        """What ``look`` finds, as soon as that is anything; the command must still run then, or have said it."""
        until_s = time.monotonic() + LIMIT_S
        while True:
            runs = self.processes.is_running(self.rank)
            if found := look():
                return found
            assert runs, f"ended without {what}:\n{self.words}"
            assert time.monotonic() < until_s, f"no {what} in time:\n{self.words}"
            time.sleep(0.05)

    def end(self, code: int = 0, limit_s: float = LIMIT_S) -> None:
        """Wait for it to end with ``code``."""
        assert self.processes.exit_code(self.rank, limit_s) == code, self.words


def diloco(rank: int, arguments: list[str], said: Path) -> None:
    """In the process."""
    os.setsid()
    with said.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    from diloco.cli import main

    sys.exit(main(arguments))
