"""Each framework's loop gives the results of a plain loop with `DiLoCo`, and resumes exactly."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Subset

from diloco import SyncSchedule
from diloco.errors import ConfigurationError, DiLoCoError
from diloco.events import Event, RoundSent
from diloco.transport import Transport
from tests.integrations.reference import assert_equal, example, options, schedule_of, trained_by_us
from tests.integrations.turns import alone_of_two, in_turns
from tests.lazy import Lazy
from tests.same import same, same_values

accelerate, of_accelerate = Lazy("accelerate"), Lazy("diloco.integrations.accelerate")
pl, of_lightning = Lazy("lightning.pytorch"), Lazy("diloco.integrations.lightning")
transformers, of_transformers = Lazy("transformers"), Lazy("diloco.integrations.transformers")

pytestmark = [  # of Lightning about itself
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The loop ended after"),
]

LIGHTNING: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
TRAINER: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "logging_steps": 25}


def plain(given: Any, transport: Transport | None = None) -> nn.Module:
    model: nn.Module = example("plain_pytorch").train(given, transport)
    return model


def by_accelerate(given: Any, transport: Transport | None = None) -> nn.Module:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=given.accumulation)
    model: nn.Module = example("accelerate_loop").train(accelerator, given, transport)
    return model


def fitted(given: Any, transport: Transport | None = None, **others: Any) -> Any:
    module = example("lightning_module")
    trainer = module.make_trainer(given, transport, **(LIGHTNING | others))
    trainer.fit(module.Bytes(given), ckpt_path=given.resume)
    return trainer


def by_lightning(given: Any, transport: Transport | None) -> nn.Module:
    trainer = fitted(given, transport)
    assert trainer.callback_metrics["diloco/rounds"] == 2
    model: nn.Module = trainer.lightning_module.model
    return model


def by_trainer(given: Any, transport: Transport | None) -> nn.Module:
    hf = example("hf_trainer")
    made = hf.make_trainer(hf.make_arguments(given, **TRAINER), given, transport)
    made.train()
    first, second = (entry for entry in made.state.log_history if "loss" in entry)
    assert (first["diloco/rounds"], second["diloco/rounds"], second["diloco/rounds_void"]) == (1, 2, 0)
    model: nn.Module = made.model
    return model


def callback(given: Any, **others: Any) -> Any:
    return of_lightning.DiLoCoCallback(schedule=schedule_of(given), codec=given.codec, **others)


def trainer(given: Any, more: dict[str, Any], **others: Any) -> tuple[Any, Any]:
    """Return the example's trainer with other arguments, and its callback."""
    hf = example("hf_trainer")
    data = hf.share(given)
    few = Subset(data, range(8))
    arguments = hf.make_arguments(given, **(TRAINER | more))
    trainer = transformers.Trainer(hf.make_model(given), arguments, hf.collate, data, {"some": few, "others": few})
    ours = of_transformers.DiLoCoCallback(**{"schedule": schedule_of(given), "codec": given.codec} | others)
    return trainer, ours.add_to(trainer)


# example -> how it is run
FRAMEWORKS: dict[str, Callable[..., nn.Module]] = {
    "accelerate_loop": by_accelerate,
    "lightning_module": by_lightning,
    "hf_trainer": by_trainer,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_its_replicas_are_those_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    """With two micro-batches per step. All end with the global parameters."""
    run = FRAMEWORKS[name]
    given = [options(tmp_path / str(m), "--accumulation 2", m, 2, of=name) for m in range(2)]
    models = in_turns(lambda m, transport: run(given[m], transport))
    for model, (local, shared) in zip(models, trained_by_us(given, name), strict=True):
        assert_equal(dict(model.named_parameters()), shared)
        assert not any(torch.equal(local[each], shared[each]) for each in local)


def test_stopped_with_a_round_in_flight_and_resumed_it_is_the_same(tmp_path: Path) -> None:
    """Of Accelerate's loop: `test_torchrun`."""
    straight = plain(options(tmp_path, "--save-steps 22 --codec int8"))
    resumed = plain(options(tmp_path / "resumed", f"--resume {tmp_path / 'step-22.pt'} --codec int8"))
    for parameter, values in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[parameter], values), parameter


