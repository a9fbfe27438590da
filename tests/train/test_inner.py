"""One replica's inner steps: learning rate, any optimizer, accumulation, clipping, precision, and what stops it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from diloco.algorithm.schedule import SyncSchedule
from diloco.algorithm.value_schedule import ValueSchedule
from diloco.errors import ConfigurationError, NonFiniteError
from diloco.model.language_model import document_numbers
from diloco.model.settings import ModelSettings
from diloco.model.transformer import Transformer, build_model
from diloco.train.inner import InnerLoop, inner_learning_rate, make_inner_optimizer
from diloco.train.replica import DiLoCo
from diloco.train.settings import InnerSettings
from diloco.transport.in_process import InProcessTransport

MODEL = ModelSettings(layers=1, width=16, ffn_width=32, heads=2, vocab_size=17, max_sequence_length=16)
CONSTANT = ValueSchedule(peak=1e-2)


def batch(seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards from somewhere, modulo the vocabulary: learnt in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 17, (size, 1), generator=generator)
    tokens = (starts + torch.arange(9)) % 17
    return tokens[:, :-1], tokens[:, 1:]


def make_loop(
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    *,
    name: str = "AdamW",
    arguments: dict[str, Any] | None = None,
    rate: ValueSchedule = CONSTANT,
    clip_norm: float | None = 1.0,
    accumulation: int = 1,
) -> InnerLoop:
    model = build_model(MODEL, seed=0)
    given = {"weight_decay": 0.1} if arguments is None else arguments
    optimizer = make_inner_optimizer(InnerSettings(name=name, arguments=given, learning_rate=rate.peak), model)
    return InnerLoop(
        model, optimizer, learning_rate=rate, clip_norm=clip_norm, precision=precision, accumulation=accumulation
    )


def train(loop: InnerLoop, steps: int, *, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        losses.append(float(loop.accumulate_gradients(*batch(step))))
        loop.unscale()
        loop.apply(step)
    return losses


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def optimizer_state(loop: InnerLoop) -> Tensor:
    """Every number that the inner optimizer keeps."""
    kept = [value for state in loop.optimizer.state.values() for value in state.values()]
    return torch.cat([torch.as_tensor(value, dtype=torch.float64).flatten() for value in kept])


def spoil(model: nn.Module, value: float) -> None:
    """One gradient is no number."""
    parameter = next(model.parameters())
    assert parameter.grad is not None
    parameter.grad[3, 2] = value


class TestLearningRate:
    @given(
        schedule=st.sampled_from(["cosine", "wsd", "constant"]),
        steps=st.integers(1, 60),
        warmup=st.integers(0, 60),
        decay=st.none() | st.integers(0, 60),
        ratio=st.sampled_from([0.0, 0.05, 1.0]),
    )
    def test_rises_then_never_again_also_after_the_end(
        self, schedule: Any, steps: int, warmup: int, decay: int | None, ratio: float
    ) -> None:
        """Property: for every length, warm-up and decay that settings allow."""
        warmup = min(warmup, steps)
        decay = None if decay is None else min(decay, steps - warmup)
        settings = InnerSettings(
            schedule=schedule, warmup_steps=warmup, decay_steps=decay, final_ratio=ratio, learning_rate=2.0
        )
        rate = inner_learning_rate(settings, steps)
        values = [rate(step) for step in range(steps + 20)]
        assert values[:warmup] == sorted(values[:warmup])
        assert max(values) == 2.0
        after = values[warmup:]
        assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
        assert len(set(values[steps:])) == 1
        stays = schedule == "constant" or (schedule == "wsd" and (decay == 0 or warmup == steps))
        assert values[-1] == pytest.approx(2.0 if stays else 2.0 * ratio)

    def test_it_is_a_function_of_the_global_step_alone(self) -> None:
        """Invariant 7: a joiner at step 30 has the swarm's rate at once."""
        settings = InnerSettings(learning_rate=1e-2, warmup_steps=10)
        rate = inner_learning_rate(settings, 50)
        joiner = make_loop(rate=inner_learning_rate(settings, 50))
        joiner.accumulate_gradients(*batch(0))
        assert joiner.apply(30).learning_rate == rate(30)
        assert [group["lr"] for group in joiner.optimizer.param_groups] == [rate(30)] * 2

    def test_wsd_decays_over_a_fifth_unless_told_otherwise(self) -> None:
        def stays_for(decay_steps: int | None) -> int:
            settings = InnerSettings(schedule="wsd", warmup_steps=0, decay_steps=decay_steps, learning_rate=1.0)
            rate = inner_learning_rate(settings, 100)
            return sum(rate(step) == 1.0 for step in range(100))

        assert [stays_for(decay) for decay in (None, 40, 1, 0)] == [81, 61, 100, 100]


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"betas": [0.9, 0.95], "weight_decay": 0.1}),  # a list, as from TOML
    ("AdamW", {"foreach": True}),
    ("Adam", {"amsgrad": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adafactor", {"weight_decay": 0.0}),
    ("RAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("NAdam", {}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("ASGD", {}),
    ("RMSprop", {"momentum": 0.5}),
    ("Rprop", {}),
]


class TestOptimizer:
    @pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS)
    def test_any_of_torch_trains(self, name: str, arguments: dict[str, Any]) -> None:
        rate = ValueSchedule(peak=1.0 if name == "Adadelta" else 0.1 if name == "SGD" else 1e-2)
        loop = make_loop(name=name, arguments=arguments, rate=rate)
        losses = train(loop, 30)
        assert type(loop.optimizer).__name__ == name
        assert losses[-1] < 0.95 * losses[0]
        assert all(p.dtype == torch.float32 for p in loop.model.parameters())

    def test_muon_says_that_it_takes_matrices_only_and_trains_those(self) -> None:
        model = build_model(MODEL, seed=0)
        with pytest.raises(ConfigurationError, match=r"torch\.optim\.Muon refused .* only supports 2D"):
            make_inner_optimizer(InnerSettings(name="Muon", arguments={}), model)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        optimizer = make_inner_optimizer(InnerSettings(name="Muon", arguments={}), model)
        loop = InnerLoop(model, optimizer, learning_rate=CONSTANT)
        assert train(loop, 15)[-1] < 2.7

    @pytest.mark.parametrize("arguments", [{"weight_decay": 0.5}, {}, {"betas": (0.9, 0.95)}])
    def test_weight_decay_acts_on_matrices_only(self, arguments: dict[str, Any]) -> None:
        """Also where it is the class's own default, as AdamW's 0.01: a zero gradient leaves norms as they are."""
        loop = make_loop(arguments=arguments, clip_norm=None)
        before = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
        for parameter in loop.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        loop.apply(0)
        for name, parameter in loop.model.named_parameters():
            decay = arguments.get("weight_decay", 0.01) if parameter.dim() == 2 else 0.0
            torch.testing.assert_close(parameter.detach(), before[name] * (1 - 1e-2 * decay), rtol=1e-6, atol=0)
            if not decay:
                assert torch.equal(parameter, before[name]), name

    def test_no_weight_decay_is_one_group(self) -> None:
        assert len(make_loop(arguments={"weight_decay": 0.0}).optimizer.param_groups) == 1

    def test_groups_hold_what_is_trainable_once_and_none_is_empty(self) -> None:
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
        model[1].requires_grad_(False)
        optimizer = make_inner_optimizer(InnerSettings(), model)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in model.parameters() if p.requires_grad}
        assert [len(group["params"]) for group in optimizer.param_groups] == [4]

    @pytest.mark.parametrize("arguments", [{}, {"fused": False}, {"foreach": True}])
    def test_the_fused_kernel_is_taken_unless_told_otherwise(self, arguments: dict[str, Any]) -> None:
        group = make_loop(arguments=arguments).optimizer.param_groups[0]
        assert bool(group["fused"]) is (not arguments)

    @pytest.mark.parametrize(
        ("name", "arguments", "words"),
        [
            ("AdmaW", {}, "did you mean 'AdamW'"),
            ("Optimizer", {}, "no optimizer of torch.optim"),
            ("lr_scheduler", {}, "no optimizer of torch.optim"),
            (
                "AdamW",
                {"weight_deacy": 0.1},
                "arguments.weight_deacy is no argument of AdamW; did you mean 'weight_decay'",
            ),
            ("SGD", {"betas": (0.9, 0.95)}, "betas is no argument of SGD"),
            ("AdamW", {"params": []}, "params is no argument of AdamW"),
            ("AdamW", {"lr": 0.1}, "inner.learning_rate, from which the schedule starts, would work"),
            ("AdamW", {"betas": (0.9, 1.5)}, "torch.optim.AdamW refused .*1.5"),
            ("AdamW", {"betas": 0.9}, "torch.optim.AdamW refused"),
            ("SGD", {"nesterov": True}, "torch.optim.SGD refused .*momentum"),
            ("AdamW", {"eps": -1.0}, "torch.optim.AdamW refused .*-1.0"),
            ("LBFGS", {}, "'LBFGS' evaluates the loss several times a step; AdamW or SGD would work"),
            ("SparseAdam", {}, "'SparseAdam' takes sparse gradients only"),
        ],
    )
    def test_what_cannot_work_is_refused_before_anything_starts(
        self, name: str, arguments: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=words) as caught:
            make_inner_optimizer(InnerSettings(name=name, arguments=arguments), build_model(MODEL, seed=0))
        assert str(caught.value).endswith("Nothing was started.")


