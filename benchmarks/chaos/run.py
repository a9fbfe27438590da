"""Carry out a plan on real peers, and leave behind what happened."""

from __future__ import annotations

import heapq
import itertools
import json
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.chaos.network import Loopback
from benchmarks.chaos.plan import BOOTSTRAP, Event, least_healthy
from benchmarks.chaos.processes import Life, Running, python
from benchmarks.chaos.settings import Settings, write_text

__all__ = ["HAPPENED", "LIVES", "Conductor"]

LIVES, HAPPENED = "lives.json", "happened.jsonl"

_TICK_S = 0.1
_START_LIMIT_S = 180.0
_TRAINS_S = 6.0  # a peer that has finished a step within so long trains
_SLOW_S = (0.4, 0.1)  # frozen and let run, in turns


class Conductor:
    """Starts the peers, does to them what is planned, and waits for their end.

    A disturbance that would leave too few peers that really train waits until others are back, and all that follows
    waits as long.

    Args:
        settings: of the swarm.
        folder: for everything; made.
        network: where the peers are.
        say: told what happens.
    """

    def __init__(
        self, settings: Settings, folder: Path, network: Loopback, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.network = network
        self.say = say
        self.lives: list[Life] = []
        self.running: dict[int, Running] = {}
        self._left: list[Running] = []
        self._generations = itertools.count(1)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._rng = random.Random(0)
        self._began_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._data = write_text(folder)
        self._port = network.free_port()

    def run(self, events: Sequence[Event]) -> None:
        """All of it; what is left of the processes is ended whatever happens."""
        try:
            with self.network.up(self.settings.peers + 1):
                self._start_all()
                delay_s = 0.0
                for number, event in enumerate(events):
                    self._until(self._began_s + event.at_s + delay_s)
                    if not self._anybody():
                        self.say("the run is over, and not all was done to it")
                        break
                    waited_s = self._until_enough(event)
                    delay_s += waited_s
                    self._happens(number, event, waited_s)
                self._finish()
        finally:
            for process in (*self.running.values(), *self._left):
                process.end()
            self._save()

    # The processes.

    def start_bootstrap(self) -> None:
        """The standing peer, always with the same key and port."""
        listen = f"/ip4/{self.network.address(0)}/tcp/{self._port}"
        options = ["--listen", listen, "--identity", str(self.folder / "dht.key"), "--no-map-ports"]
        self._start(BOOTSTRAP, self.folder / "dht", python("diloco", "dht", *options))

    def start_peer(self, peer: int, folder: Path | None = None) -> None:
        """A peer in ``peer``'s place, in a folder of its own; or what goes on in a folder."""
        joins = [self.running[BOOTSTRAP].address()] if BOOTSTRAP in self.running else []
        others = [each for number, each in self.running.items() if number not in (BOOTSTRAP, peer) and each.is_alive]
        if self._began_s and others:
            joins.append(self._rng.choice(others).address())
        where = ["--swarm.listen", f"/ip4/{self.network.address(peer + 1)}/tcp/0", "--join", *filter(None, joins)]
        if folder is not None and (folder / "checkpoints" / "latest").exists():
            arguments = ["train", "--resume", str(folder), *where]
        else:
            folder = self.folder / f"peer-{peer}-{next(self._generations)}"
            arguments = ["train", *self.settings.arguments(), "--data", str(self._data), "--out", str(folder), *where]
        command = python("benchmarks.chaos.paced", str(self.settings.step_s), *arguments)
        self._start(peer, folder, command)

    def _start(self, peer: int, folder: Path, command: Sequence[str]) -> None:
        life = Life(peer, str(folder), time.time())
        self.lives.append(life)
        before = self.running.pop(peer, None)
        if before is not None:
            self._left.append(before)
        said = folder.with_suffix(".said.txt")
        self.running[peer] = Running(self.network.command(peer + 1, command), life, said)

    def _start_all(self) -> None:
        self.start_bootstrap()
        limit_s = time.time() + _START_LIMIT_S
        self._wait_for(lambda: bool(self.running[BOOTSTRAP].address()), limit_s, "the standing peer")
        for peer in range(self.settings.peers):
            self.start_peer(peer)
        self._wait_for(lambda: all(each.tail.committed_s for each in self._peers()), limit_s, "a first round")
        self._began_s = time.time()
        self.say(f"all {self.settings.peers} train")

    def _peers(self) -> list[Running]:
        return [process for peer, process in self.running.items() if peer != BOOTSTRAP]

    def _anybody(self) -> bool:
        return any(process.is_alive for process in self._peers())

    def _trains(self, peer: int) -> bool:
        process = self.running[peer]
        return process.is_alive and min(process.tail.steps_s, process.tail.committed_s) > time.time() - _TRAINS_S

    # Time.

    def _tick(self) -> None:
        while self._due and self._due[0][0] <= time.time():
            heapq.heappop(self._due)[2]()
        for process in (*self.running.values(), *self._left):
            if process.is_alive:
                process.tail.read()
        next_s = self._due[0][0] if self._due else float("inf")
        time.sleep(max(0.0, min(_TICK_S, next_s - time.time())))

    def _until(self, when_s: float) -> None:
        while time.time() < when_s:
            self._tick()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.time() + seconds, next(self._order), action))

    def _wait_for(self, holds: Callable[[], bool], limit_s: float, what: str) -> None:
        while not holds():
            self._tick()
            if time.time() > limit_s or not all(process.is_alive for process in self.running.values()):
                raise SystemExit(f"{what} was not there in time, or a peer ended; see {self.folder}/*.said.txt")

    def _until_enough(self, event: Event) -> float:
        """Wait until enough of the others train, and the one in question does; how long that took."""
        began_s = time.time()
        if event.kind not in ("kill", "freeze", "leave", "slow", "cut"):
            return 0.0

        def enough() -> bool:
            others = sum(self._trains(peer) for peer in range(self.settings.peers) if peer != event.peer)
            return others >= least_healthy(self.settings.peers) and self._trains(event.peer)

        while not enough() and time.time() < began_s + self.settings.back_s and self._anybody():
            self._tick()
        return time.time() - began_s

    # What is done to them.

    def _happens(self, number: int, event: Event, waited_s: float) -> None:
        self._note(number, event, waited_s)
        process = self.running.get(event.peer)
        if event.kind == "start bootstrap":
            self.start_bootstrap()
            return
        assert process is not None
        if event.kind in ("resume", "join"):
            _ = process.is_alive
            self.start_peer(event.peer, Path(process.life.folder) if event.kind == "resume" else None)
        elif not process.is_alive:
            self.say("  (it has ended by itself)")
        elif event.kind in ("kill", "kill bootstrap"):
            process.life.ended_by = "kill"
            process.signal(signal.SIGKILL, with_daemon=event.with_daemon)
        elif event.kind == "leave":
            process.life.ended_by = "leave"
            process.signal(signal.SIGINT)
        else:
            process.life.disturbed.append((time.time(), time.time() + event.seconds))
            self._begin_and_end(process, event)

    def _begin_and_end(self, process: Running, event: Event) -> None:
        ends_s = time.time() + event.seconds

        def let_run() -> None:
            process.life.disturbed[-1] = (process.life.disturbed[-1][0], time.time())

        def freeze() -> None:
            process.signal(signal.SIGSTOP, with_daemon=event.with_daemon)
            whole = event.kind == "freeze"
            self._later(event.seconds if whole else _SLOW_S[0], thaw)

        def thaw() -> None:
            process.signal(signal.SIGCONT, with_daemon=event.with_daemon)
            if event.kind == "slow" and time.time() < ends_s:
                self._later(_SLOW_S[1], freeze)
            else:
                let_run()

        def heal() -> None:
            self.network.heal(event.peer + 1)
            let_run()

        if event.kind == "cut":
            self.network.cut(event.peer + 1)
            self._later(event.seconds, heal)
        else:
            freeze()

    def _note(self, number: int, event: Event, waited_s: float) -> None:
        record: dict[str, Any] = {**asdict(event), "time_s": time.time(), "waited_s": round(waited_s, 1)}
        with (self.folder / HAPPENED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        who = "the standing peer" if event.peer == BOOTSTRAP else f"peer {event.peer}"
        waited = f" (waited {waited_s:.1f} s)" if waited_s > 1 else ""
        alive = sum(process.is_alive for process in self._peers())
        step = max(process.tail.step for process in self._peers())
        now_s = time.time() - self._began_s
        self.say(f"{now_s:6.1f} s  {number + 1:3}  {who}: {event.text}{waited}; {alive} alive, step {step}")

    # The end.

    def _finish(self) -> None:
        """Wait for all to be through, and for those who do not get there."""
        settled_s = time.time() + self.settings.back_s
        while self._anybody():
            self._tick()
            latest_s = max(process.tail.steps_s for process in self._peers())
            if time.time() > max(latest_s, settled_s) + 2 * self.settings.back_s:
                self.say("nobody finishes a step any more, and not all have ended")
                for process in self._peers():
                    process.signal(signal.SIGUSR1)
                time.sleep(1.0)
                break
        if BOOTSTRAP in self.running and self.running[BOOTSTRAP].is_alive:
            self.running[BOOTSTRAP].life.ended_by = "kill"
        self.say("over")

    def _save(self) -> None:
        for process in (*self.running.values(), *self._left):
            _ = process.is_alive
        records = {
            "began_s": self._began_s,
            "settings": asdict(self.settings),
            "lives": [life.to_record() for life in self.lives],
        }
        (self.folder / LIVES).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
