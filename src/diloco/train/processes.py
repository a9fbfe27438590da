"""The processes of a run: the role of this one, and the launcher of all replicas."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Literal

from diloco.devices import set_thread_share
from diloco.errors import ConfigurationError
from diloco.signals import SIGNALS
from diloco.transport import Address, NetworkSettings, parse_address

LAUNCHED = "DILOCO_LAUNCHED"  # set for a process that `launch` has started

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class TorchRun:
    """The environment that ``torchrun`` sets for the processes it starts."""

    rank: int  # among all processes that it started, on all machines
    world_size: int
    local_rank: int  # among those on this machine
    master: Address  # address of its store
    attempt: str  # the number of times that it has restarted this group of processes


def read_torchrun(environment: Mapping[str, str]) -> TorchRun | None:
    """Return the environment set by ``torchrun``, or None if it did not start this process."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return TorchRun(
        int(environment["RANK"]),
        int(environment["WORLD_SIZE"]),
        int(environment["LOCAL_RANK"]),
        Address(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
        environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


@dataclass(frozen=True)
class Role:
    """The role of this process."""

    # ``alone``: train all replicas here; ``launcher``: start a process for every replica; ``rank``: be one rank;
    # ``peer``: be a replica of a swarm
    kind: Literal["alone", "launcher", "rank", "peer"]
    replica: int = 0  # for a rank, as is `position`
    position: int = 0
    rendezvous: Address | None = None  # where the replicas meet over TCP
    torchrun: TorchRun | None = None  # the environment set by ``torchrun``, if it started this process
    founds: bool = False  # whether this peer may found the swarm although it was told of addresses

    @property
    def index(self) -> int:
        """The index of this process on its machine, as far as it is known."""
        return self.torchrun.local_rank if self.torchrun else self.replica

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the run."""
        return self.replica == 0 and self.position == 0


def role_of(settings: NetworkSettings, torchrun: TorchRun | None) -> Role:
    """Return the role of a process.

    Raises:
        ConfigurationError: if the settings don't match the way in which the process was started.

    >>> role_of(NetworkSettings(transport="tcp", replicas=2), None).kind
    'launcher'
    >>> mine = TorchRun(1, 4, 1, Address("127.0.0.1", 29500), "0")
    >>> one = role_of(NetworkSettings(transport="tcp", replicas=2, replica_size=4, replica=1, join=("a:1",)), mine)
    >>> one.replica, one.position, str(one.rendezvous)
    (1, 1, 'a:1')
    """
    started = 1 if torchrun is None else torchrun.world_size
    starts, name = settings.traits.starts, settings.transport
    if starts in ("alone", "peer"):
        if started > 1:
            raise ConfigurationError(
                f"torchrun started {started} processes, but network.transport={name!r} uses a single one. "
                "Use --transport torch."
            )
        return Role(starts)
    if starts == "torchrun":
        if torchrun is None:
            raise ConfigurationError(
                f"network.transport={name!r} needs torchrun, which starts all processes: torchrun --nproc-per-node "
                f"{settings.num_ranks} -m diloco train ... Or use --transport tcp, with which this command starts them."
            )
        if started != settings.num_ranks:
            raise ConfigurationError(
                f"torchrun started {started} processes, but {settings.replicas} replicas of {settings.replica_size} "
                f"ranks need {settings.num_ranks}. Leave out --replicas, or start that many processes."
            )
        return Role("rank", *divmod(torchrun.rank, settings.replica_size), torchrun=torchrun)
    if started != settings.replica_size:
        raise ConfigurationError(
            f"network.transport={name!r} needs a torchrun of its own for every replica of several ranks: torchrun "
            f"--nproc-per-node {settings.replica_size} -m diloco train --replica M --join HOST:PORT ..., but {started} "
            "processes were started together. Use --transport torch if one torchrun starts all replicas."
        )
    if torchrun is None and settings.replica is None and settings.rendezvous is None:
        return Role("launcher")
    if settings.replica is None or settings.rendezvous is None:
        both = {"--replica": settings.replica, "--join": settings.rendezvous}
        one = next((f"{flag} {value}" for flag, value in both.items() if value is not None), "neither")
        raise ConfigurationError(
            f"--replica and --join need each other, got {one}. Pass --replica 0, 1, ... on each machine, and --join "
            "HOST:PORT, an address of the machine of replica 0; or leave out both to start all replicas here."
        )
    position = 0 if torchrun is None else torchrun.rank
    return Role("rank", settings.replica, position, parse_address(settings.rendezvous, key="network.join"), torchrun)


def launch(
    settings: NetworkSettings,
    command: Callable[[int, Address], Sequence[str]],
    say: Callable[[str], None],
    lock: int | None = None,
) -> int:
    """Start a process for every replica, wait for all, and return one exit code; they get the signals of this one.

    That is 2 after a usage error, 130 if stopped by request, 0 if finished, else 1. If the others continue without a
    lost replica, one that finished is enough for 0; otherwise those that have not noticed the loss of one after two
    silences, as they still wait for it to come, are asked to stop.

    Args:
        command: returns the arguments of a replica's process, given the address where they meet.
        lock: the lock of the run's folder, which replica 0 shares; see `diloco.checkpoint.lock_folder`.
    """
    host = settings.listen_at[0] or "127.0.0.1"
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        address = Address(host, free.getsockname()[1])
    numbers = range(settings.replicas)
    running: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []  # the signals of this process
    failed_s = math.inf

    def forward(number: int, frame: object) -> None:
        asked.append(number)
        for process in running:
            if process.poll() is None and sys.platform != "win32":  # the Windows console signals all of its processes
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        for m in numbers:
            if not asked:
                shared = lock if m == 0 else None
                running.append(start_process(command(m, address), len(numbers), shared, {LAUNCHED: "1"}))
                if asked:  # while it was started, so that it was not among those that got the signal
                    running[-1].send_signal(asked[-1])
        while None in (codes := [process.poll() for process in running]):
            if any(code not in (None, 0, 130) for code in codes):
                failed_s = min(failed_s, time.monotonic())
            late = settings.on_loss == "stop" and time.monotonic() - failed_s > 2 * settings.silence
            if 2 in codes or late:  # the run can't start without it
                forward(signal.SIGTERM, None)
            time.sleep(0.05)
        if asked:
            ended_by_it = {-number for number in SIGNALS}
            codes = [130 if code in ended_by_it else code for code in codes]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in running:
            process.kill()
            process.wait()
    for m, code in enumerate(codes):
        if code not in (0, 130):
            say(f"replica {m} ended with exit code {code}.")
    if 2 in codes:
        return 2
    if {*codes} <= {0, 130}:
        was_stopped = 130 in codes or len(codes) < len(numbers)
        return 130 if was_stopped else 0
    others_finished = settings.on_loss == "continue" and 0 in codes
    return 0 if others_finished else 1


def start_process(
    arguments: Sequence[str],
    processes: int,
    lock: int | None,
    variables: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``diloco`` as one of ``processes`` processes with its share of the cores. On Linux, it ends with this one.

    It runs in its own session, so that Ctrl-C reaches it only once, through this process. It shares ``lock`` (see
    `diloco.checkpoint.lock_folder`) and writes to ``output``, with nothing to read; None: where this process does.
    """
    environment = {**os.environ, **(variables or {})}
    set_thread_share(environment, processes)
    return subprocess.Popen(
        [sys.executable, "-m", "diloco", *arguments],
        env=environment,
        stdin=None if output is None else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=() if lock is None or sys.platform == "win32" else (lock,),
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() == 1:
        os._exit(1)
