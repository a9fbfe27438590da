"""``python -m benchmarks.decentralised.member``: one replica of a swarm of many, started by `swarm`; see `guest`.

Its inner steps are pauses. It counts what it says to others and when it votes, and tells all of it when it is asked.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.processes import descendants
from benchmarks.decentralised.guest import Voice
from benchmarks.decentralised.plan import Job

__all__: list[str] = []

_PAUSE_S = 0.2


class Counts:
    """What a transport does from now on."""

    def __init__(self, transport: Any) -> None:
        from diloco.membership.reports import NextView
        from diloco.protocol import actions, events

        self.messages: Counter[str] = Counter()  # by kind; heartbeats, packed once, are not among them
        self.bytes: Counter[str] = Counter()
        self.views: list[dict[str, Any]] = []  # when adopted, and the members
        self.rounds: dict[str, dict[str, float]] = {}  # when handed in, voted for and committed, by the clock
        self.void = 0
        manager: Any = importlib.import_module("diloco.transport.connections.connection_manager")
        machine: Any = importlib.import_module("diloco.protocol.machine").Machine  # this process has one
        pack, handle, adopt = manager.pack, machine.handle, transport.on_change

        def packed(message: Mapping[str, Any], *blob: bytes) -> bytes:
            data: bytes = pack(message, *blob)
            self.messages[message["kind"]] += 1
            self.bytes[message["kind"]] += len(data)
            return data

        def handled(itself: Any, event: events.Event, now_s: float) -> list[actions.Action]:
            if isinstance(event, events.Submitted):
                self.rounds[str(event.contribution.round)] = {"handed_in": now_s}
            elif isinstance(event, events.Computed):
                self.rounds[str(event.round)]["voted"] = now_s
            wanted: list[actions.Action] = handle(itself, event, now_s)
            for action in wanted:
                if isinstance(action, actions.Commit):
                    self.rounds[str(action.average.round)]["committed"] = now_s
            return wanted

        def adopted(following: NextView) -> Mapping[str, Any]:
            members = following.view.members if following.view else ()
            self.views.append({"at_s": time.monotonic(), "members": members})
            noted: Mapping[str, Any] = adopt(following)
            return noted

        manager.pack, machine.handle, transport.on_change = packed, handled, adopted

    def told(self) -> dict[str, Any]:
        """All of it so far, as JSON, with what the process and its libp2p daemon have used."""
        used, daemons = resource.getrusage(resource.RUSAGE_SELF), descendants(os.getpid())
        return {
            "messages": dict(self.messages),
            "bytes": dict(self.bytes),
            "views": list(self.views),
            "rounds": dict(self.rounds),
            "void": self.void,
            "cpu_s": used.ru_utime + used.ru_stime,
            "daemon_cpu_s": sum(map(_cpu_s, daemons)),
            "memory_bytes": _memory_bytes(os.getpid()),
            "daemon_memory_bytes": sum(map(_memory_bytes, daemons)),
        }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: Sequence[str]) -> None:
    given = json.loads(arguments[0])
    voice, job = Voice(), Job.from_record(given["job"])
    import torch

    from benchmarks.decentralised.peers import addresses_of, make_peer, wait_for_members
    from benchmarks.decentralised.training import Trainer, work_of
    from diloco.events import Event, RoundCommitted, RoundVoid
    from diloco.transport.peers.connected import join

    torch.set_num_threads(1)
    voice.say("imported")
    connected = make_peer(job, given["number"], given["address"], given["known"])
    transport, at_start = connected.transport, given["number"] < job.num_replicas
    counts = Counts(transport)
    voice.say("introduced", addresses=addresses_of(transport))

    def note(event: Event) -> None:
        if isinstance(event, RoundVoid):
            counts.void += 1
        elif isinstance(event, RoundCommitted) and transport.replica in event.contributors:
            voice.say(f"contributed with {len(event.contributors)}")

    def trainer() -> Trainer:
        return Trainer(work_of(job.values), transport, computes=False, pause_s=_PAUSE_S, on_event=note)

    if at_start:
        if connected.joining:
            join(connected, job.timeout_s)
        wait_for_members(transport, job.num_replicas, job.timeout_s)
        trains = trainer()
    else:
        trains = trainer()
        trains.diloco.take_over(transport.view.members)
        voice.say("asks")
        trains.diloco.steps = join(connected, job.timeout_s)
    voice.say("member")
    words: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        while True:
            words.put(voice.hear())

    threading.Thread(target=listen, daemon=True).start()
    if at_start:
        words.get()  # all begin together
    while True:
        word = words.get() if not words.empty() else ""
        if word == "end":
            break
        if word == "leave":
            voice.say("leaving")
            transport.leave()
            voice.say("left")
            break
        if word:
            voice.say(word, counts=counts.told())
        trains.step()
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
