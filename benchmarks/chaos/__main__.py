"""``python -m benchmarks.chaos``: disturb real peers at random, and check what became of them.

Ends with exit code 1 where a check found a fault. ``--report`` looks at what an earlier run left behind. With
``--publish`` the run takes its place in results.json and the tables of the README.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.events import Rates
from benchmarks.chaos.network import Loopback, Wan
from benchmarks.chaos.plan import plan_events
from benchmarks.chaos.processes import python
from benchmarks.chaos.records import RunRecords
from benchmarks.chaos.report import publish, tables
from benchmarks.chaos.run import Conductor
from benchmarks.chaos.settings import COMMON, Settings
from benchmarks.chaos.verdict import judge

HERE = Path(__file__).parent


def undisturbed_losses(out: Path, settings: Settings, tokens: int, seeds: int) -> list[float]:
    """Held-out losses of runs in one process with as many tokens; what has a summary is not run again."""
    losses = []
    for seed in range(seeds):
        folder = out / f"undisturbed-{seed}"
        per_step = 4 * 64 * settings.peers
        steps = max(1, round(tokens / per_step))
        arguments = f"{COMMON} --replicas {settings.peers} --steps {steps} --seed {seed} --checkpoint.every-steps 0"
        command = python("diloco", "train", *arguments.split(), "--data", str(out / "text.jsonl"), "--out", str(folder))
        if not (folder / "summary.json").exists():
            subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        losses.append(float(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["heldout_loss"]))
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=7, help="of the events")
    parser.add_argument("--minutes", type=float, default=15.0, help="in which they happen")
    parser.add_argument("--transport", default="hivemind", choices=("hivemind", "torch"), help="between them")
    parser.add_argument("--peers", type=int, default=5, choices=(4, 5, 6), help="that train")
    parser.add_argument("--step-s", type=float, default=0.2, help="an inner step takes at least so long")
    parser.add_argument("--out", type=Path, required=True, help="folder for everything")
    parser.add_argument("--wan", type=Path, help="script that makes a network in which peers can be cut off; as root")
    parser.add_argument(
        "--undisturbed", type=int, default=3, metavar="SEEDS", help="runs without events to compare with"
    )
    parser.add_argument("--report", action="store_true", help="only look at what is in --out")
    parser.add_argument("--publish", action="store_true", help="write README.md and results.json")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was started in the background
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no peer is left behind
    network = Wan(given.wan, os.environ.get("WAN_PREFIX", "c")) if given.wan else Loopback()
    # so the run is over no sooner than the events, of which some wait, and the last peers to come are back by then
    steps = int((given.minutes * 60 * 1.1 + 60) / given.step_s)
    settings = Settings(transport=given.transport, peers=given.peers, steps=steps, step_s=given.step_s)
    rates = Rates(transport=given.transport, silence_s=settings.silence_s, can_cut=network.can_cut)
    events = plan_events(given.seed, given.minutes, given.peers, rates)
    if not given.report:
        Conductor(settings, given.out, network, say=lambda text: print(text, flush=True)).run(events)
    records = RunRecords(given.out)
    tokens = max((each["tokens"] for each in records.summaries.values()), default=0)
    undisturbed = undisturbed_losses(given.out, records.settings, tokens, given.undisturbed) if tokens else []
    words = f"--transport {given.transport} --seed {given.seed} --minutes {given.minutes:g} --peers {given.peers}"
    run: dict[str, Any] = {
        "command": words + (" --wan SCRIPT" if given.wan else ""),
        **judge(records, events, undisturbed),
    }
    print(tables([run]))
    if given.publish:
        publish(run, HERE)
    return 1 if any(run["faults"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
