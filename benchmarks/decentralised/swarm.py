"""``python -m benchmarks.decentralised.swarm``: what being one of many costs a replica, as processes that train.

M replicas start together and train; one more joins and leaves; another one is killed; and so is the founder. Prints the
table, and keeps the rows in swarm.json. A member that the others go on without is named in its row, and not waited for.
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

_VALUES = 393_216
_STEADY_S = 40.0
_LOOK_S = 0.1
CHANGES = ("join", "leave", "kill", "founder killed")
"""What happens, one after the other: who joins is who leaves, and who is killed was there from the start."""

_OF_ROUNDS = ("header", "vote")

Told = Mapping[int, Mapping[str, Any]]  # replica -> what it has counted


class Swarm:
    """The replicas of one run.

    Args:
        apart_s: from the start of one process to that of the next.

    Attributes:
        lost: members that have ended though nobody ended them.
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
        """All members; they train from now on."""
        for number in range(self._job.num_replicas):
            self._begin(number)
            time.sleep(self._apart_s)
        self._each(lambda guest: guest.wait_for("member"))
        self._each(lambda guest: guest.ask("begin"))

    def change(self, name: str) -> float:
        """One of `CHANGES` happens; when."""
        if name == "join":
            guest = self._begin(self._job.num_replicas)
            guest.wait_for("asks")
            return float(guest.said["asks"])
        guest = self._alive.pop(min(self._alive) if name == "founder killed" else max(self._alive))
        if name == "leave":
            guest.ask("leave")
            guest.wait_for("left")
            return float(guest.said["leaving"])
        guest.kill()
        return float(guest.said["killed"])

    def settle(self, since_s: float = 0.0) -> tuple[int, ...]:
        """Until a round of all who live has gone through after ``since_s``; who they are."""
        deadline_s = time.monotonic() + self._job.timeout_s

        def is_through(guest: Guest) -> bool:
            return bool(guest.said.get(f"contributed with {len(self._alive)}", -1.0) >= since_s)

        while not all(map(is_through, self._alive.values())):
            self._each(lambda guest: is_through(guest) or guest.hear(_LOOK_S))
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no round of all {len(self._alive)} came within {self._job.timeout_s:g} s")
        return tuple(sorted(self._alive))

    def tell(self, name: str) -> Told:
        """What all have counted until now; ``name`` is new every time."""
        self._each(lambda guest: guest.ask(name))
        self._each(lambda guest: guest.wait_for(name))
        return {number: each.said["counts"] for number, each in self._alive.items()}

    def end(self) -> None:
        """All of them."""
        for each in self._began:
            each.kill()
        for each in self._began:
            each.end()

    def _each(self, do: Callable[[Guest], object]) -> None:
        """With all who live; who has ended is lost."""
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
            self._known = guest.said["addresses"]
        return guest


def run_one(network: Network, members: int, given: argparse.Namespace) -> dict[str, Any]:
    """One swarm from its start to its end; returns the row."""
    folder = given.runs.resolve() / f"swarm-{members}"
    folder.mkdir(parents=True, exist_ok=True)
    swarm = Swarm(network, members, folder, given.limit_s, given.apart_s)
    began_s, busy = time.monotonic(), busy_s()
    try:
        with network.up(Link("swarm", members + 1, 100e6, RTT_S)):
            swarm.start()
            started_s = time.monotonic() - began_s
            swarm.settle()
            told = swarm.tell("warm")
            start = _said(told, {}, of_rounds=False)
            time.sleep(_STEADY_S)
            phases, before = {}, swarm.tell("steady")
            steady = _steady(before, told)
            for name in CHANGES:
                at_s = swarm.change(name)
                alive = swarm.settle(at_s)
                told = swarm.tell(f"after {name}")
                phases[name] = _change(told, before, at_s, alive)
                before = told
                print(members, name, phases[name], flush=True)
    finally:
        swarm.end()
    share = (busy_s() - busy) / (time.monotonic() - began_s) / (os.cpu_count() or 1)
    start = {**start, "s": started_s}
    row = {
        "members": members,
        "lost": swarm.lost,
        "rtt_s": given.rtt_s,
        "start": start,
        "steady": steady,
        **phases,
        "cpu_busy": share,
    }
    return row


