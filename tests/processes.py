"""Functions in processes of their own, which a test can stop at exact points, kill and freeze.

Processes are forked from a server that has imported torch and the package once, so each starts in milliseconds. In a
child, `report` and `told` talk to the test; the test talks back with `Processes.heard` and `Processes.tell`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

__all__ = ["Processes", "free_port", "report", "told"]

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "hypothesis",
    "pytest",
    "hivemind",
    # what commands import late
    "encodings.idna",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "tokenizers",
    "pydantic.main",
    "diloco.monitor.console",
    "diloco.cli.train",
    "diloco.train.run",
]

_parent: Connection | None = None


def report(value: Any) -> None:
    """In a child: tell the test something; it waits with `Processes.heard`."""
    assert _parent is not None, "only a function that Processes started can report"
    # as bytes of our own: multiprocessing would send tensors as shared memory, which ends with its process
    _parent.send_bytes(pickle.dumps(("report", value)))


def told(timeout_s: float = 60.0) -> Any:
    """In a child: what the test told with `Processes.tell`, waiting for it."""
    assert _parent is not None, "only a function that Processes started can be told something"
    assert _parent.poll(timeout_s), f"nothing was told within {timeout_s:g} s"
    return pickle.loads(_parent.recv_bytes())


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(rank: int, job: bytes, parent: Connection) -> None:
    global _parent
    _parent = parent
    os.environ.update(ONE_THREAD)
    os.fsync = lambda descriptor: None  # as in the tests' own process
    torch.set_num_threads(1)
    try:
        function, arguments = pickle.loads(job)
        message = pickle.dumps(("result", function(rank, *arguments)))
    except SystemExit:
        raise  # its code is that of the process
    except BaseException:  # whatever it is, the test shall see it
        parent.send_bytes(pickle.dumps(("failure", traceback.format_exc())))
        sys.exit(1)
    parent.send_bytes(message)


@dataclass
class _Member:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    reports: deque[Any] = field(default_factory=deque)
    result: tuple[Any, ...] = ()
    failure: str = ""
    killed: bool = False
    ended: bool = False

    def kill(self) -> None:
        if self.process.is_alive():  # else its number may be another's by now
            self.process.kill()

    @property
    def over(self) -> bool:
        """Whether nothing but what was heard of it already is to be expected."""
        return self.ended or bool(self.failure)


class Processes:
    """Some processes, each known by its rank. Leaving the ``with`` kills and reaps them all, whatever they are doing.

    >>> with Processes() as processes:
    ...     _ = processes.start(2, pow, 3)
    ...     processes.results(timeout_s=60)
    {0: 0, 1: 1}
    """

    def __init__(self) -> None:
        self.members: list[_Member] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)  # counts when the first test of a session starts a process
        with mock.patch.dict(os.environ, ONE_THREAD):
            multiprocessing.forkserver.ensure_running()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()
        for member in self.members:
            member.process.join()
            member.connection.close()

    def start(self, count: int, function: Callable[..., Any], *arguments: Any) -> range:
        """Run ``function(rank, *arguments)`` in ``count`` more processes.

        Args:
            count: how many.
            function: of a module that can be imported by name.
            arguments: what can be pickled; copied.

        Returns:
            Their ranks, which go on where those of an earlier `start` ended.
        """
        job = pickle.dumps((function, arguments))
        ranks = range(len(self.members), len(self.members) + count)
        for rank in ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_child, args=(rank, job, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()  # so that the end of the child is the end of the pipe
            self.members.append(_Member(process, ours))
        return ranks

    def tell(self, rank: int, value: Any) -> None:
        """Let `told` in process ``rank`` return ``value``."""
        self.members[rank].connection.send_bytes(pickle.dumps(value))

    def heard(self, rank: int, timeout_s: float = 60.0) -> Any:
        """The next `report` of process ``rank``.

        Raises:
            AssertionError: with the traceback if the process failed, or if it ended or the time ran out before that.
        """
        member = self.members[rank]
        self._await(lambda: bool(member.reports) or member.over, timeout_s, f"rank {rank} has not reported")
        if not member.reports:
            self._fail(rank, "a report")
        return member.reports.popleft()

    def results(self, timeout_s: float = 60.0, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """What the functions returned, by rank; the processes may still be on their way out.

        Args:
            timeout_s: for all of them together.
            ranks: by default all but those that the test has killed.

        Raises:
            AssertionError: with the traceback of the first that failed, as soon as it did; or if one ended without a
                result; or naming those that have none when the time runs out.
        """
        alive = [rank for rank, member in enumerate(self.members) if not member.killed]
        wanted = alive if ranks is None else list(ranks)

        def missing() -> list[int]:
            return [rank for rank in wanted if not self.members[rank].result]

        def over() -> bool:
            return any(self.members[rank].over for rank in missing()) or not missing()

        self._await(over, timeout_s, lambda: f"no result from rank {', '.join(map(str, missing()))}")
        for rank in sorted(missing(), key=lambda rank: not self.members[rank].failure):
            self._fail(rank, "a result")
        return {rank: self.members[rank].result[0] for rank in wanted}

    def exit_code(self, rank: int, timeout_s: float = 60.0) -> int:
        """How process ``rank`` ended, waiting for it: 0; 1 after an exception; -9 after `kill`; its own otherwise."""
        member = self.members[rank]
        self._await(lambda: member.ended, timeout_s, f"rank {rank} has not ended")
        assert member.process.exitcode is not None
        return member.process.exitcode

    def is_running(self, rank: int) -> bool:
        """Whether process ``rank`` has neither returned, failed nor ended; what it said so far is taken in."""
        self._take_in(0.0)
        member = self.members[rank]
        return not (member.over or member.result)

    def kill(self, rank: int) -> None:
        """SIGKILL; afterwards the process is gone."""
        member = self.members[rank]
        member.killed = True
        member.kill()
        self.exit_code(rank)

    def freeze(self, rank: int) -> None:
        """SIGSTOP; afterwards none of its threads runs (where the system tells their state; else very soon)."""
        pid = self.pid(rank)
        os.kill(pid, signal.SIGSTOP)
        while any(_state(task) not in "TtZX" for task in Path(f"/proc/{pid}/task").glob("*")):
            os.sched_yield()

    def thaw(self, rank: int) -> None:
        """SIGCONT: it goes on as if no time had passed."""
        os.kill(self.pid(rank), signal.SIGCONT)

    def pid(self, rank: int) -> int:
        """Of a process that is alive."""
        process = self.members[rank].process
        assert process.is_alive(), f"rank {rank} has ended"
        assert process.pid is not None
        return process.pid

    def _await(self, over: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]) -> None:
        """Take in what the processes send until ``over``."""
        deadline_s = time.monotonic() + timeout_s
        self._take_in(0.0)
        while not over():
            remaining_s = deadline_s - time.monotonic()
            assert remaining_s > 0, f"{what if isinstance(what, str) else what()} within {timeout_s:g} s"
            self._take_in(remaining_s)

    def _take_in(self, timeout_s: float) -> None:
        by_source: dict[Any, _Member] = {}  # by its pipe and by what becomes readable at its end
        for member in self.members:
            if not member.ended:
                by_source[member.connection] = by_source[member.process.sentinel] = member
        ready = multiprocessing.connection.wait(by_source, timeout_s)
        gone = [by_source[source] for source in ready if isinstance(source, int)]
        for member in {id(by_source[source]): by_source[source] for source in ready}.values():
            # what a process has sent is there when it is gone, and then there is no end to wait for in its pipe
            with contextlib.suppress(EOFError, ConnectionResetError):
                while member.connection.poll():
                    self._receive(member, *pickle.loads(member.connection.recv_bytes()))
            if any(member is other for other in gone):
                member.process.join()
                member.ended = True

    def _receive(self, member: _Member, kind: str, value: Any) -> None:
        if kind == "report":
            member.reports.append(value)
        elif kind == "result":
            member.result = (value,)
        else:
            member.failure = value

    def _fail(self, rank: int, what: str) -> NoReturn:
        member = self.members[rank]
        if member.failure:
            raise AssertionError(f"rank {rank} failed:\n{member.failure}")
        raise AssertionError(f"rank {rank} ended with {member.process.exitcode} and without {what}")


def _state(task: Path) -> str:
    """One letter, T for stopped; X, dead, if it has just ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
