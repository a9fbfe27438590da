"""Whole runs of the command under torchrun: one rank of four is killed; sharded replicas beside unsharded ones."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SETTINGS = (
    *("--preset", "tiny-muon", "--codec", "fp4", "--steps", "60", "--data-parallel-steps", "0"),
    *("--checkpoint.every-steps", "10", "--evaluation.every-steps", "0", "--evaluation.sample-prompts"),
    *("--monitor.console", "quiet"),
)
TOLERANCE = 1e-3  # of the loss after 60 steps: sums of gradients differ in the last bits, and each step enlarges that
KILLED = 2  # the rank


class Torchrun:
    """One torchrun of ``diloco train``, whose ranks it starts again once."""

    def __init__(self, folder: Path, ranks: int, *more: str) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        words = ["--standalone", "--max-restarts", "1", "--nproc-per-node", str(ranks), "-m", "diloco", "train"]
        with folder.with_suffix(".log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words, *SETTINGS, *more, "--out", str(folder)],
                stdout=log,
                stderr=log,
            )

    def summaries(self) -> list[dict[str, Any]]:
        """Return those of all replicas once the run has ended."""
        if self.process.wait():
            raise SystemExit(f"torchrun has failed; see {self.folder.with_suffix('.log')}.")
        return [json.loads(path.read_text()) for path in sorted(self.folder.rglob("summary.json"))]

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that runs."""
        return dict(self._ranks())

    def _ranks(self) -> Iterator[tuple[int, int]]:
        for number in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            try:
                variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
                running = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except OSError:  # it has just ended
                continue
            for variable in variables:
                if variable.startswith(b"RANK=") and running:
                    yield int(variable[5:]), int(number)


def kill_one_of_four(folder: Path) -> dict[str, Any]:
    """Kill a rank by ``kill -9`` after a checkpoint, and compare the end with that of an undisturbed run."""
    undisturbed = Torchrun(folder / "undisturbed", 4).summaries()
    run = Torchrun(folder / "killed", 4)
    homes = [run.folder, *(run.folder / f"replica-{number}" for number in (1, 2, 3))]
    while not all(any((home / "checkpoints").glob("step-*")) for home in homes):
        time.sleep(0.1)
        if run.process.poll() is not None:
            run.summaries()
    ranks = run.ranks()
    os.kill(ranks[KILLED], signal.SIGKILL)
    killed_s = time.monotonic()
    while set(run.ranks().values()) & set(ranks.values()):
        time.sleep(0.02)
    ended_s = time.monotonic() - killed_s
    digests = {each["global_params_digest"] for each in run.summaries()}
    words = run.folder.with_suffix(".log").read_text()
    return {
        "run": "kill -9 of one rank of four",
        "all_ended_s": round(ended_s, 2),
        "named_by": words.count(f"rank {KILLED} (replica {KILLED}) is lost"),
        "same_digest": digests == {each["global_params_digest"] for each in undisturbed},
        "resumed": any('"resumed_from": "' in line for line in (run.folder / "metrics.jsonl").read_text().splitlines()),
    }


def shard_replicas(folder: Path) -> dict[str, Any]:
    """Compare two replicas of two ranks each (FSDP2, Muon, fp4) with two of one rank, and those with another seed."""
    losses = {}
    for name, size, seed in (("2 x 1", 1, 0), ("2 x 2", 2, 0), ("2 x 1, another seed", 1, 1)):
        more = ("--replica-size", str(size), "--seed", str(seed))
        summaries = Torchrun(folder / f"{size}-{seed}", 2 * size, *more).summaries()
        losses[name] = next(float(each["heldout_loss"]) for each in summaries if each["heldout_loss"] is not None)
        if len({each["global_params_digest"] for each in summaries}) > 1:
            raise SystemExit(f"The replicas of {name} end with different digests.")
    one, two, _ = losses.values()
    return {
        "run": "FSDP2, Muon and fp4: 2 x 2 ranks beside 2 x 1",
        "losses": {name: round(loss, 6) for name, loss in losses.items()},
        "within_tolerance": abs(two / one - 1) <= TOLERANCE,
    }