class TestAccumulation:
    @pytest.mark.parametrize("pieces", [2, 3, 6, 4, 5, 7])
    @pytest.mark.parametrize("precision", ["float32", "float16"])
    def test_pieces_have_the_gradient_and_the_loss_of_the_batch(self, pieces: int, precision: Any) -> None:
        """Six sequences; 4 and 5 pieces are uneven, 7 are more than there are."""
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

    def test_the_loss_is_the_models_own(self) -> None:
        loop = make_loop(accumulation=3)
        expected = float(loop.model.loss(*batch(0)).cross_entropy)
        assert float(loop.accumulate_gradients(*batch(0))) == pytest.approx(expected, rel=1e-6)

    def test_gradients_add_up_until_they_are_applied_and_are_cleared_then(self) -> None:
        loop = make_loop()
        loop.accumulate_gradients(*batch(0))
        once = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
        loop.accumulate_gradients(*batch(0))
        twice = [p.grad for p in loop.model.parameters() if p.grad is not None]
        assert all(torch.equal(b, 2 * a) for a, b in zip(once, twice, strict=True))
        loop.apply(0)
        assert all(p.grad is None for p in loop.model.parameters())


class TestClipping:
    @pytest.mark.parametrize(("clip_norm", "factor"), [(1e-3, None), (1e9, 1.0), (None, 1.0)])
    def test_the_step_is_that_of_the_clipped_gradient(self, clip_norm: float | None, factor: float | None) -> None:
        """Plain SGD, so that the step shows the gradient; what is reported is the norm before clipping."""
        loop = make_loop(name="SGD", arguments={}, clip_norm=clip_norm, rate=ValueSchedule(peak=1.0))
        before = weights(loop.model)
        loop.accumulate_gradients(*batch(0))
        gradient = torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None])
        norm = float(gradient.norm())
        assert loop.apply(0).gradient_norm == pytest.approx(norm, rel=1e-5)
        expected = factor if factor is not None and clip_norm != 1e-3 else 1e-3 / norm
        torch.testing.assert_close(before - weights(loop.model), gradient * expected, rtol=1e-4, atol=1e-7)

    def test_frozen_parameters_stay(self) -> None:
        loop = make_loop()
        loop.model.embedding.weight.requires_grad_(False)
        held = loop.model.embedding.weight.clone()
        train(loop, 2)
        assert torch.equal(loop.model.embedding.weight, held)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
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


