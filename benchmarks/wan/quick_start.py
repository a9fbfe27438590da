"""``python -m benchmarks.wan.quick_start --wan SCRIPT``: the quick start over home links, and peers that join it.

Three replicas run ``diloco train`` from begin to end over 20 Mbit/s and 40 ms, as it is and with a shared start of 200
steps. Then three peers train in a swarm, a step in 2.5 s, and at every tenth of the first 200 steps one more peer is
started, which joins, takes part in a round, and leaves. Each part's row is kept in quick_start.json, with the commit;
``--parts`` chooses.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from signal import SIGINT
from typing import Any

from benchmarks.chaos.network import Wan
from benchmarks.chaos.paced import set_seconds
from benchmarks.chaos.processes import Life, Running, python
from benchmarks.wan.commits import commit_of
from benchmarks.wan.network import Network
from benchmarks.wan.plan import Link

Row = dict[str, Any]
RESULTS = Path(__file__).with_name("quick_start.json")
MEMBERS, PORT, LIMIT_S, LOOK_S = 3, 29400, 1800.0, 0.1
LINK = Link("20 Mbit/s, 40 ms", MEMBERS, 20e6, 0.04)
WITH_JOINERS = Link(LINK.name, MEMBERS + 2, 20e6, 0.04)  # two at a time: one may still leave when the next one comes
START_STEPS, EVERY_STEPS, STEP_S = 200, 10, 2.5


def await_that(happened: Callable[[], bool], what: str) -> None:
    """Wait until something has happened.

    Raises:
        TimeoutError: after `LIMIT_S`.
    """
    until_s = time.monotonic() + LIMIT_S
    while not happened():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{what} in {LIMIT_S:.0f} s")
        time.sleep(LOOK_S)


def train(network: Network, home: Path, *options: str) -> Row:
    """Let three replicas train over TCP from begin to end, and return what each of them sent and the last summary."""
    with network.up(LINK), ExitStack() as running:
        began_s, peers = time.monotonic(), []
        for replica in range(MEMBERS):
            where = f"--transport tcp --replicas {MEMBERS} --replica {replica} --join {network.address(0)}:{PORT}"
            out = home / str(replica)
            command = python("diloco", "train", *where.split(), "--out", str(out), *options)
            folder = out / f"replica-{replica}" if replica else out
            life = Life(replica, str(folder), time.time())
            peers.append(Running(network.command(replica, command), life, home / f"{replica}.txt"))
            running.callback(peers[-1].end)
        await_that(lambda: all(map(_ended, peers)), "the replicas did not end")
        wall_s, sent_bytes = time.monotonic() - began_s, [network.sent_bytes(replica) for replica in range(MEMBERS)]
    if failed := [peer.printed()[-2000:] for peer in peers if peer.life.code]:
        raise SystemExit(failed[0])
    summaries = [json.loads((Path(peer.life.folder) / "summary.json").read_text(encoding="utf-8")) for peer in peers]
    same = len({each["global_params_digest"] for each in summaries}) == 1
    del summaries[0]["out"]  # a path of this machine
    return {"wall_s": wall_s, "wire_sent_bytes": sent_bytes, "same_digest": same, "summary": summaries[0]}


def join(network: Network, home: Path) -> Row:
    """Let three peers train in a swarm, start one more at every tenth step, and return when each was a member."""
    pace, clock = home / "pace", home / "clock"
    set_seconds(pace, STEP_S)
    set_seconds(clock, 0.0)
    with network.up(WITH_JOINERS), ExitStack() as running:

        def start(node: int, name: str, *where: str) -> Running:
            """Start a peer in a node. Its steps take 2.5 s, in place of an accelerator's work."""
            listen = ["--network.listen", f"{network.address(node)}:0", "--out", str(home / name)]
            trained = ["train", "--transport", "swarm", "--run", "quick", "--replicas", str(MEMBERS), *listen, *where]
            command = python("benchmarks.chaos.paced", str(pace), str(clock), *trained)
            peer = Running(
                network.command(node, command), Life(node, str(home / name), time.time()), home / f"{name}.txt"
            )
            running.callback(peer.end)
            return peer

        founder = start(0, "0")
        await_that(lambda: bool(founder.address()), "the founder printed no address")
        address = founder.address()
        for node in range(1, MEMBERS):
            start(node, str(node), "--join", address)
        started, joiners = [], dict[int, Running]()
        for number in range(START_STEPS // EVERY_STEPS):
            node = MEMBERS + number % 2
            if node in joiners:
                await_that(partial(_ended, joiners[node]), "a joiner did not leave")
            await_that(partial(_reached, founder, number * EVERY_STEPS), "the members do not train")
            started.append((founder.tail.step, time.time()))
            joiners[node] = joiner = start(node, f"joiner-{number}", "--join", address)
            await_that(partial(_took_part, joiner), "a joiner took part in no round")
            joiner.signal(SIGINT)
    return {"joins": _joins(home, started)}


def _ended(peer: Running) -> bool:
    return not peer.is_alive


def _reached(peer: Running, step: int) -> bool:
    peer.tail.read()
    return peer.tail.step >= step


def _took_part(peer: Running) -> bool:
    rounds = (each for each in _records(Path(peer.life.folder)) if each["event"] == "RoundCommitted")
    return any(each["replica"] in each["contributors"] for each in rounds)


def _records(folder: Path) -> list[Row]:
    """Return the complete lines of a run's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _joins(home: Path, started: Sequence[tuple[int, float]]) -> list[Row]:
    """Return for each joiner the step at which it was started, and when the founder counted it as a member."""
    views = [each for each in _records(home / "0") if each["event"] == "ViewChanged"]
    rows = []
    for number, (step, at_s) in enumerate(started):
        view = next(each for each in views if each["joined"] and each["time_s"] > at_s)
        took_part_s = next(
            each["time_s"]
            for each in _records(home / f"joiner-{number}")
            if each["event"] == "RoundCommitted" and each["replica"] in each["contributors"]
        )
        times_s = {"member_s": view["time_s"] - at_s, "took_part_s": took_part_s - at_s}
        rows.append({"started_at": step, "member_at": view["step"], **times_s})
    return rows


PARTS: dict[str, Callable[[Network, Path], Row]] = {
    "as it is": train,
    "with a shared start of 200 steps": lambda network, home: train(network, home, "--data-parallel-steps", "200"),
    "joins": join,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wan.quick_start", description=__doc__)
    parser.add_argument("--wan", type=Path, required=True, help="script that makes the network; needs root")
    parser.add_argument("--prefix", default="wb", help="WAN_PREFIX for the script")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS], help="the parts to run")
    given = parser.parse_args()
    rows: list[Row] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    for part in given.parts:
        with tempfile.TemporaryDirectory() as home:
            row = {"part": part, "commit": commit_of(Path(sys.executable))}
            row |= PARTS[part](Wan(given.wan, given.prefix), Path(home))
        rows = [each for each in rows if each["part"] != part] + [row]
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
