"""Inner steps of one replica: optimizer, learning rate, accumulation, clipping, precision, errors, compiled blocks."""

import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import ValueSchedule
from diloco.errors import ConfigurationError, NonFiniteError
from diloco.model import DecoderSettings, Transformer, build_model, document_numbers
from diloco.train import (
    InnerLoop,
    OptimizerSettings,
    ParallelModel,
    inner_learning_rate,
    make_inner_optimizer,
    prepare_blocks,
)
from diloco.trained import generate

MODEL = DecoderSettings(layers=1, width=16, ffn_width=32, heads=2, vocab_size=17, max_sequence_length=16)
CONSTANT = ValueSchedule(peak=1e-2)
DECAY, MOMENTUM = ("AdamW", {"weight_decay": 0.1}), ("SGD", {"momentum": 0.9})


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Return six sequences that count upwards modulo the vocabulary, which are learnt in a few steps."""
    starts = torch.randint(0, 17, (6, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (starts + torch.arange(9)) % 17
    return tokens[:, :-1], tokens[:, 1:]


def make_loop(
    precision: Any = "float32",
    optimizer: tuple[str, dict[str, Any]] = DECAY,
    rate: ValueSchedule = CONSTANT,
    **arguments: Any,
) -> InnerLoop:
    model, (name, given) = build_model(MODEL, seed=0), optimizer
    inner = make_inner_optimizer(OptimizerSettings(name=name, arguments=given, learning_rate=rate.peak), model)
    return InnerLoop(ParallelModel(model), inner, learning_rate=rate, precision=precision, **arguments)


def train(loop: InnerLoop, steps: int, *, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        losses.append(float(loop.accumulate_gradients(*batch(step))))
        loop.unscale()
        loop.apply(step)
    return losses


def weights(loop: InnerLoop) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in loop.model.parameters()])


def state_of(loop: InnerLoop) -> Tensor:
    """Return all weights, and all numbers in the state of the inner optimizer."""
    kept = [value for state in loop.optimizer.state.values() for value in state.values()]
    numbers = [torch.as_tensor(value, dtype=torch.float64).flatten() for value in kept]
    return torch.cat([weights(loop).double(), *numbers])


def spoil(loop: InnerLoop, value: float) -> None:
    """Set one gradient value to NaN or infinity."""
    parameter = next(loop.model.parameters())
    assert parameter.grad is not None
    parameter.grad[3, 2] = value


@pytest.mark.parametrize(
    ("pieces", "precision", "end"), [(2, "float32", None), (6, "float32", 3), (5, "float32", 3), (7, "float16", None)]
)
def test_pieces_have_the_gradient_and_the_loss_of_the_batch(pieces: int, precision: str, end: int | None) -> None:
    """The batch has six sequences; 5 pieces are uneven, 7 are more than the batch has sequences. Documents end at 3."""
    whole, parts = (make_loop(precision, accumulation=number, end_of_document=end) for number in (1, pieces))
    tokens, targets = batch(0)
    targets = targets.clone()
    targets[0, :7] = targets[1, :3] = targets[3] = -100  # these don't count, and the others weigh the same
    loss = whole.model.loss(tokens, targets, None if end is None else document_numbers(tokens, end)).cross_entropy
    losses = [float(loop.accumulate_gradients(tokens, targets)) for loop in (whole, parts)]
    assert precision != "float32" or losses[0] == pytest.approx(float(loss), rel=1e-6)
    assert parts.counted == pytest.approx(30 / 48)
    for loop in (whole, parts):
        loop.unscale()
    tolerance = 1e-5 if precision == "float32" else 2e-2
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=tolerance, atol=tolerance * float(one.grad.abs().max()))


@pytest.mark.parametrize("clip_norm", [1e-3, 1e9, None])
def test_the_step_is_that_of_the_clipped_gradient(clip_norm: float | None) -> None:
    """With plain SGD the step shows the gradient. The reported norm is the one before clipping."""
    loop = make_loop(optimizer=("SGD", {}), clip_norm=clip_norm, rate=ValueSchedule(peak=1.0))
    before = weights(loop)
    loop.accumulate_gradients(*batch(0))
    gradient = torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None])
    norm = float(gradient.norm())
    assert loop.apply(0).gradient_norm == pytest.approx(norm, rel=1e-5)
    factor = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
    torch.testing.assert_close(before - weights(loop), gradient * factor, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("value", "precision", "clip_norm"),
    [(math.nan, "float32", 1.0), (-math.inf, "float32", None), (math.nan, "bfloat16", None)],
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_gradient_that_is_no_number_stops_the_run_with_nothing_applied(
    value: float, precision: str, clip_norm: float | None, masked: bool
) -> None:
    """On CUDA the device skips the step before the host knows; the fused kernels of the CPU can do the same."""
    loop = make_loop(precision, clip_norm=clip_norm)
    loop.masked = masked
    train(loop, 2)
    before = state_of(loop)
    loop.accumulate_gradients(*batch(2))
    spoil(loop, value)
    norm = loop.begin(2)
    assert torch.equal(state_of(loop), before)
    with pytest.raises(NonFiniteError, match=r"gradient norm of inner step 3 is (nan|inf)\. Nothing was applied"):
        loop.end(2, float(norm))
    assert torch.equal(state_of(loop), before)


def test_the_norm_of_no_gradients_is_on_the_device_too() -> None:
    """Regression: on a GPU, a replica failed that lost the others while its gradients were in flight."""
    model = build_model(MODEL, seed=0, device="meta")
    loop = InnerLoop(ParallelModel(model), torch.optim.SGD(model.parameters()), learning_rate=CONSTANT)
    assert loop.begin(0, skip=True).device == loop.device


@pytest.mark.parametrize("optimizer", [DECAY, MOMENTUM])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_good_masked_steps_have_the_same_bits(optimizer: Any, precision: str) -> None:
    masked, plain = (make_loop(precision, optimizer) for _ in range(2))
    assert not plain.masked, "on the CPU this gains nothing"
    masked.masked = masked.can_mask
    assert masked.masked
    assert train(masked, 5) == train(plain, 5)
    assert torch.equal(state_of(masked), state_of(plain))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_near_float32_with_float32_parameters_and_state(precision: str) -> None:
    loop, reference = make_loop(precision), make_loop()
    losses, expected = train(loop, 30), train(reference, 30)
    assert losses != expected, "the forward pass differs"
    assert losses[-1] == pytest.approx(expected[-1], abs=0.1)
    assert losses[-1] < 0.7 * losses[0]
    tensors = [t for state in loop.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    assert {t.dtype for t in [*loop.model.parameters(), *tensors]} == {torch.float32}


@given(
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 60),
    ratio=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_the_rate_rises_then_never_again_also_after_the_end(
    schedule: Any, steps: int, warmup: int, ratio: float
) -> None:
    """Property: for every length and warm-up that settings allow."""
    warmup = min(warmup, steps)
    rate = inner_learning_rate(
        OptimizerSettings(schedule=schedule, warmup_steps=warmup, final_ratio=ratio, learning_rate=2.0), steps
    )
    values = [rate(step) for step in range(steps + 20)]
    assert values[:warmup] == sorted(values[:warmup])
    assert max(values) == 2.0
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(values[warmup:]))
    assert len(set(values[steps:])) == 1
    stays = schedule == "constant" or (schedule == "wsd" and warmup == steps)
    assert values[-1] == pytest.approx(2.0 if stays else 2.0 * ratio)


def test_the_rate_is_a_function_of_the_global_step_alone() -> None:
    """Invariant 7: a replica that joins at step 30 has the swarm's rate at once."""
    rate = inner_learning_rate(OptimizerSettings(learning_rate=1e-2, warmup_steps=10), 50)
    joiner = make_loop(rate=rate)
    joiner.accumulate_gradients(*batch(0))
    assert joiner.apply(30).learning_rate == rate(30)
    assert [group["lr"] for group in joiner.optimizer.param_groups] == [rate(30)] * 2


