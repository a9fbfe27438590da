"""The optimizer of an inner loop: its class, the parameters that it decays, and its learning rate."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import ValueSchedule
from diloco.errors import ConfigurationError
from diloco.model import build_model
from diloco.train import (
    InnerLoop,
    OptimizerSettings,
    ParallelModel,
    inner_learning_rate,
    make_inner_optimizer,
)
from tests.train.inner_loops import CONSTANT, MODEL, batch, make_loop, train


class TestLearningRate:
    @given(
        schedule=st.sampled_from(["cosine", "wsd", "constant"]),
        steps=st.integers(1, 60),
        warmup=st.integers(0, 60),
        ratio=st.sampled_from([0.0, 0.05, 1.0]),
    )
    def test_rises_then_never_again_also_after_the_end(
        self, schedule: Any, steps: int, warmup: int, ratio: float
    ) -> None:
        """Property: for every length and warm-up that settings allow."""
        warmup = min(warmup, steps)
        settings = OptimizerSettings(schedule=schedule, warmup_steps=warmup, final_ratio=ratio, learning_rate=2.0)
        rate = inner_learning_rate(settings, steps)
        values = [rate(step) for step in range(steps + 20)]
        assert values[:warmup] == sorted(values[:warmup])
        assert max(values) == 2.0
        after = values[warmup:]
        assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
        assert len(set(values[steps:])) == 1
        stays = schedule == "constant" or (schedule == "wsd" and warmup == steps)
        assert values[-1] == pytest.approx(2.0 if stays else 2.0 * ratio)

    def test_it_is_a_function_of_the_global_step_alone(self) -> None:
        """Invariant 7: a replica that joins at step 30 has the swarm's rate at once."""
        settings = OptimizerSettings(learning_rate=1e-2, warmup_steps=10)
        rate = inner_learning_rate(settings, 50)
        joiner = make_loop(rate=inner_learning_rate(settings, 50))
        joiner.accumulate_gradients(*batch(0))
        assert joiner.apply(30).learning_rate == rate(30)
        assert [group["lr"] for group in joiner.optimizer.param_groups] == [rate(30)] * 2


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"betas": [0.9, 0.95], "weight_decay": 0.1}),  # a list, as from TOML
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adafactor", {"weight_decay": 0.0}),
    ("RMSprop", {"momentum": 0.5}),
]


class TestOptimizer:
    @pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS)
    def test_any_of_torch_trains_without_torchs_compiler(
        self, name: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The compiler takes 70 MB in every process that imports it."""
        monkeypatch.setitem(sys.modules, "torch._dynamo", None)
        rate = ValueSchedule(peak=0.1 if name == "SGD" else 1e-2)
        loop = make_loop(name=name, arguments=arguments, rate=rate)
        losses = train(loop, 30)
        assert type(loop.optimizer).__name__ == name
        assert losses[-1] < 0.95 * losses[0]

    def test_muon_trains_hidden_matrices_at_a_rate_of_their_own_by_the_same_schedule(self) -> None:
        model = build_model(MODEL, seed=0)
        settings = OptimizerSettings(
            name="Muon", arguments={"matrix_lr_ratio": 4.0, "momentum": 0.9}, learning_rate=1e-2
        )
        optimizer = make_inner_optimizer(settings, model)
        losses = train(InnerLoop(ParallelModel(model), optimizer, learning_rate=CONSTANT), 15)
        assert losses[-1] < 0.95 * losses[0]
        rates = [(group["orthogonalise"], group["lr"]) for group in optimizer.param_groups]
        assert rates == [(True, 4 * CONSTANT(0)), (False, CONSTANT(0)), (False, CONSTANT(0))]

    @pytest.mark.parametrize("arguments", [{"weight_decay": 0.5}, {}])
    def test_weight_decay_acts_on_matrices_only(self, arguments: dict[str, Any]) -> None:
        """This includes the default of the class, such as AdamW's 0.01: with a zero gradient, norms do not change."""
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

    @pytest.mark.parametrize(
        ("name", "arguments", "words"),
        [
            ("AdmaW", {}, "did you mean 'AdamW'"),
            ("lr_scheduler", {}, "not an optimizer of torch.optim"),
            (
                "AdamW",
                {"weight_deacy": 0.1},
                "arguments.weight_deacy is not an argument of AdamW; did you mean 'weight_decay'",
            ),
            ("AdamW", {"lr": 0.1}, "schedule sets the learning rate. Set optimizer.learning_rate"),
            ("AdamW", {"betas": (0.9, 1.5)}, "torch.optim.AdamW refused .*1.5"),
            ("LBFGS", {}, "'LBFGS' evaluates the loss several times a step. Use AdamW or SGD"),
            ("Muon", {"momentum": 1.5}, "momentum must be from 0 to less than 1"),
            ("Muon", {"adamw": ["nowhere"]}, "matches no trainable matrix"),
        ],
    )
    def test_what_cannot_work_is_refused_before_anything_starts(
        self, name: str, arguments: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=words):
            make_inner_optimizer(OptimizerSettings(name=name, arguments=arguments), build_model(MODEL, seed=0))
