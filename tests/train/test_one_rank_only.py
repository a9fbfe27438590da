"""Something happens on one rank of a replica alone. No other rank may wait for it where it does not communicate."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from diloco.cli import main
from diloco.errors import TransportError
from diloco.trained import Sampling
from diloco.transport import PeerTransport
from tests.processes import Processes, free_port
from tests.runs import SMALL, of_torchrun, write_text

LIMIT_S = 60.0
"""A rank that waits for ever fails the test after this time."""


def at_each_rename(patch: pytest.MonkeyPatch, act: Callable[[], object], begin: str = "") -> None:
    """Call ``act`` when a file or folder whose name begins like this is complete and renamed into its place."""
    rename = os.replace

    def replace(source: Any, target: Any, **more: Any) -> None:
        if Path(target).name.startswith(begin):
            act()
        rename(source, target, **more)

    patch.setattr(os, "replace", replace)


def fails(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def lose_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerTransport, "failure", property(lambda _: TransportError("the connection is lost")))


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a signal in the last save": lambda patch: at_each_rename(
        patch, lambda: signal.raise_signal(signal.SIGINT), "step-"
    ),
    "a full disk at the start": lambda patch: at_each_rename(patch, fails(OSError(28, "No space left on device"))),
    "a full disk in a save": lambda patch: at_each_rename(patch, fails(OSError(28, "No space left")), "step-"),
    "another error in a save": lambda patch: at_each_rename(patch, fails(RuntimeError("CUDA out of memory")), "step-"),
    "a lost connection in the last save": lambda patch: at_each_rename(patch, lambda: lose_connection(patch), "step-"),
    # the end of a document, which ends the sample
    "another token in a sample": lambda patch: patch.setattr(Sampling, "draw", lambda *_: 256),
}
"""What happens on one rank alone, beside other data."""


def run_rank(position: int, event: str, at: int, data: Path, out: Path, ports: list[int]) -> int:
    """Train as one of the two ranks of a replica, on which ``event`` happens if it is rank ``at``."""
    if position == at and event == "other data":
        (data.parent / "other").mkdir()
        data = write_text(data.parent / "other", seed=9)
    words = f"train {SMALL} {data} --replicas 1 --transport tcp --replica-size 2 --replica 0 --monitor.console quiet"
    os.environ |= of_torchrun(position, 2, ports[1])
    ends = f"--join 127.0.0.1:{ports[0]}"
    how = f"--out {out}"
    if event == "another token in a sample":
        how += " --evaluation.sample-prompts a --precision bfloat16"
    with pytest.MonkeyPatch.context() as patch:
        if position == at and event in CHANGES:
            CHANGES[event](patch)
        return main(f"{words} {ends} {how}".split())


EVENTS = [  # the rank on which it happens, and the exit codes of both ranks
    ("a signal in the last save", 0, (130, 130)),
    ("a full disk at the start", 1, (1, 1)),
    ("a full disk in a save", 0, (1, 1)),
    ("another error in a save", 0, (1, 1)),
    ("a lost connection in the last save", 0, (1, 1)),
    ("other data", 1, (2, 2)),
    ("another token in a sample", 1, (0, 0)),
]


@pytest.mark.parametrize(("event", "at", "codes"), EVENTS)
def test_all_ranks_end_alike(event: str, at: int, codes: tuple[int, int], tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    data = write_text(tmp_path)
    with Processes() as processes:
        processes.start(2, run_rank, event, at, data, tmp_path / "run", [free_port(), store.port])
        assert tuple(processes.results(timeout_s=LIMIT_S).values()) == codes
