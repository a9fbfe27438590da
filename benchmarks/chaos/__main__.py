"""``python -m benchmarks.chaos``: disturb real peers at random and check the outcome.

The exit code is 1 if a check found a fault. ``--report`` checks the files of an earlier run instead. ``--publish`` adds
the run to results.jsonl and to the tables of the README.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.network import Loopback, Wan
from benchmarks.chaos.plan import Rates, plan_events
from benchmarks.chaos.processes import python
from benchmarks.chaos.report import judge, publish, tables
from benchmarks.chaos.run import Conductor
from benchmarks.chaos.settings import COMMON, Settings

HERE = Path(__file__).parent


def undisturbed_losses(out: Path, settings: Settings, tokens: int, seeds: int) -> list[float]:
    """Return the held-out losses of single-process runs on as many tokens; reuse runs that have a summary."""
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
    parser.add_argument("--seed", type=int, default=7, help="seed of the events")
    parser.add_argument("--minutes", type=float, default=15.0, help="how long events happen")
    parser.add_argument("--transport", default="swarm", choices=("swarm", "tcp"), help="transport of the peers")
    parser.add_argument("--peers", type=int, default=5, choices=(4, 5, 6), help="number of peers that train")
    parser.add_argument("--step-s", type=float, default=0.2, help="least duration of an inner step")
    parser.add_argument("--out", type=Path, required=True, help="folder for all files of the run")
    parser.add_argument("--kinds", nargs="*", default=(), help="only these kinds of events, such as refuse")
    parser.add_argument("--wan", type=Path, help="script that makes a network whose links can be cut; needs root")
    parser.add_argument(
        "--undisturbed",
        type=int,
        default=3,
        metavar="SEEDS",
        help="number of undisturbed runs to compare the loss with",
    )
    parser.add_argument("--report", action="store_true", help="only check the files in --out")
    parser.add_argument("--publish", action="store_true", help="update README.md and results.jsonl")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have it ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all peers are ended, too
    network: Loopback | Wan = Loopback() if given.wan is None else Wan(given.wan, os.environ.get("WAN_PREFIX", "c"))
    # the run must outlast the events, some of which are postponed, and the recovery of the last peers
    steps = int((given.minutes * 60 * 1.1 + 60) / given.step_s)
    settings = Settings(transport=given.transport, peers=given.peers, steps=steps, step_s=given.step_s)
    rates = Rates(given.transport, settings.silence_s, can_cut=network.can_cut, kinds=tuple(given.kinds))
    events = plan_events(given.seed, given.minutes, given.peers, rates)
    if not given.report:
        Conductor(settings, given.out, network, say=lambda text: print(text, flush=True)).run(events)
    tokens = judge(given.out, len(events), ())["tokens"]
    undisturbed = undisturbed_losses(given.out, settings, tokens, given.undisturbed) if tokens else []
    words = f"--transport {given.transport} --seed {given.seed} --minutes {given.minutes:g} --peers {given.peers}"
    words += f" --kinds {' '.join(given.kinds)}" if given.kinds else ""
    run: dict[str, Any] = {"command": words + (" --wan SCRIPT" if given.wan else "")}
    run |= judge(given.out, len(events), undisturbed)
    print(tables([run]))
    if given.publish:
        publish(run, HERE)
    return 1 if any(run["faults"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