@pytest.mark.parametrize(
    "optimizer",
    [
        ("AdamW", {"betas": [0.9, 0.95], "weight_decay": 0.1}),  # a list, as from TOML
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("Adafactor", {"weight_decay": 0.0}),
        ("RMSprop", {"momentum": 0.5}),
    ],
)
def test_any_optimizer_of_torch_trains_without_torchs_compiler(
    optimizer: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler takes 70 MB in every process that imports it, and sympy, for shapes on ``meta``, 40 MB."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    loop = make_loop(optimizer=optimizer, rate=ValueSchedule(peak=0.1 if optimizer[0] == "SGD" else 1e-2))
    losses = train(loop, 30)
    assert type(loop.optimizer).__name__ == optimizer[0]
    assert losses[-1] < 0.95 * losses[0]


def test_muon_trains_hidden_matrices_at_a_rate_of_their_own_by_the_same_schedule() -> None:
    loop = make_loop(optimizer=("Muon", {"matrix_lr_ratio": 4.0, "momentum": 0.9}))
    losses = train(loop, 15)
    assert losses[-1] < 0.95 * losses[0]
    rates = [(group["orthogonalise"], group["lr"]) for group in loop.optimizer.param_groups]
    assert rates == [(True, 4 * CONSTANT(0)), (False, CONSTANT(0)), (False, CONSTANT(0))]
    assert all(group["fused"] for group in loop.optimizer.param_groups), "AdamW steps the others by its fused kernel"


@pytest.mark.parametrize("arguments", [{"weight_decay": 0.5}, {}])
def test_weight_decay_acts_on_matrices_only(arguments: dict[str, Any]) -> None:
    """This includes the default of the class, such as AdamW's 0.01: with a zero gradient, norms do not change."""
    loop = make_loop(optimizer=("AdamW", arguments), clip_norm=None)
    before = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    for parameter in loop.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loop.apply(0)
    for name, parameter in loop.model.named_parameters():
        decay = arguments.get("weight_decay", 0.01) if parameter.dim() == 2 else 0.0
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 1e-2 * decay), rtol=1e-6, atol=0)
        assert decay or torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("AdmaW", {}, "did you mean 'AdamW'"),
        ("lr_scheduler", {}, "not an optimizer of torch.optim"),
        ("AdamW", {"lr": 0.1}, "multiple values for keyword argument 'lr'"),
        ("AdamW", {"betas": (0.9, 1.5)}, "torch.optim.AdamW refused .*1.5"),
        ("Muon", {"ns_steps": 5}, r"diloco.muon refused \{'ns_steps': 5\}: TypeError"),  # torch.optim.Muon has it
        ("Muon", {"matrix_lr_ratio": -1}, "matrix_lr_ratio must be a finite number above 0, got -1"),  # it climbed
        ("Muon", {"momentum": 1.5}, "momentum must be a number of at least 0 and below 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_inner_optimizer(OptimizerSettings(name=name, arguments=arguments), build_model(MODEL, seed=0))


@pytest.mark.parametrize(("value", "seen_by_scaler"), [(math.inf, True), (math.nan, False)])
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_an_infinite_gradient_skips_the_step_and_lowers_the_scale(
    value: float, seen_by_scaler: bool, name: str
) -> None:
    """This holds with and without a fused kernel, and for infinities that arise after the gradients are unscaled."""
    loop = make_loop("float16", (name, {}))
    train(loop, 2)
    before, scale = state_of(loop), loop.scaler.get_scale()
    loop.accumulate_gradients(*batch(2))
    if seen_by_scaler:
        spoil(loop, value)
    loop.unscale()
    spoil(loop, value)
    result = loop.apply(2)
    assert result.skipped
    assert not math.isfinite(result.gradient_norm)
    assert loop.scaler.get_scale() == scale / 2
    assert torch.equal(state_of(loop), before)
    assert all(p.grad is None for p in loop.model.parameters())
    assert not any(math.isnan(loss) for loss in train(loop, 2, start=3))


def test_a_mean_that_is_finite_is_applied_though_this_replicas_gradients_were_not() -> None:
    """The other replicas step with the mean; if this replica alone skipped, the replicas would diverge."""
    spoilt, sound = make_loop("float16"), make_loop("float16")
    for loop in (spoilt, sound):
        loop.accumulate_gradients(*batch(0))
    spoil(spoilt, math.inf)
    for loop in (spoilt, sound):
        loop.unscale()
        for parameter in loop.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        assert not loop.apply(0).skipped
    assert torch.equal(weights(spoilt), weights(sound))
    assert spoilt.scaler.get_scale() == sound.scaler.get_scale() / 2


BLOCKS = DecoderSettings(
    layers=2, width=16, ffn_width=24, heads=4, kv_heads=2, vocab_size=17, qk_norm=True, max_sequence_length=16
)
TOKENS = torch.randint(17, (2, 13), generator=torch.Generator().manual_seed(0))


def gradients(model: Transformer, *, documents: bool = False, precision: Any = torch.float32) -> list[Tensor]:
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    model.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        loss = model.loss(inputs, targets, document_numbers(inputs, 3) if documents else None).loss
    torch.autograd.backward(loss)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


TRACED = pytest.mark.filterwarnings("ignore::DeprecationWarning", r"ignore:The \.grad attribute of a Tensor")
"""Torch's tracer warns about its own code."""


@pytest.fixture
def counts() -> Iterator[Any]:
    """What torch's tracer counts."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_recomputing_changes_no_bit(checkpointing: Any, precision: torch.dtype) -> None:
    plain, recomputed = build_model(BLOCKS, seed=0), build_model(BLOCKS, seed=0)
    prepare_blocks(recomputed, checkpointing=checkpointing)
    for documents in (False, True):
        expected = gradients(plain, documents=documents, precision=precision)
        found = gradients(recomputed, documents=documents, precision=precision)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@TRACED
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_compiled_blocks_have_no_graph_break_and_are_compiled_once(checkpointing: Any, counts: Any) -> None:
    """The backend "aot_eager" generates no code but splits and recomputes like the real one."""
    plain, compiled = build_model(BLOCKS, seed=0), build_model(BLOCKS, seed=0)
    prepare_blocks(compiled, checkpointing=checkpointing, compiled=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(gradients(compiled), gradients(plain), rtol=1e-5, atol=1e-6)
    assert counts["stats"]["unique_graphs"] == 1, "one graph serves all blocks"
    assert not counts["graph_break"]


def test_no_block_keeps_the_weights_of_its_first_evaluation_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TORCHINDUCTOR_FREEZING=1 would have inductor do so, which needs a compiler of C++ to be seen."""
    compile_block = mock.Mock(side_effect=lambda function, **_: function)
    monkeypatch.setattr(torch, "compile", compile_block)
    prepare_blocks(build_model(MODEL, seed=0), compiled=True)
    options = [call.kwargs["options"] for call in compile_block.call_args_list]
    assert options == [{"freezing": False}] * 2, "for training and for evaluation"


@TRACED
@torch.no_grad()
def test_evaluation_runs_compiled_where_training_does_and_generation_does_not(counts: Any) -> None:
    plain, compiled = build_model(BLOCKS, seed=0), build_model(BLOCKS, seed=0)
    prepare_blocks(compiled, checkpointing="full", compiled=True, backend="aot_eager")
    assert len(list(generate(compiled, [1, 2], torch.Generator(), max_new_tokens=3))) == 3
    assert not counts["stats"]["unique_graphs"]
    for _ in range(2):
        torch.testing.assert_close(compiled(TOKENS[:, :8]), plain(TOKENS[:, :8]), rtol=1e-5, atol=1e-6)
    assert counts["stats"]["unique_graphs"] == 1
