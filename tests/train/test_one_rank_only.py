"""Something happens on one rank of a replica alone. No other rank may wait for it where it does not communicate."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

import diloco.train.run
from diloco.checkpoint import open_checkpoint, writing
from diloco.cli import main
from diloco.errors import TransportError
from diloco.train import handshake_facts
from diloco.trained import Sampling
from diloco.transport import PeerTransport
from tests.processes import Processes, free_port
from tests.runs import SMALL

LIMIT_S = 60.0
"""A rank that waits for ever fails the test after this time."""


def after(name: str, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a function of `diloco.train.run` call ``act`` when it has returned."""
    function = getattr(diloco.train.run, name)

    def done(*arguments: Any, **more: Any) -> Any:
        result = function(*arguments, **more)
        act()
        return result

    monkeypatch.setattr(diloco.train.run, name, done)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fill_disk() -> None:
    raise OSError(28, "No space left on device")


def run_out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory")


def fail_after_one_tensor(chunks: Any) -> None:
    for _ in range(3):  # the length of the header, the header, and a tensor
        next(chunks)
    chunks.throw(RuntimeError("out of memory"))


def change(event: str, patch: pytest.MonkeyPatch, out: Path) -> None:
    """Let something happen on this rank alone."""
    if event == "signal in the last save":
        after("save_session", interrupt, patch)
    elif event == "signal in the last evaluation":
        after("evaluate_session", interrupt, patch)
    elif event == "full disk at the start":
        patch.setattr(os, "replace", lambda *_: fill_disk())
    elif event == "full disk in a save":
        patch.setattr(writing, "write_part", lambda *_: fill_disk())
    elif event == "another error in a save":
        patch.setattr(writing, "write_part", lambda *_: run_out_of_memory())
    elif event == "another error while gathering":
        patch.setattr(writing, "write_files", lambda *given: fail_after_one_tensor(given[3]))
    elif event == "a checkpoint that it can't see":
        patch.setattr(diloco.train.run, "open_checkpoint", lambda path: open_checkpoint(out / "elsewhere"))
    elif event == "other data":
        other = {"data": "other"}
        patch.setattr(diloco.train.run, "handshake_facts", lambda *given: {**handshake_facts(*given), **other})
    elif event == "another token in a sample":
        patch.setattr(Sampling, "draw", lambda *_: 256)  # the end of a document, which ends the sample
    elif event == "a lost connection after the last step":
        lost = property(lambda _: TransportError("the connection is lost"))
        after("save_session", lambda: patch.setattr(PeerTransport, "failure", lost), patch)


def run_rank(position: int, event: str, at: int, parallelism: str, data: Path, out: Path, ports: list[int]) -> int:
    """Train as one of the two ranks of a replica, on which ``event`` happens if it is rank ``at``."""
    words = f"train {SMALL} {data} --replicas 1 --transport torch --replica-size 2 --replica 0 --monitor.console quiet"
    ends = f"--join 127.0.0.1:{ports[0]} --transport.inner-store 127.0.0.1:{ports[1]}"
    how = f"--transport.position {position} --train.parallelism {parallelism} --out {out}"
    with pytest.MonkeyPatch.context() as patch:
        if position == at:
            change(event, patch, out)
        return main(f"{words} {ends} {how}".split())


EVENTS = [  # and the rank on which it happens, and the exit codes of both
    ("signal in the last save", 1, (130, 130)),
    ("signal in the last evaluation", 1, (0, 0)),
    ("full disk at the start", 1, (1, 1)),
    ("full disk in a save", 0, (1, 1)),
    ("another error in a save", 0, (1, 1)),
    ("another error while gathering", 0, (1, 1)),
    ("a checkpoint that it can't see", 1, (0, 0)),
    ("a lost connection after the last step", 0, (1, 1)),
    ("other data", 1, (2, 2)),
    ("another token in a sample", 1, (0, 0)),
]


@pytest.mark.parametrize("parallelism", ["fsdp", "ddp"])
@pytest.mark.parametrize(("event", "at", "codes"), EVENTS)
def test_all_ranks_end_alike(
    event: str, at: int, codes: tuple[int, int], parallelism: str, data: Path, tmp_path: Path
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Processes() as processes:
        processes.start(2, run_rank, event, at, parallelism, data, tmp_path / "run", [free_port(), store.port])
        assert tuple(processes.results(timeout_s=LIMIT_S).values()) == codes
