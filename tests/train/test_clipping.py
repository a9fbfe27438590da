"""Clipping and average rules in a run: the facts printed at the start, and the events of its rounds."""

from __future__ import annotations

from pathlib import Path

from diloco.events import RoundCommitted, RunStarted
from tests.runs import Listener, train


def test_a_run_says_what_is_clipped_and_whose(data: Path, tmp_path: Path) -> None:
    listener = Listener()
    train(data, tmp_path / "run", "--sync.arguments.average.max-norm 1e-4", sink=listener)
    (started,) = listener.of(RunStarted)
    words = "contributions are scaled down to the norm 0.0001"
    assert started.facts["clipping"] == words
    assert {event.clipped for event in listener.of(RoundCommitted)} == {(0, 1)}


def test_a_run_says_how_it_averages_and_plans_whole_contributions(data: Path, tmp_path: Path) -> None:
    listener = Listener()
    plain = train(data, tmp_path / "plain", "--codec topk2 --error-feedback 1")
    arguments = "--codec topk2 --error-feedback 1 --sync.average senders"
    summary = train(data, tmp_path / "senders", arguments, sink=listener)
    assert listener.of(RunStarted)[-1].facts["average"] == "SendersMean()"
    assert summary["global_params_digest"] != plain["global_params_digest"]
