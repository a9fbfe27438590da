"""The peers of a run: how each transport's are started, and which there are."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.events import BOOTSTRAP
from benchmarks.chaos.network import Loopback
from benchmarks.chaos.paced import set_seconds
from benchmarks.chaos.processes import Life, Running, python
from benchmarks.chaos.settings import Settings, write_text

__all__ = ["Peers"]

_TRAINS_S = 6.0  # a peer that has finished a step within so long trains


class Peers:
    """All processes of a run, those that have ended as well.

    Args:
        settings: of the run.
        folder: for everything; made.
        network: where they are; peer p is in node p + 1, and node 0 is the standing peer's.
    """

    def __init__(self, settings: Settings, folder: Path, network: Loopback) -> None:
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

    # Starting them.

    def start_bootstrap(self) -> None:
        """The standing peer of a swarm, always with the same key and port."""
        listen = f"/ip4/{self.network.address(0)}/tcp/{self._port}"
        options = ["--listen", listen, "--identity", str(self.folder / "dht.key"), "--no-map-ports"]
        self._start(BOOTSTRAP, self.folder / "dht", python("diloco", "dht", *options))

    def start(self, peer: int, folder: Path | None = None) -> None:
        """A peer in ``peer``'s place, in a folder of its own; or what goes on in a folder."""
        command = self._torch(peer) if self.settings.transport == "torch" else self._hivemind(peer, folder)
        home = Path(command[command.index("--out" if "--out" in command else "--resume") + 1])
        of_torch = self.settings.transport == "torch" and peer  # all but the first have a folder in the one given
        paced = python("benchmarks.chaos.paced", str(self.pace), str(self.clock(peer)), *command)
        self._start(peer, home / f"replica-{peer}" if of_torch else home, paced)

    def _hivemind(self, peer: int, folder: Path | None) -> list[str]:
        joins = [self.running[BOOTSTRAP].address()] if BOOTSTRAP in self.running else []
        joins += [other.address() for other in self._one_training(peer)]
        where = ["--swarm.listen", f"/ip4/{self.network.address(peer + 1)}/tcp/0", "--join", *filter(None, joins)]
        if folder is not None and (folder / "checkpoints" / "latest").exists():
            return ["train", "--resume", str(folder), *where]
        folder = self.folder / f"peer-{peer}-{next(self._generations)}"
        numbered = ["--replica", str(peer)] if self.settings.numbered else []
        return ["train", *self.settings.arguments(), *numbered, "--data", str(self._data), "--out", str(folder), *where]

    def _torch(self, peer: int) -> list[str]:
        """The same command whenever it is started, but for the rendezvous: any replica that lives and has trained."""
        meeting = f"{self.network.address(1)}:{self._port}"
        for other in self._one_training(peer) or [each for each in self.others(peer) if each.tail.facts][:1]:
            told = other.tail.facts["control addresses"]
            meeting = re.findall(rf"\b{other.life.peer} at ([^\s,]+)", told)[0]
        place = ["--replica", str(peer), "--rendezvous", meeting, "--out", str(self.folder / f"peer-{peer}")]
        return ["train", *self.settings.arguments(), "--data", str(self._data), *place]

    def _one_training(self, peer: int) -> list[Running]:
        """One of the others that train, if any does."""
        training = [each for each in self.others(peer) if self.trains(each.life.peer)]
        return [self._rng.choice(training)] if training else []

    @property
    def pace(self) -> Path:
        """The file that says how long a step takes at least."""
        return self._seconds("pace", self.settings.step_s)

    def clock(self, peer: int) -> Path:
        """The file that says what the clock in a peer's place is off by."""
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

    # Which there are.

    def training(self) -> list[Running]:
        """Those that train, or did; not the standing peer."""
        return [process for peer, process in self.running.items() if peer != BOOTSTRAP]

    def others(self, peer: int) -> list[Running]:
        """Those that live, without one and the standing peer."""
        return [each for number, each in self.running.items() if number not in (BOOTSTRAP, peer) and each.is_alive]

    def any_alive(self) -> bool:
        return any(process.is_alive for process in self.training())

    def trains(self, peer: int) -> bool:
        """Whether it has just finished a step, and had its part in a round."""
        process = self.running[peer]
        return process.is_alive and min(process.tail.steps_s, process.tail.committed_s) > time.time() - _TRAINS_S

    def read(self) -> None:
        """Go on reading what they write."""
        for process in (*self.running.values(), *self._left):
            if process.is_alive:
                process.tail.read()

    def end(self) -> None:
        """All that is left of them."""
        for process in (*self.running.values(), *self._left):
            process.end()
