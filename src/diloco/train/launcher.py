"""The launcher, which starts every rank of a run on this machine and supervises the processes.

The launcher does not train. It hosts the rendezvous, so that the rendezvous survives the loss of any replica.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any

from diloco.checkpoint import shared_lock
from diloco.cores import set_thread_share
from diloco.errors import ConfigurationError
from diloco.protocol import Registry, Timing
from diloco.train.roles import INNER_STORE, POSITION
from diloco.train.stopping import is_echo
from diloco.transport import Address, ConnectionManager, NetworkSettings, TcpStreams, read_secret, serve

__all__ = ["IN_VAIN", "exit_code", "insisted", "launch", "start_process"]

IN_VAIN = 3  # exit code of a rank that has trained to the end, but whose rounds were all void

_KILL_S = 10.0  # processes that have not ended this long after a second signal are killed

Ranks = dict[tuple[int, int], subprocess.Popen[bytes]]  # (replica, position) -> process of that rank

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def launch(
    settings: NetworkSettings,
    command: Callable[[int, int, Address], Sequence[str]],
    say: Callable[[str], None],
    *,
    talking_ranks: int = 1,
    lock: int | None = None,
) -> int:
    """Start ``settings.num_ranks`` processes, and wait for them.

    Args:
        command: returns the arguments of a rank's process from its replica, its position and the address of the
            rendezvous.
        say: prints a message for the user.
        talking_ranks: the number of ranks of each replica that communicate with other replicas.
        lock: the lock of the run's folder, which rank 0 shares; see `diloco.checkpoint.lock`.

    Returns:
        One exit code for all ranks, see `exit_code`.
    """
    secret = read_secret(settings.secret_file, "network.secret_file")
    connections = ConnectionManager(-1, Timing(), TcpStreams(secret=secret))
    try:
        host = settings.listen_host or "127.0.0.1"
        address = connections.listen(host, range(1), host)
        registry = Registry(settings.replicas * talking_ranks, talking_ranks)
        serve(connections, registry)
        stores: dict[int, Any] = {}

        def start(replica: int) -> Ranks:
            ranks, size, shared = {}, settings.replica_size, lock if replica == 0 else None
            if size > 1:
                stores[replica] = _inner_store(host)
            for position in range(size):
                variables = {POSITION: str(position)}
                if size > 1:
                    variables[INNER_STORE] = str(Address(host, stores[replica].port))
                words = command(replica, position, address)
                ranks[replica, position] = start_process(words, settings.num_ranks, shared, variables)
            return ranks

        return _watch(settings, registry, start, say)
    finally:
        connections.close()


def _watch(
    settings: NetworkSettings,
    registry: Registry,
    start: Callable[[int], Ranks],
    say: Callable[[str], None],
) -> int:
    running: Ranks = {}
    codes: list[int] = []
    asked: list[tuple[int, float]] = []
    patience_s = 2 * settings.silence + 10  # working ranks end together, a frozen one does not
    finished_s: float | None = None

    def forward(number: int, frame: object) -> None:
        asked.append((number, time.monotonic()))
        for process in running.values():
            if process.poll() is None and sys.platform != "win32":  # the Windows console signals all of its processes
                process.send_signal(number)

    def kill_all() -> None:
        for process in running.values():
            process.kill()

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for replica in range(settings.replicas):
            running |= start(replica)
        while running:
            time.sleep(0.05)
            now_s = time.monotonic()
            if insisted(asked) and now_s - asked[-1][1] > _KILL_S:
                kill_all()
            if finished_s is not None and now_s - finished_s > patience_s:
                for replica, _ in running:
                    say(f"replica {replica} did not end with the others and is killed.")
                kill_all()
            for (replica, position), process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[replica, position]
                finished_s = time.monotonic() if code in (0, IN_VAIN, 130) else finished_s
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                codes.append(code)
                if code not in (0, IN_VAIN) and not asked:
                    say(f"replica {replica} {how}.")
                if code != 0 and not registry.running:  # the run can't start without it
                    for other in running.values():
                        other.terminate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        kill_all()
        for process in running.values():
            process.wait()
    return exit_code(codes, survivors_continue=settings.on_loss == "continue", asked=bool(asked))


def insisted(asked: Sequence[tuple[int, float]]) -> bool:
    """Return whether the user asked to stop more than once.

    Args:
        asked: the signals received, each with its time in seconds.

    >>> echoed = [(signal.SIGTERM, 10.0), (signal.SIGTERM, 10.1)]
    >>> insisted(echoed), insisted([(signal.SIGINT, 10.0), (signal.SIGINT, 11.0)])
    (False, True)
    """
    return any(not is_echo(number, signal.Signals(asked[0][0]).name, at_s - asked[0][1]) for number, at_s in asked[1:])


def exit_code(codes: Collection[int], *, survivors_continue: bool, asked: bool) -> int:
    """Combine the exit codes of all ranks: 2 after a usage error, 130 if stopped by request, 0 if finished, else 1.

    Args:
        codes: the exit codes of the ranks; a rank that was ended by a signal has its negative number.
        survivors_continue: whether the others continue without a lost replica; if so, one rank that finished is enough
            for 0.
        asked: whether a signal asked the run to stop.

    >>> [exit_code([0, -9], survivors_continue=each, asked=False) for each in (True, False)]
    [0, 1]
    """
    if 2 in codes:
        return 2
    if 130 in codes and (asked or set(codes) <= {0, 130}):
        return 130
    if set(codes) == {0} or (survivors_continue and 0 in codes):
        return 0
    return 1


def _inner_store(host: str) -> Any:
    """Start a torch store, on its own port, for the process groups inside replicas."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs lack it

    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def start_process(
    arguments: Sequence[str],
    processes: int,
    lock: int | None,
    variables: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``diloco`` as one of ``processes`` processes with its share of the cores. On Linux, it ends with this one.

    It runs in its own session, so that Ctrl-C reaches it only once, through this process.

    Args:
        lock: the lock that the process shares; see `diloco.checkpoint.lock`.
        variables: changes of the environment.
        output: where it writes, with nothing to read. None: where this process does.
    """
    environment = {**os.environ, **(variables or {})}
    set_thread_share(environment, processes)
    try:
        with shared_lock(lock) as (files, shared):
            return subprocess.Popen(
                [sys.executable, "-m", "diloco", *arguments],
                env=environment | shared,
                stdin=None if output is None else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=files,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
    except OSError as error:
        raise ConfigurationError(
            f"The process of a replica could not be started: {error}. Use fewer --replicas, or allow more processes "
            "and memory on this machine."
        ) from error


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() == 1:
        os._exit(1)
