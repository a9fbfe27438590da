"""Clipping as a run has it: settings that can't be used, what is printed, what replicas must agree on, and events."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.algorithm.clipping import Clipping
from diloco.config import load_configuration
from diloco.errors import ConfigurationError
from diloco.events import RoundCommitted, RunStarted
from diloco.outer.diloco import DiLoCo
from diloco.train.resolve import resolve
from tests.replicas import Vectors
from tests.runs import SMALL, Listener, train

PLAIN = "--fragments 1 --overlap-steps 0 --codec float32"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"--outer.max-norm 1 --algorithm data-parallel {PLAIN}", r"only the contributions of streaming and diloco"),
        ("--outer.max-norm 1 --transport torch --replica-size 2", r"Use --train\.parallelism ddp"),
        (f"--outer.average rda --algorithm data-parallel {PLAIN}", r"only the contributions of streaming and diloco"),
        (
            "--outer.average rda --transport torch --replica-size 2",
            r"needs whole tensors",
        ),
        ("--outer.average rds", r"outer\.average='rds' is unknown; .*rda"),
        ("--outer.average-arguments {a=1}", r"outer\.average_arguments was given with outer\.average='mean'"),
    ],
)
def test_bounds_that_cant_be_used_are_refused(data: Path, arguments: str, words: str) -> None:
    configuration = load_configuration([*SMALL.split(), str(data), *arguments.split()])
    with pytest.raises(ConfigurationError, match=words):
        resolve(configuration, num_layers=2)


def test_a_run_says_what_is_clipped_and_whose(data: Path, tmp_path: Path) -> None:
    listener = Listener()
    train(data, tmp_path / "run", "--outer.max-norm 1e-4 --outer.median-norm-factor 2", sink=listener)
    (started,) = listener.of(RunStarted)
    words = "contributions are scaled down to the norm 0.0001, and to 2 times the median norm of a round"
    assert started.facts["clipping"] == words
    assert {event.clipped for event in listener.of(RoundCommitted)} == {(0, 1)}


def test_bounds_that_nothing_exceeds_change_no_bit(data: Path, tmp_path: Path) -> None:
    plain = train(data, tmp_path / "plain")
    bounded = train(data, tmp_path / "bounded", "--outer.max-norm 1e6 --outer.median-norm-factor 1e6")
    assert bounded["global_params_digest"] == plain["global_params_digest"]


def test_a_run_says_how_it_averages_and_plans_whole_contributions(data: Path, tmp_path: Path) -> None:
    listener = Listener()
    plain = train(data, tmp_path / "plain", "--codec topk2 --codec.error-feedback")
    for average, shown in (("rda", "Rda()"), ("senders", "SendersMean()")):
        arguments = f"--codec topk2 --codec.error-feedback --outer.average {average}"
        summary = train(data, tmp_path / average, arguments, sink=listener)
        assert listener.of(RunStarted)[-1].facts["average"] == shown
        assert summary["global_params_digest"] != plain["global_params_digest"]


def test_a_model_that_ranks_share_out_is_refused() -> None:
    model = Vectors()
    for parameter in model.parameters():
        parameter.to_local = lambda parameter=parameter: parameter  # type: ignore[attr-defined]  # as DTensors have it
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"this one shards first and 2 more parameters over ranks.*\(ddp\)"):
        DiLoCo(model, inner, clipping=Clipping(max_norm=1.0))