def test_lightning_saves_the_global_parameters_and_resuming_is_exact(tmp_path: Path) -> None:
    """The checkpoint is saved with a round in flight."""
    given = options(tmp_path, "--codec int8")
    save = pl.callbacks.ModelCheckpoint
    weights = save(tmp_path, "weights-{step}", every_n_train_steps=21, save_top_k=-1, save_weights_only=True)
    checkpoints = [save(tmp_path, "all-{step}", every_n_train_steps=22, save_top_k=-1), weights]
    straight = fitted(given, callbacks=[callback(given), *checkpoints])
    initial = example("lightning_module").Bytes(given).state_dict()
    for name in ("all-step=22", "weights-step=21"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        for parameter, values in initial.items():  # nothing has been merged yet
            assert torch.equal(saved[parameter], values), parameter

    given.resume = tmp_path / "all-step=22.ckpt"
    resumed = fitted(given, callbacks=[callback(given)], enable_checkpointing=False)
    for name, values in straight.lightning_module.state_dict().items():
        assert torch.equal(resumed.lightning_module.state_dict()[name], values), name


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


def test_a_trainer_evaluates_and_saves_the_global_parameters_and_resuming_is_exact(tmp_path: Path) -> None:
    """The checkpoint is saved with a round in flight, after the evaluation of two data sets."""
    given, watched, again = options(tmp_path, "--codec int8", of="hf_trainer"), watching(), watching()
    straight, _ = trainer(given, {"save_steps": 22, "eval_strategy": "steps", "eval_steps": 22})
    straight.add_callback(watched)
    straight.train()
    saved = load_file(tmp_path / "checkpoint-22" / "model.safetensors")
    initial = example("hf_trainer").make_model(given).state_dict()
    assert len(watched.evaluated) == 2
    for held in (saved, *watched.evaluated):  # without a merge, the global parameters are the initial ones
        for name, values in initial.items():
            assert torch.equal(held[name], values), name

    resumed, _ = trainer(given, {"save_strategy": "no"})
    resumed.add_callback(again)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-22"))
    for name, values in straight.model.state_dict().items():
        assert torch.equal(again.local[name], watched.local[name]), name
        assert torch.equal(resumed.model.state_dict()[name], values), name
        assert not torch.equal(again.local[name], values), name


NORM = SyncSchedule(inner_steps=10, overlap_steps=2)


class Norm(nn.Module):
    """A classifier with BatchNorm, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def examples(seed: int, number: int) -> list[dict[str, Any]]:
    inputs = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
    return [{"x": each, "labels": int(each[:4].argmax())} for each in inputs]


def norm_by_trainer(replica: int, transport: Transport, out: Path) -> tuple[Any, nn.Module]:
    arguments = transformers.TrainingArguments(
        str(out),
        max_steps=34,
        eval_strategy="steps",
        eval_steps=7,
        save_steps=14,
        report_to="none",
        **(TRAINER | {"logging_steps": 100}),
    )
    made = transformers.Trainer(Norm(), arguments, train_dataset=examples(replica, 80), eval_dataset=examples(9, 40))
    of_transformers.DiLoCoCallback(transport=transport, schedule=NORM).add_to(made)
    made.train()
    evaluated = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 5
    return (evaluated, load_file(out / "checkpoint-14" / "model.safetensors")), made.model


def norm_by_lightning(replica: int, transport: Transport, out: Path) -> tuple[Any, nn.Module]:
    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.validated = Norm(), []

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.validated.append(float(self.net(**batch)["loss"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, loader = Module(), torch.utils.data.DataLoader
    ours = of_lightning.DiLoCoCallback(transport=transport, schedule=NORM)
    made = pl.Trainer(
        max_steps=34,
        callbacks=[ours],
        check_val_every_n_epoch=None,
        val_check_interval=7,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        **LIGHTNING,
    )
    made.fit(module, loader(examples(replica, 80), 8), loader(examples(9, 40), 40))
    assert len(module.validated) == 4
    return module.validated, module.net


def norm_by_accelerate(replica: int, transport: Transport, out: Path) -> tuple[Any, nn.Module]:
    accelerator, model = accelerate.Accelerator(cpu=True), Norm()
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with of_accelerate.AcceleratedDiLoCo(accelerator, net, optimizer, transport=transport, schedule=NORM) as diloco:
        for step in range(34):
            batch = torch.utils.data.default_collate(examples(replica, 80)[step % 10 :: 10])
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
    return None, model


@pytest.mark.parametrize("run", [norm_by_trainer, norm_by_lightning, norm_by_accelerate])
def test_replicas_with_batch_norm_evaluate_save_and_end_with_the_same_model(
    run: Callable[..., tuple[Any, nn.Module]], tmp_path: Path
) -> None:
    (one, first), (other, second) = in_turns(lambda m, transport: run(m, transport, tmp_path / str(m)))
    assert same(one, other)
    assert same(first.state_dict(), second.state_dict())
    assert bool(first.get_buffer("layers.1.running_mean").any())


def test_the_last_line_of_a_trainer_counts_every_round(tmp_path: Path) -> None:
    """The last fragment is merged when training ends, after the Trainer has computed that line."""
    made, ours = trainer(options(tmp_path, of="hf_trainer"), {"max_steps": 41, "save_strategy": "no"})
    made.train()
    (last,) = (entry for entry in made.state.log_history if "train_loss" in entry)
    assert last["diloco/rounds"] == ours.diloco.figures()["diloco/rounds"] == 2


@pytest.mark.parametrize("best", [7, 14])
def test_a_trainer_that_loads_its_best_checkpoint_ends_with_it(best: int, tmp_path: Path) -> None:
    class Worse(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            metrics["eval_loss"] = float(state.global_step != best)

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=21,
        eval_strategy="steps",
        eval_steps=7,
        save_steps=7,
        load_best_model_at_end=True,
        report_to="none",
        **TRAINER,
    )
    made = transformers.Trainer(Norm(), arguments, train_dataset=examples(0, 80), eval_dataset=examples(9, 40))
    made.callback_handler.callbacks.insert(0, Worse())
    of_transformers.DiLoCoCallback(schedule=SyncSchedule(inner_steps=6, overlap_steps=2)).add_to(made)
    made.train()
    assert made.state.best_model_checkpoint.endswith(f"-{best}")
    saved = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    assert same_values(dict(made.model.state_dict()), saved)


@pytest.mark.parametrize("stop", [3, 10, 13, 27])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loop_of_accelerate_goes_on_exactly_with_dropout_and_shuffle(
    stop: int, accumulation: int, tmp_path: Path
) -> None:
    """Stopped in an epoch of 10 batches, and at its end."""

    def run(steps: int, *, resume: bool = False) -> tuple[list[list[float]], dict[str, Tensor]]:
        torch.manual_seed(0)
        config = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=config
        )
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        data = torch.utils.data.TensorDataset(torch.arange(21.0).div(20)[:, None])
        loader = torch.utils.data.DataLoader(data, batch_size=2, drop_last=True, shuffle=True)
        net, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), loader)
        seen = []
        with of_accelerate.AcceleratedDiLoCo(
            accelerator, net, optimizer, schedule=SyncSchedule(inner_steps=4, overlap_steps=1)
        ) as diloco:
            if resume:
                accelerator.load_state(str(tmp_path))
            batches = example("accelerate_loop").batches_after(accelerator, loader, diloco.steps * accumulation)
            while diloco.steps < steps:
                (inputs,) = next(batches)
                seen.append(inputs.flatten().tolist())
                with accelerator.accumulate(net):
                    accelerator.backward((net(inputs) - 3 * inputs).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                diloco.step()
            if steps == stop:
                accelerator.save_state(str(tmp_path))
            local = copy.deepcopy(model.state_dict())
        return seen, local

    whole, wanted = run(31)
    first, _ = run(stop)
    second, local = run(31, resume=True)
    assert first + second == whole
    assert same(dict(local), dict(wanted))


class Loop:
    """A small model in an Accelerate loop whose micro-batches the test controls."""

    def __init__(self, accumulation: int, scale: float | None = None, **arguments: Any) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        if scale is not None:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        model = nn.Linear(2, 1)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.diloco = of_accelerate.AcceleratedDiLoCo(self.accelerator, self.model, self.optimizer, **arguments)


def test_micro_batches_are_no_steps_and_skipped_steps_are_not_trained() -> None:
    """12 micro-batches make 3 steps, of which the scaler skips the second."""
    events: list[Event] = []
    loop = Loop(4, 1024.0, schedule=SyncSchedule(inner_steps=3), on_event=events.append)
    for number in range(12):
        with loop.accelerator.accumulate(loop.model):
            factor = float("inf") if number == 5 else 1.0
            loop.accelerator.backward(factor * loop.model(torch.ones(1, 2)).sum())
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.diloco.step()
        assert loop.diloco.steps == (number + 1) // 4
    loop.diloco.close()
    (sent,) = (event for event in events if isinstance(event, RoundSent))
    assert sent.weight == 2 / 3


@pytest.mark.parametrize(("micro_batches", "overlap"), [(12, 0), (26, 3)])
def test_steps_are_those_of_the_optimizer_where_a_loop_accumulates_by_itself(micro_batches: int, overlap: int) -> None:
    loop = Loop(1, schedule=SyncSchedule(inner_steps=3, overlap_steps=overlap))
    for number in range(micro_batches):
        loop.accelerator.backward(loop.model(torch.ones(1, 2)).sum())
        if number % 4 == 3:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.diloco.step()
    assert (loop.diloco.steps, loop.diloco.rounds_committed) == (micro_batches // 4, 1)
    loop.diloco.close()


def test_a_state_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    """Regression: the model and the optimizer were those of the checkpoint when DiLoCo refused its state."""
    loop = Loop(1, schedule=SyncSchedule(inner_steps=1, overlap_steps=1))
    loop.accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        loop.model.weight += 1
    loop.optimizer.step()
    loop.diloco.step()
    before = loop.model.weight.clone()
    with pytest.raises(ConfigurationError, match="is in flight"):
        loop.accelerator.load_state(str(tmp_path))
    assert torch.equal(loop.model.weight, before)
    loop.diloco.drain()
    loop.accelerator.load_state(str(tmp_path))
    assert not torch.equal(loop.model.weight, before)
    loop.diloco.close()


@pytest.mark.parametrize("at", ["begin", "end"])
def test_the_connection_of_accelerate_ends_with_the_error_of_what_failed(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr("diloco.integrations.accelerate.replica_of_each_rank", alone_of_two(ended))
    max_norm = -1.0 if at == "begin" else None

    def train() -> None:
        loop = Loop(1, schedule=SyncSchedule(inner_steps=1, overlap_steps=1), max_norm=max_norm)
        with loop.diloco:
            loop.optimizer.step()
            loop.diloco.step()

    with pytest.raises(DiLoCoError) as raised:
        train()
    assert ended == [raised.value]


def test_a_callback_that_served_a_trainer_is_refused(tmp_path: Path) -> None:
    made, _ = trainer(options(tmp_path, of="hf_trainer"), {"max_steps": 1, "save_strategy": "no"})
    made.train()
    with pytest.raises(ConfigurationError, match=r"serves one train\(\)"):
        made.train()
    given = options(tmp_path, "--steps 1")
    once = {"callbacks": [callback(given)], "enable_checkpointing": False}
    fitted(given, **once)
    with pytest.raises(ConfigurationError, match=r"serves one fit\(\)"):
        fitted(given, **once)
