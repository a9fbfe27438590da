"""The command `diloco` in separate processes, which are forked so that they need no seconds to import torch."""

import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from tests.processes import Processes

LIMIT_S = 300.0
"""A time-out far above what any command of a test takes, for busy machines."""

T = TypeVar("T")

PACE = """
import time
from diloco.events import StepFinished

class Pace:
    def __init__(self, folder): pass
    def close(self): pass
    def handle(self, event):
        if isinstance(event, StepFinished):
            time.sleep(0.02)  # the length of a step, waiting for nothing
"""
"""Code of one's own, with which a step takes a while: peers would take all cores while a test waits for them."""


class Command:
    """A running command in its own process group.

    Args:
        processes: the processes that it joins, and with which it ends.
        arguments: the arguments of `diloco`.
        output_file: the file for its standard output and standard error.
        module: the module to run, if not `diloco`.
        environment: further variables of its environment.
    """

    def __init__(
        self,
        processes: Processes,
        arguments: Sequence[object],
        output_file: Path,
        module: str = "diloco",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        output_file.touch()
        self.processes, self.output_file = processes, output_file
        words = [str(argument) for argument in arguments]
        (self.rank,) = processes.start(1, run_module, module, words, output_file, dict(environment))
        self.pid = processes.pid(self.rank)
        """The number of the process and of its group."""

    @property
    def output(self) -> str:
        """Its output so far."""
        return self.output_file.read_text()

    def until(self, look: Callable[[], T], what: str) -> T:
        """Call ``look`` until it returns something true, and return that. Fail if the command ends before."""
        until_s = time.monotonic() + LIMIT_S
        while True:
            runs = self.processes.is_running(self.rank)
            if found := look():
                return found
            assert runs, f"ended without {what}:\n{self.output}"
            assert time.monotonic() < until_s, f"no {what} in time:\n{self.output}"
            time.sleep(0.05)  # files can only be polled, and each look may read a whole file

    def end(self, code: int = 0, limit_s: float = LIMIT_S) -> None:
        """Wait for it to end with ``code``."""
        assert self.wait(limit_s) == code, self.output

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for it to end, and return its exit code."""
        return self.processes.exit_code(self.rank, limit_s)

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return None if self.processes.is_running(self.rank) else self.wait()


def run_module(rank: int, module: str, arguments: list[str], output_file: Path, environment: Mapping[str, str]) -> None:
    """Run ``python -m module`` in the process."""
    os.setsid()
    os.environ.update(environment)
    with output_file.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
