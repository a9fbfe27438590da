"""Error feedback: no value is lost or counted twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diloco import CodecError, ConfigurationError, make_codec
from diloco.algorithm import ErrorFeedback
from diloco.errors import CheckpointError

NUMEL = 100
LOSSY = ["float16", "bfloat16", "int8", "fp4", "topk2"]


def make(name: str = "fp4", numel: int = NUMEL) -> ErrorFeedback:
    return ErrorFeedback(make_codec(name), numel)


def random_values(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LOSSY)
def test_one_round_by_the_equation(name: str) -> None:
    feedback, codec = make(name), make_codec(name)
    feedback.encode(random_values(0))
    feedback.commit()
    values, corrected = random_values(1), random_values(1) + feedback.residual
    payload = feedback.encode(values)
    assert torch.equal(payload, codec.encode(corrected))
    assert torch.equal(values, random_values(1)), "they are left alone"
    feedback.commit()
    assert torch.equal(feedback.residual, corrected - codec.decode(payload, NUMEL))


@pytest.mark.parametrize("name", LOSSY)
def test_work_of_void_rounds_is_counted_once_and_nothing_is_lost(name: str) -> None:
    """What was sent, the residual and what waits for the next round add up to all values."""
    feedback, codec = make(name), make_codec(name)
    missed = torch.zeros(NUMEL)
    sent, total = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for seed in range(30):
        values = random_values(seed)
        total += values
        pseudo_gradient = missed + values
        decoded = codec.decode(feedback.encode(pseudo_gradient), NUMEL)
        if seed % 3 == 1:
            feedback.rollback()
            missed = pseudo_gradient
        else:
            feedback.commit()
            missed = torch.zeros(NUMEL)
            sent += decoded
    torch.testing.assert_close(sent + feedback.residual + missed, total, rtol=0, atol=30 * 2.0**-21)
    assert feedback.residual.abs().max() > 0


@pytest.mark.parametrize("pending", [False, True])
def test_state_goes_round(pending: bool) -> None:
    first, second = make(), make()
    first.encode(random_values(0))
    first.commit()
    if pending:
        first.encode(random_values(1))
    state = {key: tensor.clone() for key, tensor in first.state_dict().items()}
    second.load_state_dict(state)
    for tensor in state.values():
        tensor.zero_()  # copies were taken
    assert second.pending == pending
    for feedback in (first, second):
        if pending:
            feedback.commit()
    assert torch.equal(first.residual, second.residual)
    assert torch.equal(first.encode(random_values(2)), second.encode(random_values(2)))


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"candidate": torch.zeros(NUMEL)},
        {"residual": torch.zeros(NUMEL), "momentum": torch.zeros(NUMEL)},
        {"residual": torch.zeros(NUMEL + 1)},
        {"residual": torch.zeros(NUMEL), "candidate": torch.zeros(NUMEL, dtype=torch.float64)},
    ],
    ids=["empty", "no residual", "unknown", "another size", "another type"],
)
def test_a_foreign_state_is_refused_whole(state: dict[str, Tensor]) -> None:
    feedback = make()
    feedback.encode(random_values(0))
    feedback.commit()
    before = feedback.residual.clone()
    with pytest.raises(CheckpointError, match="Nothing was loaded"):
        feedback.load_state_dict(state)
    assert torch.equal(feedback.residual, before)


def test_every_encode_has_one_outcome() -> None:
    feedback = make()
    with pytest.raises(CodecError, match=r"commit\(\) was called without an encode\(\)"):
        feedback.commit()
    feedback.rollback()
    with pytest.raises(CodecError, match=r"99 values can't be encoded .*: there are 100 values"):
        feedback.encode(random_values(0, NUMEL - 1))
    feedback.encode(random_values(0))
    with pytest.raises(CodecError, match="a round is in flight"):
        feedback.encode(random_values(1))


def test_a_decay_forgets_what_waits() -> None:
    codec = make_codec("fp4", block_size=2)
    values, feedback = torch.tensor([100.0, 1e-3]), ErrorFeedback(codec, 2, decay=0.5)
    expected = torch.zeros(2)
    for _ in range(5):
        payload = feedback.encode(values)
        feedback.commit()
        expected = values + 0.5 * expected - codec.decode(payload, 2)
        assert torch.equal(feedback.residual, expected)
    assert float(feedback.residual[1]) < 2e-3
    with pytest.raises(ConfigurationError, match=r"decay must be a number from 0 to 1, got 1\.5"):
        ErrorFeedback(make_codec("fp4"), 2, decay=1.5)
