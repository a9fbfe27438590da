"""Carries out a plan on real peers and records what happened."""

import heapq
import itertools
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.network import Loopback, Wan, link
from benchmarks.chaos.paced import set_seconds
from benchmarks.chaos.peers import Peers
from benchmarks.chaos.plan import BOOTSTRAP, RETURNS, Event, least_healthy
from benchmarks.chaos.processes import Running
from benchmarks.chaos.settings import Settings

LIVES, HAPPENED = "lives.json", "happened.jsonl"

_TICK_S = 0.1
_START_LIMIT_S = 180.0
_BEFORE_THE_END_S = 4.0  # how long before the end of the run a peer is frozen at most
_SIGNALS = {"group SIGINT": signal.SIGINT, "group SIGTERM": signal.SIGTERM}


class Conductor:
    """Starts the peers, carries out the planned events, and waits until all peers have ended.

    A disturbance that would leave too few training peers is postponed until others have recovered, and all later events
    with it. ``say`` receives a line of text about each event.
    """

    def __init__(self, settings: Settings, folder: Path, network: Loopback | Wan, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.network = network
        self.say = say
        self.peers = Peers(settings, folder, network)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._began_s = 0.0

    def run(self, events: Sequence[Event]) -> None:
        """Carry out the whole run. All processes are ended, also on an error."""
        try:
            with self.network.up(link(self.settings.peers + 1)):
                self._start_all()
                delay_s = 0.0
                for number, event in enumerate(events):
                    self._until(self._began_s + event.at_s + delay_s)
                    if not self.peers.any_alive():
                        self.say("All peers have ended before the last event.")
                        break
                    waited_s = self._until_enough(event)
                    delay_s += waited_s
                    self._happens(number, event, waited_s)
                self._finish()
        finally:
            self.peers.end()
            self._save()

    def _start_all(self) -> None:
        limit_s = time.time() + _START_LIMIT_S
        if self.settings.transport == "swarm":
            self.peers.start_bootstrap()
            standing = self.peers.running[BOOTSTRAP]
            self._wait_for(lambda: bool(standing.address()), limit_s, "the address of the bootstrap peer")
        for peer in range(self.settings.peers):
            self.peers.start(peer)
        self._wait_for(lambda: all(each.tail.committed_s for each in self.peers.training()), limit_s, "a first round")
        self._began_s = time.time()
        self.say(f"All {self.settings.peers} peers train.")

    def _tick(self) -> None:
        while self._due and self._due[0][0] <= time.time():
            heapq.heappop(self._due)[2]()
        self.peers.read()
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
            if time.time() > limit_s or not all(process.is_alive for process in self.peers.running.values()):
                raise SystemExit(f"A peer ended, or {what} did not appear in time. See {self.peers.folder}/*.said.txt.")

    def _until_enough(self, event: Event) -> float:
        """Wait until the affected peers and enough of the others train, and return the seconds waited."""
        began_s = time.time()
        if event.kind in RETURNS or not event.stalls:
            return 0.0
        self._start_again()

        def enough() -> bool:
            training = {peer for peer in range(self.settings.peers) if self.peers.trains(peer)}
            others = training - set(event.stalls)
            return len(others) >= self._needed(event) and training >= set(event.stalls)

        while not enough() and time.time() < began_s + self.settings.recovery_limit_s and self.peers.any_alive():
            self._tick()
        return time.time() - began_s

    def _start_again(self) -> None:
        """Restart peers that ended by themselves. The checks report the fault; the rest of the plan is carried out."""
        for peer, process in list(self.peers.running.items()):
            if peer != BOOTSTRAP and not process.is_alive and not process.life.ended_by and process.life.code:
                self.say(f"  (peer {peer} ended by itself with exit code {process.life.code} and is restarted)")
                self.peers.start(peer, Path(process.life.folder))

    def _needed(self, event: Event) -> int:
        """Return how many others must train; in a case with few peers, all of them."""
        return min(least_healthy(self.settings.peers), self.settings.peers - len(event.stalls))

    def _happens(self, number: int, event: Event, waited_s: float) -> None:
        if event.kind == "thaw at the end":
            self._until_the_end(event)
        self._note(number, event, waited_s)
        process = self.peers.running.get(event.peer)
        if event.kind == "start bootstrap":
            self.peers.start_bootstrap()
            return
        assert process is not None
        if event.kind in RETURNS:
            self._bring_back(process, event)
        elif not process.is_alive:
            self.say("  (it has ended by itself)")
        elif event.kind == "thaw at the end":
            self._thaw_at_the_end(process)
        elif event.timetable:
            self._begin_and_end(event)
        else:
            self._end(process, event)

    def _end(self, process: Running, event: Event) -> None:
        process.life.ended_by = event.kind
        if event.kind in _SIGNALS:
            process.signal_group(_SIGNALS[event.kind])
        elif event.kind == "leave":
            process.signal(signal.SIGINT)
        else:
            process.signal(signal.SIGKILL, with_daemon=event.with_daemon)
            return
        self._later(self.settings.leaves_s, partial(self._make_end, process))

    def _make_end(self, process: Running) -> None:
        """Kill a process that has not ended in time. Its exit code then shows the fault."""
        if process.is_alive:
            self.say(f"  (peer {process.life.peer} has not ended within {self.settings.leaves_s:g} s and is killed)")
            process.end()

    def _bring_back(self, process: Running, event: Event) -> None:
        """Restart a peer, or start a new one in its place, once the previous process has ended."""
        while process.is_alive:
            self._tick()
        set_seconds(self.peers.clock(event.peer), event.clock_s)
        self.peers.start(event.peer, Path(process.life.folder) if event.kind == "resume" else None)

    def _begin_and_end(self, event: Event) -> None:
        lives = [self.peers.running[peer].life for peer in event.stalls]
        for life in lives:
            life.disturbed.append((time.time(), time.time() + event.seconds))

        def let_run() -> None:
            for life in lives:
                life.disturbed[-1] = (life.disturbed[-1][0], time.time())

        process = self.peers.running[event.peer]
        for after_s, verb in event.timetable:
            self._later(after_s, partial(self._do, verb, process, event))
        self._later(event.timetable[-1][0], let_run)
        self._tick()

    def _do(self, verb: str, process: Running, event: Event) -> None:
        """One entry of a timetable."""
        if verb in ("stop", "continue"):
            number = signal.SIGSTOP if verb == "stop" else signal.SIGCONT
            process.signal(number, with_daemon=event.with_daemon)
        elif verb in ("shift", "set right"):
            set_seconds(self.peers.clock(event.peer), event.clock_s if verb == "shift" else 0.0)
        else:
            assert isinstance(self.network, Wan), "only events that the network can carry out are planned"
            for source, target in event.silenced or ((event.peer, 0),):
                self.network.do(verb, source + 1, target + 1)

    def _note(self, number: int, event: Event, waited_s: float) -> None:
        record: dict[str, Any] = {**asdict(event), "time_s": time.time(), "waited_s": round(waited_s, 1)}
        with (self.peers.folder / HAPPENED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        name = "bootstrap peer" if event.peer == BOOTSTRAP else f"peer {event.peer}"
        waited = f" (waited {waited_s:.1f} s)" if waited_s > 1 else ""
        alive = sum(process.is_alive for process in self.peers.training())
        step = max(process.tail.step for process in self.peers.training())
        now_s = time.time() - self._began_s
        self.say(f"{now_s:6.1f} s  {number + 1:3}  {name}: {event.text}{waited}; {alive} alive, step {step}")

    def _until_the_end(self, event: Event) -> None:
        """Wait until the others have few steps left."""
        last = self.settings.steps - _BEFORE_THE_END_S / self.settings.step_s
        while self._active() and max((each.tail.step for each in self.peers.others(event.peer)), default=last) < last:
            self._tick()

    def _thaw_at_the_end(self, process: Running) -> None:
        process.life.ended_by = "thaw at the end"
        process.life.disturbed.append((time.time(), time.time()))
        process.signal(signal.SIGSTOP, with_daemon=True)
        others = self.peers.others(process.life.peer)
        while self._active() and not any(each.tail.finished for each in others):
            self._tick()
        process.signal(signal.SIGCONT, with_daemon=True)
        process.life.disturbed[-1] = (process.life.disturbed[-1][0], time.time())
        self.say("  (thawed)")

    def _active(self) -> bool:
        """Return whether a peer is alive and any has finished a step recently; otherwise the run hangs."""
        latest_s = max(process.tail.steps_s for process in self.peers.training())
        return self.peers.any_alive() and time.time() < latest_s + 2 * self.settings.recovery_limit_s

    def _finish(self) -> None:
        """Wait until all peers have ended, or until no peer makes progress any more."""
        settled_s = time.time() + 3 * self.settings.recovery_limit_s
        while self.peers.any_alive():
            self._tick()
            if time.time() > settled_s and self.peers.any_alive() and not self._active():
                self.say("No peer finishes steps any more, but not all have ended.")
                for process in self.peers.training():
                    process.signal(signal.SIGUSR1)
                time.sleep(1.0)
                break
        if BOOTSTRAP in self.peers.running and self.peers.running[BOOTSTRAP].is_alive:
            self.peers.running[BOOTSTRAP].life.ended_by = "kill"
        self.say("The run has ended.")

    def _save(self) -> None:
        for process in self.peers.running.values():
            _ = process.is_alive
        records = {
            "began_s": self._began_s,
            "settings": asdict(self.settings),
            "lives": [asdict(life) for life in self.peers.lives],
        }
        (self.peers.folder / LIVES).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
