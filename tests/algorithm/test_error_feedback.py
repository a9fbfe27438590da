"""Error feedback: no value is lost or counted twice, and values that the codec alone would drop are sent eventually."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diloco.algorithm import ErrorFeedback, make_codec
from diloco.errors import CheckpointError, CodecError, ConfigurationError

NUMEL = 100
LOSSY = ["float16", "bfloat16", "int8", "fp4", "topk2"]


def make(name: str = "fp4", numel: int = NUMEL) -> ErrorFeedback:
    return ErrorFeedback(make_codec(name), numel)


def random_values(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LOSSY)
def test_what_was_sent_and_the_residual_add_up_to_all_values(name: str) -> None:
    codec = make(name)
    sent, total = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for seed in range(50):
        values = random_values(seed)
        sent += codec.decode(codec.encode(values), NUMEL)
        total += values
        codec.commit()
    torch.testing.assert_close(sent + codec.residual, total, rtol=0, atol=50 * 2.0**-22)
    assert codec.residual.abs().max() > 0


@pytest.mark.parametrize("name", LOSSY)
def test_one_round_by_the_equation(name: str) -> None:
    codec, inner = make(name), make_codec(name)
    codec.encode(random_values(0))
    codec.commit()
    corrected = random_values(1) + codec.residual
    payload = codec.encode(random_values(1))
    assert torch.equal(payload, inner.encode(corrected))
    codec.commit()
    assert torch.equal(codec.residual, corrected - inner.decode(payload, NUMEL))


def test_a_void_round_leaves_no_trace() -> None:
    with_void_round, without = make(), make()
    for codec in (with_void_round, without):
        codec.encode(random_values(0))
        codec.commit()
    before = with_void_round.residual.clone()
    with_void_round.encode(random_values(1))
    with_void_round.rollback()
    assert torch.equal(with_void_round.residual, before)
    values = random_values(1) + random_values(2)  # the next pseudo-gradient contains the missed work
    assert torch.equal(with_void_round.encode(values), without.encode(values))


def test_work_of_void_rounds_is_counted_once() -> None:
    codec = make()
    missed = torch.zeros(NUMEL)
    sent, total = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for seed in range(30):
        values = random_values(seed)
        total += values
        pseudo_gradient = missed + values
        decoded = codec.decode(codec.encode(pseudo_gradient), NUMEL)
        if seed % 3 == 1:
            codec.rollback()
            missed = pseudo_gradient
        else:
            codec.commit()
            missed = torch.zeros(NUMEL)
            sent += decoded
    torch.testing.assert_close(sent + codec.residual + missed, total, rtol=0, atol=30 * 2.0**-21)


def test_a_value_too_small_for_its_block_gets_through_with_feedback_only() -> None:
    values = torch.full((NUMEL,), 0.003)
    values[0] = 1.0
    plain, feedback = make_codec("fp4"), make("fp4")
    without, through = torch.zeros(NUMEL), torch.zeros(NUMEL)
    rounds = 200
    for _ in range(rounds):
        plain.accumulate(plain.encode(values), without, 1 / rounds)
        feedback.accumulate(feedback.encode(values), through, 1 / rounds)
        feedback.commit()
    assert (without[1:] == 0).all()
    torch.testing.assert_close(through, values, rtol=0.05, atol=0)


def test_values_are_left_alone_and_not_held() -> None:
    codec, values = make(), random_values(0)
    payload = codec.encode(values)
    assert torch.equal(values, random_values(0))
    values.zero_()
    codec.commit()
    assert torch.equal(codec.residual, random_values(0) - codec.decode(payload, NUMEL))


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
    for codec in (first, second):
        if pending:
            codec.commit()
    assert first.residual.abs().max() > 0
    assert torch.equal(first.residual, second.residual)
    assert torch.equal(first.encode(random_values(2)), second.encode(random_values(2)))


def test_loading_a_state_without_a_candidate_drops_a_pending_one() -> None:
    codec = make()
    codec.encode(random_values(0))
    codec.load_state_dict(make().state_dict())
    assert not codec.pending
    assert (codec.residual == 0).all()


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
    codec = make()
    codec.encode(random_values(0))
    codec.commit()
    before = codec.residual.clone()
    with pytest.raises(CheckpointError, match="Nothing was loaded"):
        codec.load_state_dict(state)
    assert torch.equal(codec.residual, before)


def test_every_encode_has_one_outcome() -> None:
    codec = make()
    with pytest.raises(CodecError, match=r"commit\(\) was called without an encode\(\)"):
        codec.commit()
    codec.rollback()
    codec.encode(random_values(0))
    with pytest.raises(CodecError, match="while a round is in flight"):
        codec.encode(random_values(1))
    codec.commit()
    with pytest.raises(CodecError, match=r"commit\(\) was called without an encode\(\)"):
        codec.commit()


def test_each_fragment_needs_its_own() -> None:
    codec = make()
    with pytest.raises(CodecError, match="residual of 100 values but got 99"):
        codec.encode(random_values(0, NUMEL - 1))
    assert not codec.pending


def test_sizes_checks_and_decoding_are_the_inner_codecs() -> None:
    inner, codec = make_codec("int8", block_size=64), ErrorFeedback(make_codec("int8", block_size=64), NUMEL)
    assert codec.name == "int8+error-feedback"
    assert codec.parameters() == {"block_size": 64}
    assert codec.implementation == inner.implementation
    assert codec.saturation_limit == inner.saturation_limit
    assert codec.block_size == inner.block_size == 64
    assert codec.payload_bytes(NUMEL) == inner.payload_bytes(NUMEL)
    payload = inner.encode(random_values(0))
    assert torch.equal(codec.decode(payload, NUMEL), inner.decode(payload, NUMEL))
    out = torch.zeros(NUMEL)
    codec.accumulate(payload, out, 2.0)
    assert torch.equal(out, 2 * inner.decode(payload, NUMEL))
    codec.validate(payload, NUMEL)
    assert torch.equal(codec.cut(payload, NUMEL, 64, NUMEL), inner.encode(random_values(0)[64:]))
    with pytest.raises(CodecError, match="int8"):
        codec.validate(payload.fill_(255), NUMEL)
    assert not codec.pending


def test_an_empty_fragment_works() -> None:
    codec = make(numel=0)
    assert codec.encode(torch.zeros(0)).shape == (0,)
    codec.commit()
    assert codec.residual.shape == (0,)


def test_a_decay_forgets_what_waits() -> None:
    values, codec = torch.tensor([100.0, 1e-3]), ErrorFeedback(make_codec("fp4", block_size=2), 2, decay=0.5)
    expected = torch.zeros(2)
    for _ in range(5):
        payload = codec.encode(values)
        codec.commit()
        expected = values + 0.5 * expected - codec.decode(payload, 2)
        assert torch.equal(codec.residual, expected)
    assert float(codec.residual[1]) < 2e-3
    with pytest.raises(ConfigurationError, match=r"decay must be a number from 0 to 1, got 1\.5"):
        ErrorFeedback(make_codec("fp4"), 2, decay=1.5)
