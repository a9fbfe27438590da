"""Inner steps of one replica: accumulation, clipping, precision, errors, and resuming from a saved state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.algorithm import ValueSchedule
from diloco.errors import NonFiniteError
from diloco.model import document_numbers
from diloco.train import OptimizerSettings, inner_learning_rate
from tests.train.inner_loops import batch, make_loop, optimizer_state, spoil, train, weights


class TestAccumulation:
    @pytest.mark.parametrize("pieces", [2, 6, 5, 7])
    @pytest.mark.parametrize("precision", ["float32", "float16"])
    def test_pieces_have_the_gradient_and_the_loss_of_the_batch(self, pieces: int, precision: Any) -> None:
        """The batch has six sequences; 5 pieces are uneven, 7 are more than the batch has sequences."""
        whole, parts = make_loop(precision), make_loop(precision, accumulation=pieces)
        losses = [float(loop.accumulate_gradients(*batch(0))) for loop in (whole, parts)]
        for loop in (whole, parts):
            loop.unscale()
        tolerance = 1e-5 if precision == "float32" else 2e-2
        assert losses[1] == pytest.approx(losses[0], rel=tolerance)
        for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(
                other.grad, one.grad, rtol=tolerance, atol=tolerance * float(one.grad.abs().max())
            )


class TestClipping:
    @pytest.mark.parametrize("clip_norm", [1e-3, 1e9, None])
    def test_the_step_is_that_of_the_clipped_gradient(self, clip_norm: float | None) -> None:
        """With plain SGD the step shows the gradient. The reported norm is the one before clipping."""
        loop = make_loop(name="SGD", arguments={}, clip_norm=clip_norm, rate=ValueSchedule(peak=1.0))
        before = weights(loop.model)
        loop.accumulate_gradients(*batch(0))
        gradient = torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None])
        norm = float(gradient.norm())
        assert loop.apply(0).gradient_norm == pytest.approx(norm, rel=1e-5)
        factor = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
        torch.testing.assert_close(before - weights(loop.model), gradient * factor, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_a_gradient_that_is_no_number_stops_the_run_with_nothing_applied(
    value: float, precision: Any, clip_norm: float | None
) -> None:
    loop = make_loop(precision, clip_norm=clip_norm)
    train(loop, 2)
    held, state = weights(loop.model), optimizer_state(loop)
    loop.accumulate_gradients(*batch(2))
    loop.unscale()
    spoil(loop.model, value)
    with pytest.raises(NonFiniteError, match=r"gradient norm of inner step 3 is (nan|inf)\. Nothing was applied"):
        loop.apply(2)
    assert torch.equal(weights(loop.model), held)
    assert torch.equal(optimizer_state(loop), state)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_near_float32_with_float32_parameters_and_state(precision: Any) -> None:
    loop, reference = make_loop(precision), make_loop()
    losses, expected = train(loop, 30), train(reference, 30)
    assert losses != expected, "the forward pass differs"
    assert losses[-1] == pytest.approx(expected[-1], abs=0.1)
    assert losses[-1] < 0.7 * losses[0]
    assert loop.scaler.is_enabled() == (precision == "float16")
    tensors = [t for state in loop.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    assert {t.dtype for t in [*loop.model.parameters(), *tensors]} == {torch.float32}


class TestMaskedSteps:
    """On CUDA the device skips a bad step by itself; the fused kernels of the CPU can do the same."""

    @pytest.mark.parametrize("name", ["AdamW", "SGD"])
    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_good_steps_have_the_same_bits(self, name: str, precision: Any) -> None:
        arguments = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.1}
        masked, plain = (make_loop(precision, name=name, arguments=arguments) for _ in range(2))
        assert not plain.masked, "on the CPU this gains nothing"
        masked.masked = masked.can_mask
        assert masked.masked
        assert train(masked, 5) == train(plain, 5)
        assert torch.equal(weights(masked.model), weights(plain.model))
        assert torch.equal(optimizer_state(masked), optimizer_state(plain))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_bad_one_is_left_out_before_the_host_knows(self, value: float) -> None:
        loop = make_loop()
        loop.masked = True
        train(loop, 2)
        held, state = weights(loop.model), optimizer_state(loop)
        loop.accumulate_gradients(*batch(2))
        spoil(loop.model, value)
        norm = loop.begin(2)
        assert torch.equal(weights(loop.model), held)
        assert torch.equal(optimizer_state(loop), state)
        with pytest.raises(NonFiniteError, match="Nothing was applied"):
            loop.end(2, float(norm))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_documents_are_kept_apart_where_asked_for(accumulation: int) -> None:
    tokens, targets = batch(0)
    loops = [make_loop(accumulation=accumulation) for _ in range(2)]
    loops[0].end_of_document = 3
    losses = [float(loop.accumulate_gradients(tokens, targets)) for loop in loops]
    expected = loops[0].model.loss(tokens, targets, document_numbers(tokens, 3)).cross_entropy
    assert losses[0] == pytest.approx(float(expected), rel=1e-6)
    assert losses[0] != losses[1]


class TestState:
    @pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("name", ["AdamW", "SGD"])
    def test_going_on_from_a_saved_state_is_never_stopping(self, precision: Any, name: str) -> None:
        """The bits are equal (invariant 6), also after a skipped step where a precision has one."""
        arguments = {"momentum": 0.9} if name != "AdamW" else {"weight_decay": 0.1}
        rate = inner_learning_rate(OptimizerSettings(warmup_steps=3, learning_rate=1e-2), 12)
        first, second = (make_loop(precision, name=name, arguments=arguments, rate=rate) for _ in range(2))
        train(first, 4)
        if precision == "float16":
            first.accumulate_gradients(*batch(99))
            spoil(first.model, math.inf)
            first.unscale()
            first.apply(4)
        second.model.load_state_dict(first.model.state_dict())
        second.load_state_dict(first.state_dict())
        expected = train(first, 6, start=5)  # the first continues: the second must have loaded a copy
        assert train(second, 6, start=5) == expected
        assert torch.equal(weights(first.model), weights(second.model))
        assert first.scaler.state_dict() == second.scaler.state_dict()