def _said(told: Told, before: Told, *, of_rounds: bool) -> dict[str, float]:
    """Messages and bytes of a member, mean: of rounds, or of all else. Of those who were there before, if any were."""
    here = [number for number in told if number in before or not before]
    sums = dict.fromkeys(("messages", "bytes"), 0.0)
    for name in sums:
        for number in here:
            was = before[number][name] if before else {}
            kinds = [kind for kind in told[number][name] if (kind in _OF_ROUNDS) == of_rounds]
            sums[name] += sum(told[number][name][kind] - was.get(kind, 0) for kind in kinds)
    return {name: each / len(here) for name, each in sums.items()}


def _steady(told: Told, before: Told) -> dict[str, Any]:
    """A round of an undisturbed swarm, for a member in the mean."""
    before = {number: before[number] for number in told}
    complete = [
        {
            name
            for name, times in each["rounds"].items()
            if "committed" in times and name not in before[number]["rounds"]
        }
        for number, each in told.items()
    ]
    rounds = sorted(set.intersection(*complete))

    def times(name: str, what: str) -> list[float]:
        return [each["rounds"][name][what] for each in told.values()]

    votes_s = [max(times(name, "committed")) - max(times(name, "voted")) for name in rounds]
    rounds_s = [max(times(name, "committed")) - max(times(name, "handed_in")) for name in rounds]

    def mean(what: str, of: Told = told) -> float:
        return float(sum(each[what] for each in of.values())) / len(of)

    def used(what: str) -> float:
        return (mean(what) - mean(what, before)) / len(rounds)

    said = _said(told, before, of_rounds=True)
    return {
        "rounds": len(rounds),
        "messages": said["messages"] / len(rounds),
        "bytes": said["bytes"] / len(rounds),
        "void": max(each["void"] - before[number]["void"] for number, each in told.items()),
        "cpu_s": used("cpu_s"),
        "daemon_cpu_s": used("daemon_cpu_s"),
        "memory_bytes": mean("memory_bytes"),
        "daemon_memory_bytes": mean("daemon_memory_bytes"),
        "vote_s": [statistics.median(votes_s), max(votes_s)],
        "round_s": [statistics.median(rounds_s), max(rounds_s)],
    }


def _change(told: Told, before: Told, at_s: float, alive: Sequence[int]) -> dict[str, Any]:
    """What a change of the view to ``alive``, begun at ``at_s``, took of a member in the mean."""
    adopted_s = [
        next(view["at_s"] for view in each["views"] if view["at_s"] > at_s and sorted(view["members"]) == list(alive))
        for number, each in told.items()
        if number in before
    ]
    void = max(each["void"] - before[number]["void"] for number, each in told.items() if number in before)
    return {**_said(told, before, of_rounds=False), "void": void, "adopted_s": max(adopted_s) - at_s}


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
    head = ["M", "rounds", "void", "messages (kB) a round", "vote: median, most (trips)", "round (s)"]
    steady = table([*head, "CPU a round (ms)", "memory (MB)", "both cores busy"], body)
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
    parser.add_argument("--members", type=int, nargs="*", default=[4, 8, 16, 32], help="none: only print the table")
    parser.add_argument("--wan", type=Path, help="script that makes the network; without it they are on loopback")
    parser.add_argument("--prefix", default="ws", help="WAN_PREFIX for the script")
    parser.add_argument("--apart-s", type=float, default=1.0, help="from one process's start to the next one's")
    parser.add_argument("--limit-s", type=float, default=900.0, help="nothing takes longer")
    parser.add_argument("--runs", type=Path, default=Path("runs/decentralised"), help="where keys go")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another file, for trials")
    given = parser.parse_args(arguments)
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
