"""The peers of a run: how those of each transport are started, and which of them are alive or training."""

import itertools
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.network import Loopback, Wan
from benchmarks.chaos.paced import set_seconds
from benchmarks.chaos.plan import BOOTSTRAP
from benchmarks.chaos.processes import Life, Running, python
from benchmarks.chaos.settings import Settings, write_text

_TRAINS_S = 6.0  # a peer trains if it finished a step within this time


class Peers:
    """All processes of a run, including those that have ended.

    Args:
        settings: the settings of the run.
        folder: the folder for all files; created if missing.
        network: the network of the peers. Peer p is in node p + 1, the bootstrap peer in node 0.
    """

    def __init__(self, settings: Settings, folder: Path, network: Loopback | Wan) -> None:
        self.settings = settings
        self.folder = folder
        self.network = network
        self.lives: list[Life] = []
        self.running: dict[int, Running] = {}
        self._left: list[Running] = []
        self._generations = itertools.count(1)
        self._rng = random.Random(0)
        folder.mkdir(parents=True, exist_ok=True)
        self._data = write_text(folder)
        self._port = network.free_port()

    def start_bootstrap(self) -> None:
        """Start the bootstrap peer of a swarm, always with the same key and port."""
        listen = f"{self.network.address(0)}:{self._port}"
        options = ["--listen", listen, "--identity", str(self.folder / "dht.key")]
        self._start(BOOTSTRAP, self.folder / "dht", python("diloco", "relay", *options))

    def start(self, peer: int, folder: Path | None = None) -> None:
        """Start a peer in place ``peer``, in a new folder, or resume the run in ``folder``."""
        command = self._tcp(peer) if self.settings.transport == "tcp" else self._swarm(peer, folder)
        home = Path(command[command.index("--out" if "--out" in command else "--resume") + 1])
        over_tcp = self.settings.transport == "tcp" and peer  # all but the first write into a subfolder
        paced = python("benchmarks.chaos.paced", str(self.pace), str(self.clock(peer)), *command)
        self._start(peer, home / f"replica-{peer}" if over_tcp else home, paced)

    def _swarm(self, peer: int, folder: Path | None) -> list[str]:
        joins = [self.running[BOOTSTRAP].address()] if BOOTSTRAP in self.running else []
        joins += [other.address() for other in self._one_training(peer)]
        where = ["--network.listen", f"{self.network.address(peer + 1)}:0"]
        where += ["--join", *filter(None, joins)] if any(joins) else []
        where += [] if self.training() else ["--found"]
        if folder is not None and any((folder / "checkpoints").glob("step-*")):
            return ["train", "--resume", str(folder), *where]
        folder = self.folder / f"peer-{peer}-{next(self._generations)}"
        return ["train", *self.settings.arguments(), "--data", str(self._data), "--out", str(folder), *where]

    def _tcp(self, peer: int) -> list[str]:
        """Return the command. It is the same at each start but for the rendezvous, which is any live replica."""
        rendezvous = f"{self.network.address(1)}:{self._port}"
        for other in self._one_training(peer) or [each for each in self.others(peer) if each.tail.facts][:1]:
            addresses = other.tail.facts["control addresses"]
            rendezvous = re.findall(rf"\b{other.life.peer} at ([^\s,]+)", addresses)[0]
        place = ["--replica", str(peer), "--join", rendezvous, "--out", str(self.folder / f"peer-{peer}")]
        return ["train", *self.settings.arguments(), "--data", str(self._data), *place]

    def _one_training(self, peer: int) -> list[Running]:
        """Return one of the others that train, in a list; empty if none does."""
        training = [each for each in self.others(peer) if self.trains(each.life.peer)]
        return [self._rng.choice(training)] if training else []

    @property
    def pace(self) -> Path:
        """The file with the least duration of a step."""
        return self._seconds("pace", self.settings.step_s)

    def clock(self, peer: int) -> Path:
        """Return the file with the clock offset of the peer in a place."""
        return self._seconds(f"clock-{peer}", 0.0)

    def _seconds(self, name: str, first_s: float) -> Path:
        path = self.folder / name
        if not path.exists():
            set_seconds(path, first_s)
        return path

    def _start(self, peer: int, folder: Path, command: Sequence[str]) -> None:
        life = Life(peer, str(folder), time.time())
        self.lives.append(life)
        before = self.running.pop(peer, None)
        if before is not None:
            self._left.append(before)
        output = self.folder / f"{len(self.lives)}-{'dht' if peer == BOOTSTRAP else f'peer-{peer}'}.said.txt"
        self.running[peer] = Running(self.network.command(peer + 1, command), life, output)

    def training(self) -> list[Running]:
        """Return the latest process of each place, without the bootstrap peer."""
        return [process for peer, process in self.running.items() if peer != BOOTSTRAP]

    def others(self, peer: int) -> list[Running]:
        """Return the live processes except ``peer`` and the bootstrap peer."""
        return [each for number, each in self.running.items() if number not in (BOOTSTRAP, peer) and each.is_alive]

    def any_alive(self) -> bool:
        """Return whether a peer other than the bootstrap peer is alive."""
        return any(process.is_alive for process in self.training())

    def trains(self, peer: int) -> bool:
        """Return whether it has just finished a step and committed a round with others."""
        process = self.running[peer]
        return process.is_alive and min(process.tail.steps_s, process.tail.committed_s) > time.time() - _TRAINS_S

    def read(self) -> None:
        """Read the new records of all live processes."""
        for process in (*self.running.values(), *self._left):
            if process.is_alive:
                process.tail.read()

    def end(self) -> None:
        """Kill all that is left of the processes."""
        for process in (*self.running.values(), *self._left):
            process.end()
