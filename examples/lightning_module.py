"""DiLoCo in Lightning's Trainer.

python examples/lightning_module.py --steps 200
python examples/lightning_module.py --replicas 2 --replica 0 --rendezvous HOST:29400 --out runs/example-0
python examples/lightning_module.py --replicas 2 --replica 1 --rendezvous HOST:29400 --out runs/example-1
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import connection, cosine, make_model, next_byte_loss, parameter_groups, parse, schedule, share
from torch import Tensor
from torch.utils.data import DataLoader

from diloco.integrations.lightning import Connect, DiLoCoCallback
from diloco.transport.base import Transport


class Resumable(DataLoader[Any]):
    """Lightning begins the data anew when it resumes, unless the loader keeps its place."""

    taken = 0
    begin = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator is enough
        first, self.begin = self.begin, 0
        for self.taken, batch in enumerate(itertools.islice(super().__iter__(), first, None), first + 1):
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["taken"]


class Bytes(LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.model = make_model(options)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = next_byte_loss(self.model, batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(parameter_groups(self), lr=self.options.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, self.options.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return Resumable(share(self.options), batch_size=self.options.batch_size, drop_last=True)


def make_trainer(options: argparse.Namespace, transport: Transport | Connect | None, **others: Any) -> Trainer:
    chosen = {
        "max_steps": options.steps,  # the same on all replicas
        "accumulate_grad_batches": options.accumulation,
        "gradient_clip_val": 1.0,
        "default_root_dir": options.out,
        "callbacks": [
            DiLoCoCallback(transport=transport, schedule=schedule(options), codec=options.codec),
            ModelCheckpoint(every_n_train_steps=options.save_steps, save_last=True),
        ],
    }
    return Trainer(**(chosen | others))


if __name__ == "__main__":
    given = parse(__doc__)
    # connected when training begins: with DDP, Lightning starts the other processes of the replica first
    connect = functools.partial(connection, given, ranks="whole") if given.replicas > 1 else None
    host = make_trainer(given, connect)
    host.fit(Bytes(given), ckpt_path=given.resume)
    torch.save(host.lightning_module.model.state_dict(), given.out / "model.pt")  # the same on all replicas
