"""A Lightning Trainer with `DiLoCoCallback` gives the results of diloco's own trainer, and resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from diloco import SyncSchedule
from diloco.errors import ConfigurationError
from diloco.events import Event, RoundSent
from diloco.transport import Transport
from tests.integrations.reference import assert_equal, example, options, schedule_of, trained_by_us
from tests.integrations.turns import in_turns
from tests.lazy import Lazy

pl, ours = Lazy("lightning.pytorch"), Lazy("diloco.integrations.lightning")

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
    ),  # advice for large runs
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),  # of ModelCheckpoint
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning imports LeafSpec from torch
]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = module(tokens)
    return found


def fitted(given: Any, transport: Transport | None = None, **others: Any) -> Any:
    lightning = example("lightning_module")
    made = lightning.make_trainer(given, transport, **(QUIET | others))
    made.fit(lightning.Bytes(given), ckpt_path=given.resume)
    return made


def callback(given: Any, transport: Transport | None = None, **others: Any) -> Any:
    return ours.DiLoCoCallback(transport=transport, schedule=schedule_of(given), codec=given.codec, **others)


def test_one_replica_is_one_of_ours(tmp_path: Path) -> None:
    """With two accumulated batches per step; the module ends with the global parameters."""
    given = options(tmp_path, "--accumulation 2")
    made = fitted(given)
    _, shared = trained_by_us([given], example("plain_pytorch").make_model(given), logits)
    assert_equal(dict(made.lightning_module.model.named_parameters()), shared)
    assert made.callback_metrics["diloco/rounds"] == 2


def test_two_replicas_are_two_of_ours(tmp_path: Path) -> None:
    given = [options(tmp_path / str(m), "", m, 2) for m in (0, 1)]

    def train(replica: int, transport: Transport) -> Any:
        mine = callback(given[replica], transport, parameters="local")
        return fitted(given[replica], transport, callbacks=[mine], enable_checkpointing=False)

    found = in_turns(train)
    expected, _ = trained_by_us(given, example("plain_pytorch").make_model(given[0]), logits)
    for made, local in zip(found, expected, strict=True):
        assert_equal(dict(made.lightning_module.model.named_parameters()), local)


def test_saved_are_the_global_parameters_and_resuming_is_exact(tmp_path: Path) -> None:
    """The checkpoint is saved with a round in flight."""
    given = options(tmp_path, "--codec int8")
    checkpoints = [
        pl.callbacks.ModelCheckpoint(tmp_path, "all-{step}", every_n_train_steps=22, save_top_k=-1),
        pl.callbacks.ModelCheckpoint(
            tmp_path, "weights-{step}", every_n_train_steps=21, save_top_k=-1, save_weights_only=True
        ),
    ]
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


def small() -> Any:
    """Return a class of modules with one weight, whose gradient is infinite if the batch is."""

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            self.validated: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.layer.weight.sum() * batch.sum()
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.validated.append(self.layer.weight.item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.125)

    return Small


def test_batches_are_no_steps_and_skipped_steps_are_not_trained() -> None:
    """12 batches make 3 steps, of which the scaler skips the second."""
    events: list[Event] = []
    mine = ours.DiLoCoCallback(schedule=SyncSchedule(inner_steps=3), on_event=events.append)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    batches = torch.ones(12, 1)
    batches[5] = float("inf")
    made = pl.Trainer(
        **QUIET,
        max_epochs=1,
        accumulate_grad_batches=4,
        callbacks=[mine],
        enable_checkpointing=False,
        plugins=[pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)],
    )
    made.fit(small()(), DataLoader(batches))
    assert mine.diloco is not None
    assert mine.diloco.steps == made.global_step == 3
    (sent,) = (event for event in events if isinstance(event, RoundSent))
    assert sent.weight == 2 / 3


@pytest.mark.filterwarnings("ignore:The loop ended after")
def test_what_can_not_work_is_refused() -> None:
    Small = small()

    class Manual(Small):
        """A module that takes two optimizer steps per batch."""

        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for _ in range(2):
                self.optimizers().step()
            return batch.sum()

    arguments = QUIET | {"max_steps": 4, "enable_checkpointing": False}
    with pytest.raises(ConfigurationError, match="took 2 optimizer steps with one batch"):
        pl.Trainer(**arguments, callbacks=[ours.DiLoCoCallback()]).fit(Manual(), DataLoader(torch.ones(4, 1)))

    mine = ours.DiLoCoCallback()
    pl.Trainer(**(arguments | {"max_steps": 1}), callbacks=[mine]).fit(Small(), DataLoader(torch.ones(4, 1)))
    with pytest.raises(ConfigurationError, match=r"serves one fit\(\)"):
        pl.Trainer(**arguments, callbacks=[mine]).fit(Small(), DataLoader(torch.ones(4, 1)))
