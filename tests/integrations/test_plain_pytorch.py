"""`DiLoCo` in a plain loop gives the results of diloco's own trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.transport import Transport
from tests.integrations.reference import assert_equal, example, options, trained_by_us
from tests.integrations.turns import in_turns


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = module(tokens)
    return found


def test_one_replica_is_one_of_ours(tmp_path: Path) -> None:
    """With two micro-batches per step."""
    given = options(tmp_path, "--accumulation 2")
    model = example("plain_pytorch").train(given, None)
    (expected,), shared = trained_by_us([given], example("plain_pytorch").make_model(given), logits)
    assert_equal(dict(model.named_parameters()), expected)
    assert_equal(torch.load(tmp_path / "model.pt", weights_only=True), shared)


def test_two_replicas_are_two_of_ours(tmp_path: Path) -> None:
    given = [options(tmp_path / str(m), "--fragments 2", m, 2) for m in (0, 1)]

    def train(replica: int, transport: Transport) -> Any:
        return example("plain_pytorch").train(given[replica], transport)

    models = in_turns(train)
    expected, _ = trained_by_us(given, example("plain_pytorch").make_model(given[0]), logits)
    for model, local in zip(models, expected, strict=True):
        assert_equal(dict(model.named_parameters()), local)
    assert not torch.equal(models[0].head.weight, models[1].head.weight)  # they saw different data


def test_stopped_with_a_round_in_flight_and_resumed_it_is_the_same(tmp_path: Path) -> None:
    plain = example("plain_pytorch")
    straight = plain.train(options(tmp_path, "--save-steps 22 --codec int8"), None)
    resumed = plain.train(options(tmp_path, f"--resume {tmp_path / 'step-22.pt'} --codec int8"), None)
    for name, values in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], values), name
