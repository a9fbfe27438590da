"""Taking over a whole state: what has come is told meanwhile, and a snapshot is of one moment."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from diloco.outer import SharedState, StateRecovery
from diloco.transport import Fetching
from tests.outer.test_recovery import FakeTransport, Pair, Slow, outer_loop


def test_who_takes_over_everything_says_how_much_has_come(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.waiting.FIRST_S", 0.01)

    began, asked = threading.Event(), threading.Event()

    class Lasting(FakeTransport):
        """Ends its fetches only after their progress has been reported."""

        @property
        def fetched_bytes(self) -> int:
            if began.is_set():
                asked.set()
            return 20 if began.is_set() else 0

        def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Mapping[str, Any]:
            began.set()
            assert asked.wait(10)
            return super().fetch(fragment, donors, expected_bytes)

    pair = Pair()
    list(StateRecovery(pair.joiner, Lasting(pair, at_once=True)).fetch_all((0, 1), keep_work=False, step=0))
    words = "waiting for the state of replica 0, 1 (12 %, 20 B of 160 B; fragment 0: 20 %) for"
    assert caplog.records[-1].getMessage().startswith(words)


def test_what_has_come_is_told_while_it_comes_and_with_every_fragment() -> None:
    """Each poll finds 40 more bytes; the fragments of 96 and 64 bytes arrive with 24 and 16 unrelated bytes."""

    class Counting(FakeTransport):
        came = 0

        @property
        def fetched_bytes(self) -> int:
            return self.came

        def fetch_in_background(
            self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None
        ) -> Fetching:
            return Coming(fragment, tuple(donors), 0)

    class Coming(Slow):
        def result(self, timeout: float | None = None) -> Mapping[str, Any]:
            if self.outcome is None:
                transport.came += 40
                if transport.came in (120, 200):
                    self.outcome = pair.donor.snapshot(self.fragment)
            return super().result(timeout)

    pair = Pair()
    transport = Counting(pair)
    told = list(StateRecovery(pair.joiner, transport).fetch_all((0,), keep_work=False, step=7))
    assert [(each.fragment, each.fragment_received_bytes, each.received_bytes, each.here) for each in told] == [
        (0, 40, 40, False),
        (0, 80, 80, False),
        (0, 96, 96, True),
        (1, 40, 136, False),
        (1, 64, 160, True),
    ]
    assert {(each.step, each.expected_bytes) for each in told} == {(7, 160)}
    assert [each.fragment_expected_bytes for each in told if each.here] == [96, 64]
    assert pair.differing() == []


def test_a_snapshot_waits_for_the_gpu_whose_state_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes it, and the training may use a stream of its own."""
    log: list[str] = []
    loop, place = outer_loop(0), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(str(device)))
    monkeypatch.setattr(loop, "device", place)
    monkeypatch.setattr(loop, "fragment_state", lambda _: {"global_params": Copied(), "outer_step": 0, "slots": {}})

    class Copied:
        def clone(self) -> torch.Tensor:
            log.append("copied")
            return torch.zeros(1)

    SharedState(loop).snapshot(0)
    assert log == ["cuda:1", "copied", "cuda:1"]
