"""Starting every rank of a run on this machine, and watching over them.

The launcher holds the rendezvous, so that no replica's death takes it along, and trains nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.cores import choose_share
from diloco.errors import ConfigurationError
from diloco.protocol.failure_detector import Timing
from diloco.protocol.registry import Registry
from diloco.train.stopping import is_echo
from diloco.transport.address import Address
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.streams import TcpStreams
from diloco.transport.settings import TransportSettings
from diloco.transport.torch_distributed.rendezvous import serve

__all__ = ["Ended", "exit_code", "insisted", "launch"]

_KILL_S = 10.0
"""Processes that a second signal should have ended have so long before they are killed."""

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Ended:
    """A rank that ended for good."""

    replica: int
    position: int
    code: int
    """Exit code; the negative number of a signal that ended it."""


def launch(
    settings: TransportSettings,
    command: Callable[[int, int, Address, Address | None], Sequence[str]],
    say: Callable[[str], None],
    *,
    speakers: int = 1,
) -> int:
    """Start ``settings.num_ranks`` processes, wait for them, and start lost ones again as often as is allowed.

    Args:
        settings: of the transport.
        command: the arguments of the process of (replica, position), which meets the others at an address, and, in a
            replica of several ranks, those of its replica at another.
        say: is told in words what becomes of them.
        speakers: ranks of each replica that speak with other replicas.

    Returns:
        The exit code of the whole, see `exit_code`.
    """
    connections = ConnectionManager(-1, Timing(), TcpStreams())
    try:
        host = settings.host or "127.0.0.1"
        address = connections.listen(host, range(1), host)
        registry = Registry(settings.replicas * speakers, speakers)
        serve(connections, registry)
        store = _inner_store(host) if settings.replica_size > 1 else None
        inner = None if store is None else Address(host, store.port)
        return _watch(settings, registry, lambda m, s: list(command(m, s, address, inner)), say)
    finally:
        connections.close()


def _watch(
    settings: TransportSettings,
    registry: Registry,
    command: Callable[[int, int], list[str]],
    say: Callable[[str], None],
) -> int:
    running: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
    left = dict.fromkeys(range(settings.replicas), settings.restarts)
    ended: list[Ended] = []
    asked: list[tuple[int, float]] = []

    def forward(number: int, frame: object) -> None:
        asked.append((number, time.monotonic()))
        for process in running.values():
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for replica in range(settings.replicas):
            for position in range(settings.replica_size):
                running[replica, position] = _start(command(replica, position), settings.num_ranks)
        finished_s: float | None = None
        while running:
            time.sleep(0.05)
            if insisted(asked) and time.monotonic() - asked[-1][1] > _KILL_S:
                for process in running.values():
                    process.kill()
            if finished_s is not None and time.monotonic() - finished_s > _patience_s(settings):
                for replica, _ in running:
                    say(f"replica {replica} did not end with the others and is killed.")
                for process in running.values():
                    process.kill()
            for (replica, position), process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[replica, position]
                finished_s = time.monotonic() if code in (0, 130) else finished_s
                others = any(member != replica for member, _ in running)
                if code in (0, 2, 130) or asked or settings.on_failure == "stop" or not others or not left[replica]:
                    ended.append(Ended(replica, position, code))
                    if code != 0 and not asked:
                        say(_words(replica, code))
                    if code != 0 and not registry.running:  # the run can't begin without it
                        for other in running.values():
                            other.terminate()
                    continue
                if position == 0:
                    left[replica] -= 1
                say(f"{_words(replica, code)} It is started again.")
                running[replica, position] = _start(command(replica, position), settings.num_ranks)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in running.values():
            process.kill()
            process.wait()
    return exit_code(ended, go_on=settings.on_failure == "continue", asked=bool(asked))


def insisted(asked: Sequence[tuple[int, float]]) -> bool:
    """Whether somebody asked to end more than once: signals, each with its time in seconds.

    >>> echoed = [(signal.SIGTERM, 10.0), (signal.SIGTERM, 10.1)]
    >>> insisted(echoed), insisted([(signal.SIGINT, 10.0), (signal.SIGINT, 11.0)])
    (False, True)
    """
    return any(not is_echo(number, signal.Signals(asked[0][0]).name, at_s - asked[0][1]) for number, at_s in asked[1:])


def exit_code(ended: Sequence[Ended], *, go_on: bool, asked: bool) -> int:
    """One code for all: 2 if any was misused; 130 if they were asked to stop; 0 if all finished, or, where the others
    go on without a lost one, if any finished; else 1.

    >>> exit_code([Ended(0, 0, 0), Ended(1, 0, -9)], go_on=True, asked=False)
    0
    >>> exit_code([Ended(0, 0, 0), Ended(1, 0, -9)], go_on=False, asked=False)
    1
    """
    codes = {each.code for each in ended}
    if 2 in codes:
        return 2
    if 130 in codes and (asked or codes <= {0, 130}):
        return 130
    if codes == {0} or (go_on and 0 in codes):
        return 0
    return 1


def _inner_store(host: str) -> Any:
    """A store of torch's for the process groups inside replicas, on a port of its own."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs lack it

    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def _patience_s(settings: TransportSettings) -> float:
    """Ranks that take part end together; one that is frozen does not."""
    return 2 * settings.silence_s + 10


def _words(replica: int, code: int) -> str:
    if code < 0:
        return f"replica {replica} was ended by {signal.Signals(-code).name}."
    return f"replica {replica} ended with exit code {code}."


def _start(arguments: list[str], processes: int) -> subprocess.Popen[bytes]:
    """One of so many processes, with its share of the cores, in a session of its own, so that Ctrl-C reaches it through
    the launcher once, not twice.

    It ends with the launcher, where the system can do that.
    """
    environment = dict(os.environ)
    choose_share(environment, processes)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "diloco", *arguments],
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
    except OSError as error:
        raise ConfigurationError(
            f"a process for a replica could not be started: {error}. Fewer --replicas, or more processes and memory "
            "allowed on this machine, would work. Nothing runs."
        ) from error


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() == 1:
        os._exit(1)
