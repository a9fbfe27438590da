"""``python -m benchmarks.watch``: open a run of 10,000 steps with 64 replicas in a browser, and time it."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco import events
from diloco.units import format_bytes

FRAGMENTS, INNER_STEPS = 4, 100
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def run_events(steps: int, peers: int) -> Iterator[events.Event]:
    """Yield the events of one process with all replicas."""
    replicas = tuple(range(peers))
    yield events.RunStarted(
        step=0, total_steps=steps, algorithm="streaming", num_replicas=peers, parameters=10**9, tokens_per_step=10**6
    )
    for step in range(1, steps + 1):
        yield events.StepFinished(
            step=step,
            loss=3 + math.sin(step / 50) / math.sqrt(step),
            learning_rate=1e-3,
            gradient_norm=1 + math.sin(step),
            tokens=step * 10**6,
            step_s=1.0,
            sent_bytes=step * 1000,
            received_bytes=step * 1000,
            compute_utilization=0.9,
        )
        if step % INNER_STEPS:
            continue
        yield events.Evaluated(step=step, heldout_loss=3.0, perplexity=20.0, bits_per_byte=1.0, heldout_tokens=1)
        for fragment in range(FRAGMENTS):
            for replica in replicas:
                where: dict[str, Any] = {"step": step, "replica": replica, "fragment": fragment}
                where["outer_step"] = step // INNER_STEPS
                yield events.RoundSent(**where, payload_bytes=10**6, digest="a" * 32)
                yield events.RoundCommitted(
                    **where, contributors=replicas, sent_bytes=10**6, received_bytes=10**6, wait_s=0.1, gain=1.5
                )


def write(folder: Path, steps: int, peers: int) -> int:
    """Write metrics.jsonl, and return its size in bytes."""
    begun_s = time.time() - steps
    path = folder / "metrics.jsonl"
    with path.open("w") as file:
        for event in run_events(steps, peers):
            file.write(json.dumps({**events.to_record(event), "time_s": begun_s + event.step}) + "\n")
    return path.stat().st_size


def resident_bytes(pid: int) -> int:
    """Return the peak resident memory of a process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1000 * int(found[1]) if found else 0


def in_browser(address: str) -> dict[str, str]:
    """Return the timings of a browser with an empty cache."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        begun_s = time.monotonic()
        page.goto(address, wait_until="commit")
        page.wait_for_selector("#numbers dd")
        numbers_s = time.monotonic() - begun_s
        page.wait_for_selector("#figure-loss .scatterlayer .trace")
        curve_s = time.monotonic() - begun_s
        paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        heap_bytes = page.evaluate("performance.memory.usedJSHeapSize")
        browser.close()
    return {
        "first paint": f"{paint_ms / 1000:.2f} s",
        "numbers": f"{numbers_s:.2f} s",
        "first curve": f"{curve_s:.2f} s",
        "memory of the page's script": format_bytes(heap_bytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the run")
    parser.add_argument("--peers", type=int, default=64, help="replicas of the run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "large"
        folder.mkdir()
        rows = {"metrics.jsonl": format_bytes(write(folder, given.steps, given.peers))}
        begun_s = time.monotonic()
        command = [sys.executable, "-m", "diloco", "watch", str(folder), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            rows["from the command to the address"] = f"{time.monotonic() - begun_s:.2f} s"
            rows |= {f"in the browser: {name}": words for name, words in in_browser(found[0]).items()}
            while True:
                with urllib.request.urlopen(f"{found[0]}data.json") as answer:
                    data = answer.read()
                if json.loads(data)["runs"]["0"]["behind_bytes"] == 0:
                    break
                time.sleep(0.05)
            rows["from the command to all records read"] = f"{time.monotonic() - begun_s:.2f} s"
            rows["first response to the page"] = format_bytes(len(data))
            rows["memory of the server"] = format_bytes(resident_bytes(process.pid))
            process.terminate()
    width = max(map(len, rows))
    print("\n".join(f"{name:{width}}  {words}" for name, words in rows.items()))


if __name__ == "__main__":
    main()
