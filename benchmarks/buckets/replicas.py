"""Kill one of two replicas at random moments, and go on from what both have uploaded: see README.md.

python -m benchmarks.buckets.replicas [URL] writes a row for each kill to replicas.jsonl. Each of the two processes
uploads for itself. After a kill the disks are lost two times out of three.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec

KILLS = 20
RUN = """train --replicas 2 --batch-size 1 --sequence-length 16 --data-parallel-steps 0 --inner-steps 4 --steps 100000
--evaluation.every-steps 0 --evaluation.sequences 4 --evaluation.sample-prompts --checkpoint.every-steps 3
--device cpu --monitor.console plain"""
ROWS = Path(__file__).with_name("replicas.jsonl")
WAIT_S = 120.0


def start(log: Path, *more: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        words = [sys.executable, "-m", "diloco", *RUN.split(), *more]
        return subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)


def children(process: int) -> list[int]:
    """Return the processes of the replicas, which the launcher has started."""
    listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in listed.split()]


def uploads(url: str) -> dict[str, set[str]]:
    """Return the uploads of each replica, whole or not, by their folders."""
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    found: dict[str, set[str]] = {"replica-0": set(), "replica-1": set()}
    for path in fs.find(root):
        if match := re.search(r"(?:(replica-1)/)?checkpoints/([^/]+)/", path):
            found[match[1] or "replica-0"].add(match[2])
    return found


def killed(url: str, folder: Path, moments: random.Random, number: int) -> dict[str, Any]:
    """Start or go on, kill at a random moment, and return what happened."""
    out, log, before = folder / "run", folder / f"{number}.log", uploads(url)
    launcher = start(log, "--transport", "tcp", "--resume-or-start", url, "--out", str(out))
    end_s = time.monotonic() + WAIT_S
    while uploads(url) == before or len(running := children(launcher.pid)) < 2:
        if launcher.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(log.read_text())
        time.sleep(0.01)
    time.sleep(moments.uniform(0, 1.0))
    victim = moments.choice([0, 1])
    os.kill(running[victim], signal.SIGKILL)
    lost = number % 3 != 2
    if lost:  # the machines go, so nothing more is uploaded
        time.sleep(moments.uniform(0, 0.2))
        launcher.kill()
        for process in running:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.2)
        shutil.rmtree(out, ignore_errors=True)
    launcher.wait()
    text = log.read_text()
    begun = re.search(r"resuming after step (\d+)", text)
    told = [line.removeprefix("diloco: ") for line in text.splitlines() if "passed over" in line or "no whole" in line]
    return {
        "kill": number,
        "victim": victim,
        "disks": "lost" if lost else "kept",
        "began at": int(begun[1]) if begun else 0,
        "told": [re.sub(r"\S*://\S*?: |\S*://\S* ", "", line) for line in told],
        "exit code": launcher.returncode,
    }


def digest(url: str, folder: Path, last: str, *more: str) -> str:
    log = folder / "end.log"
    if start(log, *more, "--stop-after", last).wait():
        raise RuntimeError(log.read_text())
    out = Path(more[more.index("--out") + 1])
    words: str = json.loads((out / "summary.json").read_text())["global_params_digest"]
    return words


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, moments, rows = Path(name), random.Random(0), list[dict[str, Any]]()
        url = sys.argv[1] if sys.argv[1:] else f"file://{name}/bucket/run"
        for number in range(KILLS):
            rows.append(killed(url, folder, moments, number))
            print(rows[-1], flush=True)
        newest = max(int(each.split("-")[2]) for group in uploads(url).values() for each in group)
        last, out = str(newest + 5), folder / "run"
        ended = digest(url, folder, last, "--transport", "tcp", "--resume-or-start", url, "--out", str(out))
        undisturbed = digest(url, folder, last, "--out", str(folder / "undisturbed"))
        rows.append({"date": time.strftime("%F"), "step": newest + 5, "digest": ended, "undisturbed": undisturbed})
        print(rows[-1])
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