def test_bfloat16_trains_with_float32_parameters_and_state() -> None:
    loop, reference = make_loop("bfloat16"), make_loop()
    losses, expected = train(loop, 30), train(reference, 30)
    assert losses != expected, "the forward pass is another"
    assert losses[-1] == pytest.approx(expected[-1], abs=0.1)
    assert losses[-1] < 0.7 * losses[0]
    assert not loop.scaler.is_enabled()
    tensors = [t for state in loop.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    assert {t.dtype for t in [*loop.model.parameters(), *tensors]} == {torch.float32}


class TestFloat16:
    def test_trains_with_float32_parameters_near_float32(self) -> None:
        loop, reference = make_loop("float16"), make_loop()
        losses, expected = train(loop, 30), train(reference, 30)
        assert losses[-1] == pytest.approx(expected[-1], abs=0.1)
        assert {p.dtype for p in loop.model.parameters()} == {torch.float32}

    @pytest.mark.parametrize("value", [float("inf"), float("nan")])
    @pytest.mark.parametrize("seen_by_scaler", [True, False])
    @pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
    def test_an_infinite_gradient_skips_the_step_and_lowers_the_scale(
        self, value: float, seen_by_scaler: bool, name: str
    ) -> None:
        """With a fused kernel and without; also when it came about after the gradients were unscaled."""
        loop = make_loop("float16", name=name, arguments={})
        train(loop, 2)
        held, state = weights(loop.model), optimizer_state(loop)
        scale = loop.scaler.get_scale()
        loop.accumulate_gradients(*batch(2))
        if seen_by_scaler:
            spoil(loop.model, value)
        loop.unscale()
        spoil(loop.model, value)
        result = loop.apply(2)
        assert result.skipped
        assert not math.isfinite(result.gradient_norm)
        assert loop.scaler.get_scale() == scale / 2
        assert torch.equal(weights(loop.model), held)
        assert torch.equal(optimizer_state(loop), state)
        assert all(p.grad is None for p in loop.model.parameters())
        assert not any(math.isnan(loss) for loss in train(loop, 2, start=3))

    def test_the_scale_goes_as_torchs_own_would(self) -> None:
        """Reference: GradScaler by its manual, growing after three good steps; a bad one starts the count anew."""
        bad = {2, 7, 8}
        mine, theirs = make_loop("float16"), torch.amp.GradScaler("cpu", growth_interval=3)
        mine.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        for step in range(14):
            mine.accumulate_gradients(*batch(step))
            torch.autograd.backward(theirs.scale(parameter.sum() * (math.inf if step in bad else 1.0)))
            if step in bad:
                spoil(mine.model, math.inf)
            mine.unscale()
            assert mine.apply(step).skipped is (step in bad)
            theirs.step(optimizer)
            theirs.update()
            optimizer.zero_grad()
            assert mine.scaler.get_scale() == theirs.get_scale(), step
            assert mine.scaler.state_dict() == theirs.state_dict(), step

    def test_skipping_for_another_replica_lowers_the_scale_alike(self) -> None:
        """One replica saw infinity, the other skips because of it: the scalers stay the same, count and all."""
        own, others = make_loop("float16"), make_loop("float16")
        for loop in (own, others):
            train(loop, 2)
        held = weights(others.model)
        for loop in (own, others):
            loop.accumulate_gradients(*batch(2))
        spoil(own.model, math.inf)
        for loop in (own, others):
            loop.unscale()
        assert own.apply(2, skip=True).skipped
        result = others.apply(2, skip=True)
        assert result.skipped
        assert math.isfinite(result.gradient_norm)
        assert torch.equal(weights(others.model), held)
        assert own.scaler.state_dict() == others.scaler.state_dict()
        assert own.scaler.state_dict()["_growth_tracker"] == 0

    def test_a_mean_that_is_finite_is_applied_though_this_replicas_gradients_were_not(self) -> None:
        """The others go on without this replica's gradients; if it alone stayed, the replicas would part."""
        spoilt, sound = make_loop("float16"), make_loop("float16")
        for loop in (spoilt, sound):
            loop.accumulate_gradients(*batch(0))
        mean = [torch.full_like(p, 0.01) for p in sound.model.parameters()]
        spoil(spoilt.model, math.inf)
        for loop in (spoilt, sound):
            loop.unscale()
            for parameter, gradient in zip(loop.model.parameters(), mean, strict=True):
                parameter.grad = gradient.clone()
            assert not loop.apply(0).skipped
        assert torch.equal(weights(spoilt.model), weights(sound.model))
        assert spoilt.scaler.get_scale() == sound.scaler.get_scale() / 2

    def test_with_diloco_around_it_a_skipped_step_desynchronises_nothing(self) -> None:
        """Steps, rounds and digests stay those of the swarm, and a scale never touches what is sent."""
        hub = InProcessTransport(2)
        loops = [make_loop("float16", rate=inner_learning_rate(InnerSettings(warmup_steps=4), 24)) for _ in range(2)]
        schedule = SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=1)
        swarm = [
            DiLoCo(loop.model, loop.optimizer, transport=hub.endpoint(m), schedule=schedule)
            for m, loop in enumerate(loops)
        ]
        scales = []
        for step in range(24):
            results = []
            for m, (loop, diloco) in enumerate(zip(loops, swarm, strict=True)):
                loop.accumulate_gradients(*batch(100 * m + step))
                if m == 1 and step in (3, 4, 9):  # before a send, in flight, and in between
                    spoil(loop.model, math.inf)
                loop.unscale()
                results.append(loop.apply(step))
                diloco.begin()
            for diloco in swarm:
                diloco.finish()
            assert [result.skipped for result in results] == [False, step in (3, 4, 9)]
            assert results[0].learning_rate == results[1].learning_rate
            assert swarm[0].steps == swarm[1].steps == step + 1
            assert swarm[0].in_flight == swarm[1].in_flight
            for fragment in range(2):
                assert swarm[0].outer_loop.digest(fragment) == swarm[1].outer_loop.digest(fragment)
            scales.append(tuple(loop.scaler.get_scale() for loop in loops))
        assert [diloco.rounds_void for diloco in swarm] == [0, 0]
        assert swarm[0].rounds_committed == swarm[1].rounds_committed == schedule.rounds(23)
        assert scales[-1] == (2.0**16, 2.0**13)
        largest = max(float(values.abs().max()) for values in swarm[0].outer_loop.global_params)
        assert largest < 10, "the outer optimizer never saw a scaled value"


