"""Take the screenshots of docs/watch.md from real runs on the page of `diloco watch`, and check their content."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Pages, until
from tests.cli.test_swarm import Peer
from tests.processes import Processes
from tests.runs import write_text

TINY = (
    "--model.arguments {layers=2,width=32,ffn_width=64,heads=2} --sequence-length 32 "
    "--batch-size 4 --device cpu --learning-rate 5e-3 --optimizer.warmup-steps 10 "
    "--replicas 4 --evaluation.every-steps 50 "
    "--evaluation.sequences 8 "
    "--checkpoint.every-steps 100 --monitor.console quiet --steps 300"
)
ROUNDS = "--data-parallel-steps 0 --fragments 3 --overlap-steps 2"
SWARM = " --network.silence 8s --replicas 5"


CAME_BACK = """(() => { const told = [...document.querySelectorAll("#views li")].map((li) => li.textContent);
  const newest = (pattern) => told.findIndex((words) => pattern.test(words));
  const back = newest(/; ([0-9]+, )*3(, [0-9]+)* joined/), gone = newest(/; ([0-9]+, )*3(, [0-9]+)* left/);
  return back >= 0 && back < gone; })()"""
"""The list starts with the newest view."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that is long enough for these runs."""
    return write_text(tmp_path_factory.mktemp("text"), documents=1_500)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the screenshots. Runs are named relative to the working directory, to keep its path out of them."""
    if "DILOCO_PICTURES" not in os.environ:
        pytest.skip("`make test-browser` makes the pictures")
    place = Path(os.environ["DILOCO_PICTURES"]).resolve()
    monkeypatch.chdir(tmp_path)
    return place


def train(out: Path, data: Path, arguments: str) -> Path:
    command = [sys.executable, "-m", "diloco", "train", *arguments.split(), *TINY.split(), "--data", str(data)]
    subprocess.run([*command, "--out", str(out)], check=True)
    return out


def take(page: Any, path: Path, height: int | None = None) -> None:
    """Take a screenshot of the page from its top, with 64 colours."""
    from PIL import Image

    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    whole = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    shown = whole.crop((0, 0, whole.width, min(height or whole.height, whole.height)))
    shown.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < 250_000


def test_a_run_with_faults(made: Path, tmp_path: Path, text: Path, pages: Pages, watch: Any) -> None:
    faults = [
        *(f"drop replica=1 fragment={p} outer_step={k}" for p in range(3) for k in (9, *range(26, 30))),
        "truncate replica=2 fragment=1 outer_step=14",
        "miss-commit replica=3 fragment=2 outer_step=19",
    ]
    config = tmp_path / "faults.toml"
    config.write_text(f"[transport]\nmin_contributors = 3\nfaults = {json.dumps(faults)}\n")
    train(tmp_path / "with-faults", text, f"{config} {ROUNDS} --inner-steps 10")
    page = pages.open(watch("with-faults", "--port", "0").address)
    assert "were merged without replica 1" in page.locator("#alerts").inner_text()
    assert page.locator("#grid td.void").count() == 1
    assert page.locator("#grid td.partial").count() >= 8
    page.locator("#grid td.void").focus()
    take(page, made / "watch-faults.png")


def test_three_runs(made: Path, tmp_path: Path, text: Path, pages: Pages, watch: Any) -> None:
    folders = [
        train(tmp_path / "fp4-every-10", text, f"{ROUNDS} --inner-steps 10"),
        train(tmp_path / "int8-every-30", text, f"{ROUNDS} --inner-steps 30 --codec int8"),
        train(tmp_path / "data-parallel", text, "--algorithm data-parallel"),
    ]
    address = watch(*(folder.name for folder in folders), "--port", "0").address
    page = pages.open(address, scheme="dark")
    assert page.locator("#legend li").count() == 3
    assert "sync.codec" in page.locator("#settings").inner_text()
    take(page, made / "watch-three-runs.png")
    narrow = pages.open(address, width=400)
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 400
    take(narrow, made / "watch-400-pixels.png", height=1_900)


def test_a_swarm_of_five_during_chaos(
    made: Path, tmp_path: Path, text: Path, keys: Path, pages: Pages, watch: Any
) -> None:
    """One peer is killed, one is frozen until it is lost, and the frozen one rejoins."""
    (tmp_path / "peers").mkdir()
    with Processes() as processes:

        def peer(number: int, joins: Peer | None = None) -> Peer:
            out = tmp_path / "peers" / str(number)
            where = f"--data {text} --out {out} --replica {number}"
            settings = TINY.replace("--steps 300", "--steps 100000").replace("--replicas 4 ", "")
            run = f"{settings} {ROUNDS} --inner-steps 10 --transport hivemind --run chaos {SWARM} {where}"
            return Peer(processes, out, run.replace("--monitor.console quiet", ""), joins)

        first = peer(0)
        others = [peer(number, first) for number in (1, 2, 3, 4)]
        page = pages.open(watch("--run", "chaos", "--join", first.address(), "--port", "0").address)
        merged = "Number((document.querySelector('#numbers').textContent.match(/([0-9,]+) merged/) || [0, 0])[1])"
        until(page, f"{merged} > 40")
        os.kill(others[1].pid, signal.SIGKILL)
        until(page, "document.querySelector('#views').textContent.includes('; 2 left')")
        os.kill(others[2].pid, signal.SIGSTOP)
        until(page, "document.querySelector('#views').textContent.includes('; 3 left')")
        os.kill(others[2].pid, signal.SIGCONT)
        until(page, CAME_BACK)
        assert re.search(r"2\s+(gone|no answer)", page.locator("#peers").inner_text())
        page.locator("#grid td").last.focus()
        take(page, made / "watch-swarm.png")
        page.goto("about:blank")
