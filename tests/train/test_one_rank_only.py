"""Something happens on one rank of a replica alone. No other rank may wait for it where it does not communicate."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import TCPStore

from diloco.cli import main
from diloco.errors import TransportError
from diloco.trained import Sampling
from diloco.transport import PeerTransport
from tests.processes import Processes, free_port, report
from tests.runs import SMALL, of_torchrun, write_text

LIMIT_S = 60.0
"""A rank that waits for ever fails the test after this time."""


Act = Callable[[pytest.MonkeyPatch], object]


def at_each_rename(act: Act, begin: str = "step-") -> Act:
    """Act when a file or folder whose name begins like this is complete and renamed into its place."""

    def change(patch: pytest.MonkeyPatch) -> None:
        rename = os.replace

        def replace(source: Any, target: Any, **more: Any) -> None:
            if Path(target).name.startswith(begin):
                act(patch)
            rename(source, target, **more)

        patch.setattr(os, "replace", replace)

    return change


def lose_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerTransport, "failure", property(lambda _: TransportError("the connection is lost")))


EVENTS: dict[str, tuple[int, tuple[int, int], Act]] = {  # the rank, the exit codes of both ranks, and how
    "a signal in the last save": (0, (130, 130), at_each_rename(lambda _: signal.raise_signal(signal.SIGINT))),
    "a full disk at the start": (
        1,
        (1, 1),
        at_each_rename(mock.Mock(side_effect=OSError(28, "No space left on device")), ""),
    ),
    "an error in a save": (0, (1, 1), at_each_rename(mock.Mock(side_effect=RuntimeError("CUDA out of memory")))),
    "a lost connection in the last save": (0, (1, 1), at_each_rename(lose_connection)),
    # the end of a document, which ends the sample
    "another token in a sample": (1, (0, 0), lambda patch: patch.setattr(Sampling, "draw", lambda *_: 256)),
    "other data": (1, (2, 2), lambda _: None),
}
"""What happens on one rank alone."""


def run_rank(position: int, data: Path, folder: Path, ports: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Train once for each event, as one of the two ranks of a replica, on one of which it happens."""
    codes = {}
    for number, (event, (at, _, change)) in enumerate(EVENTS.items()):
        given = data
        if position == at and event == "other data":
            folder.joinpath("other").mkdir()
            given = write_text(folder / "other", seed=9)
        words = f"train {SMALL} {given} --replicas 1 --transport tcp --replica-size 2 --replica 0"
        if event == "another token in a sample":
            words += " --evaluation.sample-prompts a --precision bfloat16"
        port, of_store = ports[event]
        os.environ |= of_torchrun(position, 2, of_store)
        with pytest.MonkeyPatch.context() as patch:
            if position == at:
                change(patch)
            more = f"--join 127.0.0.1:{port} --out {folder / str(number)} --monitor.console quiet"
            codes[event] = main(f"{words} {more}".split())
        report(event)
    return codes


def test_all_ranks_end_alike(data: Path, tmp_path: Path) -> None:
    stores = {event: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for event in EVENTS}
    with Processes() as processes:
        processes.start(2, run_rank, data, tmp_path, {event: (free_port(), stores[event].port) for event in EVENTS})
        for event, rank in itertools.product(EVENTS, (0, 1)):
            assert processes.next_report(rank, LIMIT_S) == event
        both = processes.results(LIMIT_S).values()
    for event, (_, expected, _) in EVENTS.items():
        assert tuple(codes[event] for codes in both) == expected, event
