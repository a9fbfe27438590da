"""``python -m benchmarks.decentralised.swarm``: what each replica of a large swarm spends on the others.

M processes start together and train; one more joins and leaves; then a member is killed, and then the founder. Prints
the tables, and keeps the rows in swarm.json. A member that is lost otherwise is listed in its row; the run continues
without it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.decentralised.guest import Guest
from benchmarks.decentralised.plan import Job
from benchmarks.markdown import table
from benchmarks.wan.counters import busy_s
from benchmarks.wan.network import Loopback, Network
from benchmarks.wan.plan import Link, Method

__all__: list[str] = []

RESULTS = Path(__file__).parent / "swarm.json"
RTT_S = 0.1
LEAST_MEMBERS = 4

_VALUES = 393_216
_STEADY_S = 40.0
_POLL_S = 0.1
CHANGES = ("join", "leave", "kill", "founder killed")
"""The changes, in order. The replica that joins is the one that leaves; a member from the start is killed."""

_OF_ROUNDS = ("header", "vote")

Counts = Mapping[int, Mapping[str, Any]]  # replica -> its counts


class Swarm:
    """The replicas of one run.

    Args:
        apart_s: the time between the starts of two processes.

    Attributes:
        lost: the members that have ended by themselves.
    """

    def __init__(self, network: Network, members: int, folder: Path, limit_s: float, apart_s: float) -> None:
        addresses = tuple(network.address(node) for node in range(members + 1))
        self._network = network
        self._job = Job(Method("swarm", "member"), members, addresses, str(folder), limit_s, _VALUES)
        self._apart_s = apart_s
        self._known: list[str] = []
        self._alive: dict[int, Guest] = {}
        self._began: list[Guest] = []
        self.lost: list[int] = []

    def start(self) -> None:
        """Start all members and let them train."""
        for number in range(self._job.num_replicas):
            self._begin(number)
            time.sleep(self._apart_s)
        self._each(lambda guest: guest.wait_for("member"))
        self._each(lambda guest: guest.command("begin"))

    def change(self, name: str) -> float:
        """Make one of `CHANGES`, and return its time."""
        if name == "join":
            guest = self._begin(self._job.num_replicas)
            guest.wait_for("asks")
            return float(guest.events["asks"])
        guest = self._alive.pop(min(self._alive) if name == "founder killed" else max(self._alive))
        if name == "leave":
            guest.command("leave")
            guest.wait_for("left")
            return float(guest.events["leaving"])
        guest.kill()
        return float(guest.events["killed"])

    def settle(self, since_s: float = 0.0) -> tuple[int, ...]:
        """Wait until a round of all living members has been committed after ``since_s``, and return the members.

        Raises:
            TimeoutError: if that takes longer than the job's time-out.
        """
        deadline_s = time.monotonic() + self._job.timeout_s

        def has_round(guest: Guest) -> bool:
            return bool(guest.events.get(f"contributed with {len(self._alive)}", -1.0) >= since_s)

        while not all(map(has_round, self._alive.values())):
            self._each(lambda guest: has_round(guest) or guest.receive(_POLL_S))
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"No round of all {len(self._alive)} members was committed within {self._job.timeout_s:g} s."
                )
        return tuple(sorted(self._alive))

    def collect(self, name: str) -> Counts:
        """Return the counts of all members so far; ``name`` must be new in every call."""
        self._each(lambda guest: guest.command(name))
        self._each(lambda guest: guest.wait_for(name))
        return {number: each.events["counts"] for number, each in self._alive.items()}

    def end(self) -> None:
        """Kill all processes."""
        for each in self._began:
            each.kill()
        for each in self._began:
            each.end()

    def _each(self, do: Callable[[Guest], object]) -> None:
        """Call ``do`` with every living member; a member that has ended is lost."""
        for number, guest in list(self._alive.items()):
            try:
                do(guest)
            except (RuntimeError, BrokenPipeError):
                del self._alive[number]
                self.lost.append(number)

    def _begin(self, number: int) -> Guest:
        here = self._network.command(number, [])
        address = self._network.address(number)
        guest = Guest(self._job, number, address, self._known, "benchmarks.decentralised.member", here)
        self._alive[number] = guest
        self._began.append(guest)
        if not self._known:
            guest.wait_for("introduced")
            self._known = guest.events["addresses"]
        return guest


def run_one(network: Network, members: int, given: argparse.Namespace) -> dict[str, Any]:
    """Run one swarm from its start to its end, and return its row."""
    folder = given.runs.resolve() / f"swarm-{members}"
    folder.mkdir(parents=True, exist_ok=True)
    swarm = Swarm(network, members, folder, given.limit_s, given.apart_s)
    began_s, busy = time.monotonic(), busy_s()
    try:
        with network.up(Link("swarm", members + 1, 100e6, RTT_S)):
            swarm.start()
            started_s = time.monotonic() - began_s
            swarm.settle()
            counts = swarm.collect("warm")
            start = _sent(counts, {}, of_rounds=False)
            time.sleep(_STEADY_S)
            phases, before = {}, swarm.collect("steady")
            steady = _steady(before, counts)
            for name in CHANGES:
                at_s = swarm.change(name)
                alive = swarm.settle(at_s)
                counts = swarm.collect(f"after {name}")
                phases[name] = _change(counts, before, at_s, alive)
                before = counts
                print(members, name, phases[name], flush=True)
    finally:
        swarm.end()
    share = (busy_s() - busy) / (time.monotonic() - began_s) / (os.cpu_count() or 1)
    return {
        "members": members,
        "lost": swarm.lost,
        "rtt_s": given.rtt_s,
        "start": {**start, "s": started_s},
        "steady": steady,
        **phases,
        "cpu_busy": share,
    }


def _sent(counts: Counts, before: Counts, *, of_rounds: bool) -> dict[str, float]:
    """Return the messages and bytes that a member has sent since ``before``, for rounds or for all else.

    It is the mean over the members in ``before``, or over all if ``before`` is empty.
    """
    here = [number for number in counts if number in before or not before]
    sums = dict.fromkeys(("messages", "bytes"), 0.0)
    for name in sums:
        for number in here:
            was = before[number][name] if before else {}
            kinds = [kind for kind in counts[number][name] if (kind in _OF_ROUNDS) == of_rounds]
            sums[name] += sum(counts[number][name][kind] - was.get(kind, 0) for kind in kinds)
    return {name: each / len(here) for name, each in sums.items()}


def _steady(counts: Counts, before: Counts) -> dict[str, Any]:
    """Return what a round of an undisturbed swarm costs a member, in the mean."""
    before = {number: before[number] for number in counts}
    complete = [
        {
            name
            for name, times in each["rounds"].items()
            if "committed" in times and name not in before[number]["rounds"]
        }
        for number, each in counts.items()
    ]
    rounds = sorted(set.intersection(*complete))

    def times(name: str, what: str) -> list[float]:
        return [each["rounds"][name][what] for each in counts.values()]

    votes_s = [max(times(name, "committed")) - max(times(name, "voted")) for name in rounds]
    rounds_s = [max(times(name, "committed")) - max(times(name, "submitted")) for name in rounds]

    def mean(what: str, of: Counts = counts) -> float:
        return float(sum(each[what] for each in of.values())) / len(of)

    def used(what: str) -> float:
        return (mean(what) - mean(what, before)) / len(rounds)

    sent = _sent(counts, before, of_rounds=True)
    return {
        "rounds": len(rounds),
        "messages": sent["messages"] / len(rounds),
        "bytes": sent["bytes"] / len(rounds),
        "void": max(each["void"] - before[number]["void"] for number, each in counts.items()),
        "cpu_s": used("cpu_s"),
        "daemon_cpu_s": used("daemon_cpu_s"),
        "memory_bytes": mean("memory_bytes"),
        "daemon_memory_bytes": mean("daemon_memory_bytes"),
        "vote_s": [statistics.median(votes_s), max(votes_s)],
        "round_s": [statistics.median(rounds_s), max(rounds_s)],
    }


def _change(counts: Counts, before: Counts, at_s: float, alive: Sequence[int]) -> dict[str, Any]:
    """Return what the change to a view of ``alive``, begun at ``at_s``, costs a member in the mean."""
    adopted_s = [
        next(view["at_s"] for view in each["views"] if view["at_s"] > at_s and sorted(view["members"]) == list(alive))
        for number, each in counts.items()
        if number in before
    ]
    void = max(each["void"] - before[number]["void"] for number, each in counts.items() if number in before)
    return {**_sent(counts, before, of_rounds=False), "void": void, "adopted_s": max(adopted_s) - at_s}


def _members(row: Mapping[str, Any]) -> str:
    lost = row.get("lost", [])
    return f"{row['members']}{f', {len(lost)} lost' if lost else ''}"


def _tables(rows: Iterable[Mapping[str, Any]]) -> str:
    body = []
    for row in rows:
        one, trip_s = row["steady"], row["rtt_s"] / 2
        votes = [f"{each / trip_s:.1f}" if trip_s else f"{1e3 * each:.0f} ms" for each in one["vote_s"]]
        body.append(
            [
                _members(row),
                one["rounds"],
                one["void"],
                f"{one['messages']:.0f} ({one['bytes'] / 1e3:.0f})",
                ", ".join(votes),
                f"{one['round_s'][0]:.2f}",
                f"{1e3 * one['cpu_s']:.0f} + {1e3 * one['daemon_cpu_s']:.0f}",
                f"{one['memory_bytes'] / 1e6:.0f} + {one['daemon_memory_bytes'] / 1e6:.0f}",
                f"{100 * row['cpu_busy']:.0f} %",
            ]
        )
    head = ["M", "rounds", "void", "messages (kB) per round", "vote: median, max (trips)", "round (s)"]
    steady = table([*head, "CPU per round (ms)", "memory (MB)", "both cores busy"], body)
    body = [
        [
            _members(row),
            f"{row['start']['messages']:.0f} ({row['start']['bytes'] / 1e3:.0f}); {row['start']['s']:.0f} s",
        ]
        + [
            f"{each['messages']:.0f} ({each['bytes'] / 1e3:.0f}); {each['adopted_s']:.2f} s; {each['void']}"
            for each in (row[name] for name in CHANGES)
        ]
        for row in rows
    ]
    return steady + "\n\n" + table(["M", "start", *CHANGES], body)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decentralised.swarm", description=__doc__)
    parser.add_argument(
        "--members", type=int, nargs="*", default=[4, 8, 16, 32], help="numbers of members; none: only print the tables"
    )
    parser.add_argument("--wan", type=Path, help="script that makes the network; without it, loopback is used")
    parser.add_argument("--prefix", default="ws", help="WAN_PREFIX for the script")
    parser.add_argument("--apart-s", type=float, default=1.0, help="time between the starts of two processes")
    parser.add_argument("--limit-s", type=float, default=900.0, help="the time-out of everything")
    parser.add_argument("--runs", type=Path, default=Path("runs/decentralised"), help="folder for keys")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another file, for trials")
    given = parser.parse_args(arguments)
    if few := [members for members in given.members if members < LEAST_MEMBERS]:
        parser.error(
            f"--members must be at least {LEAST_MEMBERS}, got {few[0]}: two members are killed one after the other, "
            "and each time more than half must be left. Nothing was started."
        )
    network = Network(given.wan, given.prefix) if given.wan else Loopback()
    os.environ.update(network.environment)
    given.rtt_s = RTT_S if given.wan else 0.0
    rows = json.loads(given.results.read_text(encoding="utf-8")) if given.results.exists() else []
    for members in given.members:
        made = run_one(network, members, given)
        rows = [row for row in rows if (row["members"], row["rtt_s"]) != (members, given.rtt_s)] + [made]
        given.results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(_tables(sorted(rows, key=lambda row: (row["rtt_s"], row["members"]))))


if __name__ == "__main__":
    main()
