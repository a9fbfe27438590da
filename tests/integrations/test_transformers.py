"""A Trainer with `DiLoCoCallback` gives the results of diloco's own trainer, and resumes exactly."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from diloco import SyncSchedule
from diloco.errors import ConfigurationError
from diloco.events import Event, RoundSent
from diloco.transport import Transport
from tests.integrations import reference
from tests.integrations.reference import assert_equal, example, schedule_of, trained_by_us
from tests.integrations.turns import in_turns
from tests.lazy import Lazy

transformers, ours = Lazy("transformers"), Lazy("diloco.integrations.transformers")

options = functools.partial(reference.options, of="hf_trainer")
QUIET: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "logging_steps": 25}


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = module(input_ids=tokens, use_cache=False).logits
    return found


def trainer(given: Any, transport: Transport | None = None, more: dict[str, Any] | None = None, **callback: Any) -> Any:
    """Return the example's trainer with other arguments of the callback."""
    hf = example("hf_trainer")
    arguments = hf.make_arguments(given, **(QUIET | (more or {})))
    data = example("hf_trainer").share(given)
    few = torch.utils.data.Subset(data, range(8))
    made = transformers.Trainer(hf.make_model(given), arguments, hf.collate, data, {"some": few, "others": few})
    ours.DiLoCoCallback(
        **({"transport": transport, "schedule": schedule_of(given), "codec": given.codec} | callback)
    ).add_to(made)
    return made


def callback_of(made: Any) -> Any:
    (found,) = (each for each in made.callback_handler.callbacks if isinstance(each, ours.DiLoCoCallback))
    return found


def test_one_replica_is_one_of_ours(tmp_path: Path) -> None:
    """With two micro-batches per step; the model ends with the global parameters, and the logs have the figures."""
    hf, given = example("hf_trainer"), options(tmp_path, "--accumulation 2")
    made = hf.make_trainer(hf.make_arguments(given, **QUIET), given, None)
    made.train()
    _, shared = trained_by_us([given], hf.make_model(given), logits)
    assert_equal(dict(made.model.named_parameters()), shared)
    first, second = (entry for entry in made.state.log_history if "loss" in entry)
    assert (first["diloco/rounds"], second["diloco/rounds"], second["diloco/rounds_void"]) == (1, 2, 0)


def test_two_replicas_are_two_of_ours(tmp_path: Path) -> None:
    given = [options(tmp_path / str(m), "", m, 2) for m in (0, 1)]

    def train(replica: int, transport: Transport) -> dict[str, Any]:
        made = trainer(given[replica], transport, parameters="local")
        made.train()
        return dict(made.model.named_parameters())

    found = in_turns(train)
    expected, _ = trained_by_us(given, example("hf_trainer").make_model(given[0]), logits)
    for mine, theirs in zip(found, expected, strict=True):
        assert_equal(mine, theirs)


def watching() -> Any:
    """A callback that records the model's parameters during evaluations and after step 25, where it stops training."""

    class Watching(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.evaluated: list[dict[str, Tensor]] = []
            self.local: dict[str, Tensor] = {}

        def on_evaluate(self, *_: Any, model: nn.Module, **__: Any) -> None:
            self.evaluated.append(copy.deepcopy(model.state_dict()))

        def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            if state.global_step == 25:
                self.local = copy.deepcopy(model.state_dict())
                control.should_training_stop = True

    return Watching()


def test_evaluated_and_saved_are_the_global_parameters_and_resuming_is_exact(tmp_path: Path) -> None:
    """The checkpoint is saved with a round in flight, after the evaluation of two data sets."""
    given, watched, again = options(tmp_path, "--codec int8"), watching(), watching()
    straight = trainer(given, more={"save_steps": 22, "eval_strategy": "steps", "eval_steps": 22})
    straight.add_callback(watched)
    straight.train()
    saved = load_file(tmp_path / "checkpoint-22" / "model.safetensors")
    initial = example("hf_trainer").make_model(given).state_dict()
    assert len(watched.evaluated) == 2
    for held in (saved, *watched.evaluated):  # without a merge, the global parameters are the initial ones
        for name, values in initial.items():
            assert torch.equal(held[name], values), name

    resumed = trainer(given, more={"save_strategy": "no"})
    resumed.add_callback(again)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-22"))
    for name, values in straight.model.state_dict().items():
        assert torch.equal(again.local[name], watched.local[name]), name
        assert torch.equal(resumed.model.state_dict()[name], values), name
        assert not torch.equal(again.local[name], values), name


def test_micro_batches_are_no_steps_and_skipped_steps_are_not_trained(tmp_path: Path) -> None:
    """12 micro-batches make 3 steps, of which the scaler skips the second."""

    class Overflowing(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            if state.global_step == 1:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]

    given = options(tmp_path, "--accumulation 4 --inner-steps 3 --overlap-steps 0")
    events: list[Event] = []
    made = trainer(given, more={"max_steps": 3, "save_strategy": "no", "max_grad_norm": 0.0}, on_event=events.append)
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    made.add_callback(Overflowing())
    made.train()
    diloco = callback_of(made).diloco
    assert diloco is not None
    assert diloco.steps == 3
    (sent,) = (event for event in events if isinstance(event, RoundSent))
    assert sent.weight == 2 / 3


def test_what_can_not_work_is_refused(tmp_path: Path) -> None:
    given = options(tmp_path)
    with pytest.raises(ConfigurationError, match="enable_jit_checkpoint, which saves without calling callbacks"):
        trainer(given, more={"enable_jit_checkpoint": True}).train()
    with pytest.raises(ConfigurationError, match="parameters='both' is unknown; use one of: global, local"):
        ours.DiLoCoCallback(parameters="both")  # type: ignore[arg-type]
    made = trainer(given, more={"max_steps": 1, "save_strategy": "no"}, schedule=SyncSchedule(inner_steps=1))
    made.train()
    with pytest.raises(ConfigurationError, match="a second train"):
        made.train()
    twice = trainer(given, more={"max_steps": 1, "save_strategy": "no"}, schedule=SyncSchedule(inner_steps=1))
    [callback] = [each for each in twice.callback_handler.callbacks if isinstance(each, ours.DiLoCoCallback)]
    twice.add_callback(callback)
    with pytest.raises(ConfigurationError, match="with the same DiLoCoCallback twice"):
        twice.train()


def test_the_best_model_at_the_end_is_of_global_parameters(tmp_path: Path) -> None:
    """The model keeps the parameters that were evaluated as the best and saved."""
    given = options(tmp_path, "--inner-steps 4 --overlap-steps 1")
    more = {
        "max_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "some_loss",
    }
    made = trainer(given, more=more)
    made.train()
    history = {entry["step"]: entry["eval_some_loss"] for entry in made.state.log_history if "eval_some_loss" in entry}
    assert made.evaluate()["eval_some_loss"] == pytest.approx(min(history.values()))
    best = json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())["best_model_checkpoint"]
    loaded = transformers.LlamaForCausalLM.from_pretrained(best)
    for name, values in made.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], values), name