class TestMaskedSteps:
    """On CUDA the device leaves out a bad step by itself; the CPU's fused kernels can do the same."""

    @pytest.mark.parametrize("name", ["AdamW", "SGD"])
    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_good_steps_have_the_same_bits(self, name: str, precision: Any) -> None:
        arguments = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.1}
        masked, plain = (make_loop(precision, name=name, arguments=arguments) for _ in range(2))
        assert not plain.masked, "on the CPU nothing is gained by it"
        masked.masked = masked._can_mask()
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

    def test_kernels_that_are_not_fused_and_scaled_gradients_are_not_masked(self) -> None:
        assert not make_loop(arguments={"fused": False})._can_mask()
        assert not make_loop("float16")._can_mask()


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
    @pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
    def test_going_on_from_a_saved_state_is_never_stopping(self, precision: Any, name: str) -> None:
        """Invariant 6, bit for bit, after a skipped step where there can be one."""
        arguments = {"momentum": 0.9} if name != "AdamW" else {"weight_decay": 0.1}
        rate = inner_learning_rate(InnerSettings(warmup_steps=3, learning_rate=1e-2), 12)
        make: Callable[[], InnerLoop] = lambda: make_loop(precision, name=name, arguments=arguments, rate=rate)  # noqa: E731 - short
        first = make()
        train(first, 4)
        if precision == "float16":
            first.accumulate_gradients(*batch(99))
            spoil(first.model, math.inf)
            first.unscale()
            first.apply(4)
        second = make()
        second.model.load_state_dict(first.model.state_dict())
        second.load_state_dict(first.state_dict())
        expected = train(first, 6, start=5)  # the first goes on: what was loaded must be the second's own
        assert train(second, 6, start=5) == expected
        assert torch.equal(weights(first.model), weights(second.model))
        assert first.scaler.state_dict() == second.scaler.state_dict()


def test_evaluation_mode_is_left_for_training() -> None:
    loop = make_loop()
    loop.model.eval()
    loop.accumulate_gradients(*batch(0))
    assert loop.model.training
    assert isinstance(loop.model, Transformer)
