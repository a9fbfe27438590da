"""Functions in separate processes that a test can stop at exact points, kill and freeze.

Processes are forked from a server that has already imported torch and the package, so each starts in milliseconds. A
child exchanges values with the test through `report` and `receive`, and the test with a child through
`Processes.next_report` and `Processes.send`. All test processes of a session share one server: see `/conftest.py`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import secrets
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

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "hypothesis",
    "pytest",
    "hivemind",
    # modules that commands import lazily
    "encodings.idna",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "tokenizers",
    "pydantic.main",
    "transformers.models.llama.modeling_llama",
    "peft",
    "diloco.monitor.console",
    "diloco.cli.train",
    "diloco.train.run",
]

_parent: Connection | None = None


def report(value: Any) -> None:
    """In a child, send ``value`` to the test, which receives it with `Processes.next_report`."""
    assert _parent is not None
    # pickled here, because multiprocessing would send tensors as shared memory, which ends with the process
    _parent.send_bytes(pickle.dumps(("report", value)))


def receive(timeout_s: float = 60.0) -> Any:
    """In a child, wait for the value that the test sends with `Processes.send`, and return it."""
    assert _parent is not None
    assert _parent.poll(timeout_s), f"the test sent nothing within {timeout_s:g} s"
    return pickle.loads(_parent.recv_bytes())


def free_port() -> int:
    """Return a TCP port of this machine that is unused, and that the system gives to nobody else meanwhile."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # below those that it gives to who asks for any
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def start_server() -> tuple[str, str]:
    """Start the server if none runs, and return its address, and a file of which it ends once nobody has it open."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ONE_THREAD):
        multiprocessing.forkserver.ensure_running()
    server = multiprocessing.forkserver._forkserver
    return server._forkserver_address, f"/proc/{os.getpid()}/fd/{server._forkserver_alive_fd}"


def use_server(address: str, alive: str) -> None:
    """Use the server that another process has started."""
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(alive, os.O_WRONLY)
    multiprocessing.forkserver.ensure_running = server.ensure_running = lambda: None


def _child(rank: int, job: bytes, parent: Connection) -> None:
    global _parent
    _parent = parent
    import torch  # the server has imported it

    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    os.environ.update(ONE_THREAD)
    os.fsync = lambda descriptor: None  # as in the test process; see conftest.py
    torch.set_num_threads(1)
    try:
        function, arguments = pickle.loads(job)
        message = pickle.dumps(("result", function(rank, *arguments)))
    except SystemExit:
        raise  # its code becomes the exit code of the process
    except BaseException:  # report every error to the test
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
        if self.process.is_alive():  # otherwise its number may already belong to another process
            self.process.kill()

    @property
    def over(self) -> bool:
        """Whether no further report or result is expected from it."""
        return self.ended or bool(self.failure)


class Processes:
    """A set of processes, each with a rank. Leaving the ``with`` block kills and reaps all of them.

    >>> with Processes() as processes:
    ...     _ = processes.start(2, pow, 3)
    ...     processes.results(timeout_s=60)
    {0: 0, 1: 1}
    """

    def __init__(self) -> None:
        self.members: list[_Member] = []
        self._context = multiprocessing.get_context("forkserver")
        start_server()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()
        for member in self.members:
            member.process.join()
            member.connection.close()

    def start(self, count: int, function: Callable[..., Any], *arguments: Any) -> range:
        """Run ``function(rank, *arguments)`` in ``count`` more processes, and return their ranks."""
        job = pickle.dumps((function, arguments))
        ranks = range(len(self.members), len(self.members) + count)
        for rank in ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_child, args=(rank, job, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()  # so that the pipe ends when the child does
            self.members.append(_Member(process, ours))
        return ranks

    def send(self, rank: int, value: Any) -> None:
        """Send ``value`` to process ``rank``, where `receive` returns it."""
        self.members[rank].connection.send_bytes(pickle.dumps(value))

    def next_report(self, rank: int, timeout_s: float = 60.0) -> Any:
        """Wait for the next `report` of process ``rank``, and return its value."""
        member = self.members[rank]
        self._await(lambda: bool(member.reports) or member.over, timeout_s, f"rank {rank} has not reported")
        if not member.reports:
            self._fail(rank, "a report")
        return member.reports.popleft()

    def results(self, timeout_s: float = 60.0, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Wait for the results of ``ranks``, or of all that were not killed; raise as soon as one fails."""
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
        """Wait for process ``rank`` to end, and return its exit code: 0, 1 after an exception, -9 after `kill`."""
        member = self.members[rank]
        self._await(lambda: member.ended, timeout_s, f"rank {rank} has not ended")
        assert member.process.exitcode is not None
        return member.process.exitcode

    def is_running(self, rank: int) -> bool:
        """Receive pending messages, and return whether process ``rank`` has neither returned, failed nor ended."""
        self._take_in(0.0)
        member = self.members[rank]
        return not (member.over or member.result)

    def kill(self, rank: int) -> None:
        """Kill process ``rank`` with SIGKILL, and wait for its end."""
        member = self.members[rank]
        member.killed = True
        member.kill()
        self.exit_code(rank)

    def freeze(self, rank: int) -> None:
        """Stop process ``rank`` with SIGSTOP, and wait until no thread of it runs (if /proc reports their states)."""
        pid = self.pid(rank)
        os.kill(pid, signal.SIGSTOP)
        while any(_state(task) not in "TtZX" for task in Path(f"/proc/{pid}/task").glob("*")):
            os.sched_yield()

    def thaw(self, rank: int) -> None:
        """Continue process ``rank`` with SIGCONT."""
        os.kill(self.pid(rank), signal.SIGCONT)

    def pid(self, rank: int) -> int:
        """Return the process id of process ``rank``, which must be alive."""
        process = self.members[rank].process
        assert process.is_alive(), f"rank {rank} has ended"
        assert process.pid is not None
        return process.pid

    def _await(self, over: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]) -> None:
        """Receive messages of the processes until ``over`` returns True."""
        deadline_s = time.monotonic() + timeout_s
        self._take_in(0.0)
        while not over():
            remaining_s = deadline_s - time.monotonic()
            assert remaining_s > 0, f"{what if isinstance(what, str) else what()} within {timeout_s:g} s"
            self._take_in(remaining_s)

    def _take_in(self, timeout_s: float) -> None:
        by_source: dict[Any, _Member] = {}  # by its pipe and by its sentinel
        for member in self.members:
            if not member.ended:
                by_source[member.connection] = by_source[member.process.sentinel] = member
        ready = multiprocessing.connection.wait(by_source, timeout_s)
        gone = [by_source[source] for source in ready if isinstance(source, int)]
        for member in {id(by_source[source]): by_source[source] for source in ready}.values():
            # messages of an ended process are already in its pipe, so this loop reads all of them
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
    """Return the state letter of a thread, such as T for stopped, or X (dead) if it has just ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
