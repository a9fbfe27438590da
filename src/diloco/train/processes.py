"""The processes of a run: the role of this one, the signals that stop it, and the launcher of all ranks.

The launcher does not train. It hosts the rendezvous, so that the rendezvous survives the loss of any replica.

The first SIGINT or SIGTERM asks a run to save and stop, a second one ends the process at once. A batch system sends
SIGTERM to every process, and ``torchrun`` forwards it to processes that already have it, so a SIGTERM shortly after
another one counts as the same request.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from types import FrameType
from typing import IO, Any, Literal, Self

from diloco.checkpoint import shared_lock
from diloco.cores import set_thread_share
from diloco.errors import ConfigurationError
from diloco.transport import Address, NetworkSettings, parse_address, read_secret

__all__ = [
    "IN_VAIN",
    "POSITION",
    "Role",
    "StopAsked",
    "StopRequest",
    "launch",
    "read_torchrun",
    "role_of",
    "start_process",
]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 5.0  # a launcher forwards a signal within this time
HANDLED_S = 1.0  # the handler of a second signal has this long to end the process

IN_VAIN = 3  # exit code of a rank that has trained to the end, but whose rounds were all void

_KILL_S = 10.0  # processes that have not ended this long after a second signal are killed
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

POSITION, INNER_STORE = "DILOCO_POSITION", "DILOCO_INNER_STORE"
"""Variables by which the launcher tells a rank its position within its replica, and where these ranks meet."""


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
    try:
        return TorchRun(
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment["LOCAL_RANK"]),
            Address(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    except (KeyError, ValueError) as error:
        raise ConfigurationError(
            f"The environment set by torchrun is not usable ({error!r}). It must set RANK, WORLD_SIZE, LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT."
        ) from error


@dataclass(frozen=True)
class Role:
    """The role of this process."""

    # ``alone``: train all replicas here; ``launcher``: start a process for every rank; ``rank``: be one rank;
    # ``peer``: be a replica of a swarm
    kind: Literal["alone", "launcher", "rank", "peer"]
    replica: int = 0  # for a rank, as is `position`
    position: int = 0
    rendezvous: Address | None = None  # where the ranks meet; None under a ``torchrun`` of all replicas
    torchrun: TorchRun | None = None  # the environment set by ``torchrun``, if it started this process
    inner_store: Address | None = None  # where the ranks of one replica meet, if it has more than one
    local_rank: int = 0  # index of this process on its machine, if known

    @property
    def index(self) -> int:
        """The index of this process on its machine."""
        return self.torchrun.local_rank if self.torchrun else self.local_rank

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
    if settings.transport in ("in-process", "swarm"):
        if torchrun is not None and torchrun.world_size > 1:
            raise ConfigurationError(
                f"torchrun started {torchrun.world_size} processes, but network.transport={settings.transport!r} uses "
                "a single one. Use --transport torch."
            )
        return Role("alone" if settings.transport == "in-process" else "peer")
    if settings.transport == "torch" and torchrun is None:
        raise ConfigurationError(
            "network.transport='torch' needs torchrun, which starts all processes: torchrun --nproc-per-node "
            f"{settings.num_ranks} -m diloco train ... Or use --transport tcp, with which this command starts them."
        )
    size = settings.replica_size
    of_one_replica = settings.replica is not None and settings.rendezvous is not None
    if torchrun is not None and not (of_one_replica and torchrun.world_size == size > 1):
        if settings.transport == "tcp" and not of_one_replica:
            raise ConfigurationError(
                "network.transport='tcp' needs one torchrun for each replica, with --replica and --join. "
                "One torchrun for all replicas needs --transport torch, its default."
            )
        if torchrun.world_size != settings.num_ranks:
            raise ConfigurationError(
                f"torchrun started {torchrun.world_size} processes, but {settings.replicas} replicas of {size} ranks "
                f"need {settings.num_ranks}. Leave out --replicas, start that many processes, or start one torchrun "
                "per replica with --replica and --join."
            )
        replica, position = divmod(torchrun.rank, size)
        return Role("rank", replica, position, torchrun=torchrun, inner_store=torchrun.master if size > 1 else None)
    if settings.replica is None and settings.rendezvous is None:
        return Role("launcher")
    if settings.replica is None or settings.rendezvous is None:
        raise ConfigurationError(
            f"network.replica={settings.replica} and network.join={settings.rendezvous!r} need each other. Pass "
            "--replica 0, 1, ... on each machine, and --join HOST:PORT, an address of the machine of replica 0; or "
            "leave out both to start all replicas here."
        )
    position, inner_store = (0, None) if torchrun is None else (torchrun.rank, torchrun.master)
    if POSITION in os.environ:  # set by the launcher
        position, store = int(os.environ[POSITION]), os.environ.get(INNER_STORE)
        inner_store = None if store is None else parse_address(store, key=INNER_STORE)
    if size > 1 and inner_store is None:
        raise ConfigurationError(
            f"network.replica={settings.replica} can't start the {size} processes of a replica. Start them with "
            "torchrun, or leave out --replica to start all replicas here with one command."
        )
    return Role(
        "rank",
        settings.replica,
        position,
        parse_address(settings.rendezvous, key="network.join"),
        torchrun=torchrun,
        inner_store=inner_store,
        local_rank=settings.replica * size + position,
    )


def launch(
    settings: NetworkSettings,
    command: Callable[[int, int, Address], Sequence[str]],
    say: Callable[[str], None],
    *,
    talking_ranks: int = 1,
    lock: int | None = None,
) -> int:
    """Start ``settings.num_ranks`` processes, wait for them, and return one exit code for all.

    That is 2 after a usage error, 130 if stopped by request, 0 if finished, else 1. If the others continue without a
    lost replica, one rank that finished is enough for 0.

    Args:
        command: returns the arguments of a rank's process from its replica, its position and the address of the
            rendezvous.
        talking_ranks: the number of ranks of each replica that communicate with other replicas.
        lock: the lock of the run's folder, which rank 0 shares; see `diloco.checkpoint.lock`.
    """
    from diloco.protocol import Registry, Rules
    from diloco.transport import ConnectionManager, Gatherer, TcpStreams

    secret = read_secret(settings.secret_file, "network.secret_file")
    connections = ConnectionManager(Rules(rank=-1), TcpStreams(secret=secret))
    host, size, stores = settings.listen_at[0] or "127.0.0.1", settings.replica_size, list[Any]()
    running: dict[tuple[int, int], subprocess.Popen[bytes]] = {}  # (replica, position) -> process of that rank
    codes: list[int] = []
    asked: list[tuple[int, float]] = []  # the signals and when they came
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
        address = connections.listen(host, range(1), host)
        registry = Registry(settings.replicas * talking_ranks, talking_ranks)
        Gatherer(connections, registry)
        for replica, position in product(range(settings.replicas), range(size)):
            variables = {POSITION: str(position)}
            if size > 1:  # the process groups inside the replica need a store
                from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs lack it

                if position == 0:
                    stores.append(TCPStore(host, 0, is_master=True, wait_for_workers=False))
                variables[INNER_STORE] = str(Address(host, stores[replica].port))
            words, shared = command(replica, position, address), lock if replica == 0 else None
            running[replica, position] = start_process(words, settings.num_ranks, shared, variables)
        while running:
            time.sleep(0.05)
            now_s = time.monotonic()
            insisted = any(not is_echo(number, asked[0], at_s) for number, at_s in asked[1:])
            if insisted and now_s - asked[-1][1] > _KILL_S:
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
        connections.close()
    if 2 in codes:
        return 2
    if 130 in codes and (asked or {*codes} <= {0, 130}):
        return 130
    return 0 if {*codes} == {0} or (settings.on_loss == "continue" and 0 in codes) else 1


def start_process(
    arguments: Sequence[str],
    processes: int,
    lock: int | None,
    variables: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``diloco`` as one of ``processes`` processes with its share of the cores. On Linux, it ends with this one.

    It runs in its own session, so that Ctrl-C reaches it only once, through this process. It shares ``lock`` (see
    `diloco.checkpoint.lock`) and writes to ``output``, with nothing to read; None: where this process does.
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


class StopAsked(Exception):
    """Raised in a long wait if the user asks to stop."""


class StopRequest:
    """A context that records a request to stop: ``signal`` is None before the request, then the signal's name.

    Outside the main thread, where Python can't handle signals, it does nothing. ``asked`` is called once, in a thread
    of its own, as soon as the first signal arrives, whatever the main thread does.
    """

    def __init__(self, asked: Callable[[], None] = lambda: None) -> None:
        self.signal: str | None = None
        self._asked = asked
        self._interrupts = False
        self._first = (0, 0.0)  # the first signal and when it came
        self._before: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            if sys.platform != "win32":  # Windows needs no such pipe, and can't make one before Python 3.12
                os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=self._pipe[:1], name="diloco-signals", daemon=True).start()
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])  # this ends the watching thread
            self._pipe = None

    def ask(self, why: str) -> None:
        """Request a stop as if a signal named ``why`` had arrived, unless a stop was already requested."""
        self.signal = self.signal or why

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise `StopAsked` in the block on a request to stop, even an earlier one. The block must not change state."""
        self._interrupts = True
        try:
            if self.signal is not None:
                raise StopAsked
            yield
        finally:
            self._interrupts = False

    def _watch(self, signals: int) -> None:
        """Watch for signals in a thread, because Python handles none while the main thread waits in a C library.

        It may also call what a handler must not, such as functions that take locks.
        """
        first: tuple[int, float] | None = None
        with os.fdopen(signals, "rb", buffering=0) as pipe:
            while number := int.from_bytes(pipe.read(1)):
                if number in SIGNALS and first is None:
                    first = number, time.monotonic()
                    self._asked()
                elif number in SIGNALS and first and not is_echo(number, first, time.monotonic()):
                    time.sleep(HANDLED_S)  # meanwhile the handler ends the process, if it can run
                    if self._pipe is not None:
                        _end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._first = signal.Signals(number).name, (number, time.monotonic())
            if self._interrupts:
                raise StopAsked
        elif not is_echo(number, self._first, time.monotonic()):
            _end()


def is_echo(number: int, first: tuple[int, float], now_s: float) -> bool:
    """Return whether a signal that arrives at ``now_s`` belongs to the same request as the ``first`` and its time."""
    return number == first[0] == signal.SIGTERM and now_s - first[1] < ECHO_S


def _end() -> None:
    # a live display hides the cursor, and no other code runs after this
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\x1b[?25hstopped at once; nothing more was saved\n")
    os._exit(130)
