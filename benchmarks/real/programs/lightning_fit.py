"""Lightning's Trainer and a module with BatchNorm, with README's lines: the modules must be equal after ``fit``."""

import functools
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.real.programs.common import Normed, arguments, finish, points
from diloco import SyncSchedule, connect_tcp, replica_share
from diloco.integrations.lightning import DiLoCoCallback


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = Normed(), list[float]()

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss: Tensor = self.net(**batch)["loss"]
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.losses.append(round(self.net(**batch)["loss"].item(), 6))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


given = arguments(__doc__)
connect = functools.partial(connect_tcp, replica=given.replica, num_replicas=2, rendezvous=given.join, ranks="whole")
callback = DiLoCoCallback(transport=connect, schedule=SyncSchedule(inner_steps=10, overlap_steps=2), codec="fp4")
module = Module()
share = replica_share(points(2000, 1), replica=given.replica, num_replicas=2)
trainer = Trainer(
    max_steps=35, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[callback], default_root_dir=given.out, val_check_interval=7, check_val_every_n_epoch=None,
    num_sanity_val_steps=0,
)  # fmt: skip
trainer.fit(module, DataLoader(share, 16), DataLoader(points(200, 2), 200))  # type: ignore[arg-type]
finish(callback.diloco, module, losses=module.losses)
