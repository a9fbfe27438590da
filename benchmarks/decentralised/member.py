"""``python -m benchmarks.decentralised.member``: one replica of a large swarm, started by `swarm` as in `guest`.

Its inner steps are pauses. It counts the messages that it sends and notes when it votes, and reports all of it on
command.
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
from benchmarks.decentralised.guest import HostConnection
from benchmarks.decentralised.plan import Job

__all__: list[str] = []

_PAUSE_S = 0.2


class Counts:
    """Counts what a transport does."""

    def __init__(self, transport: Any) -> None:
        from diloco.membership import NextView
        from diloco.protocol import actions, events

        self.messages: Counter[str] = Counter()  # by kind; without heartbeats, which are packed only once
        self.bytes: Counter[str] = Counter()
        self.views: list[dict[str, Any]] = []  # the time of adoption and the members
        self.rounds: dict[str, dict[str, float]] = {}  # the times of submission, vote and commit
        self.void = 0
        manager: Any = importlib.import_module("diloco.transport.connections.connection_manager")
        machine: Any = importlib.import_module("diloco.protocol.machine").Machine  # this process has only one
        pack, handle, adopt = manager.pack, machine.handle, transport.on_change

        def packed(message: Mapping[str, Any], *blob: bytes) -> bytes:
            data: bytes = pack(message, *blob)
            self.messages[message["kind"]] += 1
            self.bytes[message["kind"]] += len(data)
            return data

        def handled(itself: Any, event: events.Event, now_s: float) -> list[actions.Action]:
            if isinstance(event, events.Submitted):
                self.rounds[str(event.contribution.round)] = {"submitted": now_s}
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

    def snapshot(self) -> dict[str, Any]:
        """Return all counts as JSON values, with the CPU time and memory of the process and its libp2p daemon."""
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
    host, job = HostConnection(), Job.from_record(given["job"])
    import torch

    from benchmarks.decentralised.peers import addresses_of, make_peer, wait_for_members
    from benchmarks.decentralised.training import Trainer, work_of
    from diloco.events import Event, RoundCommitted, RoundVoid
    from diloco.transport import join

    torch.set_num_threads(1)
    host.report("imported")
    connected = make_peer(job, given["number"], given["address"], given["known"])
    transport, at_start = connected.transport, given["number"] < job.num_replicas
    counts = Counts(transport)
    host.report("introduced", addresses=addresses_of(transport))

    def note(event: Event) -> None:
        if isinstance(event, RoundVoid):
            counts.void += 1
        elif isinstance(event, RoundCommitted) and transport.replica in event.contributors:
            host.report(f"contributed with {len(event.contributors)}")

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
        host.report("asks")
        trains.diloco.steps = join(connected, job.timeout_s)
    host.report("member")
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        while True:
            commands.put(host.receive())

    threading.Thread(target=listen, daemon=True).start()
    if at_start:
        commands.get()  # all members begin together
    while True:
        command = commands.get() if not commands.empty() else ""
        if command == "end":
            break
        if command == "leave":
            host.report("leaving")
            transport.leave()
            host.report("left")
            break
        if command:
            host.report(command, counts=counts.snapshot())
        trains.step()
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
