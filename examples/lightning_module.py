"""DiLoCo in Lightning's Trainer. A complete example in one file.

python examples/lightning_module.py --steps 200
python examples/lightning_module.py --replicas 2 --replica 0 --join HOST:29400 --out runs/example-0
python examples/lightning_module.py --replicas 2 --replica 1 --join HOST:29400 --out runs/example-1
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from diloco import SyncSchedule, connect_tcp, replica_share
from diloco.integrations.lightning import Connect, DiLoCoCallback
from diloco.transport import Transport


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, help="text file to train on; default: part of the standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/example"), help="output folder of this replica")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per replica and micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--sequence-length", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak; decays as a cosine")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--inner-steps", type=int, default=20, help="inner steps between two rounds (H)")
    parser.add_argument("--fragments", type=int, default=1, help="fragments of the model, which are sent in turn (P)")
    parser.add_argument("--overlap-steps", type=int, default=3, help="inner steps between sending and merging (tau)")
    parser.add_argument("--codec", default="fp4", help="float32, float16, bfloat16, int8 or fp4")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas (M)")
    parser.add_argument("--replica", type=int, default=0, help="number of this replica, from 0")
    parser.add_argument("--join", default="127.0.0.1:29400", help="HOST:PORT of replica 0, for all replicas")
    parser.add_argument("--resume", type=Path, help="checkpoint of this replica to resume from")
    parser.add_argument("--save-steps", type=int, default=100, help="steps between two checkpoints")
    return parser.parse_args(arguments)


class Decoder(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, layers: int, width: int, longest: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(longest, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True, bias=False)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def make_model(options: argparse.Namespace) -> Decoder:
    torch.manual_seed(0)  # every replica starts with the same weights
    return Decoder(options.layers, options.width, options.sequence_length)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups for AdamW, with weight decay for matrices and none for norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def share(options: argparse.Namespace) -> Dataset[tuple[Tensor, ...]]:
    """Return this replica's share of the text, in random order. Shares have no sequence in common."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
    text = b"".join(path.read_bytes() for path in ([options.text] if options.text else library))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = tokens.unfold(0, options.sequence_length + 1, options.sequence_length)
    return replica_share(TensorDataset(windows), replica=options.replica, num_replicas=options.replicas)


class Resumable(DataLoader[Any]):
    """A DataLoader that resumes at its position, because Lightning otherwise restarts the data when it resumes."""

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
        (windows,) = batch
        loss = nn.functional.cross_entropy(self.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        steps, learning_rate = self.options.steps, self.options.learning_rate
        optimizer = torch.optim.AdamW(parameter_groups(self), lr=learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: (1 + math.cos(math.pi * min(step, steps) / steps)) / 2
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return Resumable(share(self.options), batch_size=self.options.batch_size, drop_last=True)


def make_trainer(options: argparse.Namespace, transport: Transport | Connect | None, **others: Any) -> Trainer:
    schedule = SyncSchedule(
        inner_steps=options.inner_steps, num_fragments=options.fragments, overlap_steps=options.overlap_steps
    )
    chosen = {
        "max_steps": options.steps,  # the same on all replicas
        "accumulate_grad_batches": options.accumulation,
        "gradient_clip_val": 1.0,
        "default_root_dir": options.out,
        "callbacks": [
            DiLoCoCallback(transport=transport, schedule=schedule, codec=options.codec),
            ModelCheckpoint(every_n_train_steps=options.save_steps, save_last=True),
        ],
    }
    return Trainer(**(chosen | others))


def main() -> None:
    options = parse()
    connect = functools.partial(
        connect_tcp,
        replica=options.replica,
        num_replicas=options.replicas,
        rendezvous=options.join,
        ranks="whole",
    )
    # connects when training starts, because with DDP Lightning starts the other processes of the replica first
    trainer = make_trainer(options, connect if options.replicas > 1 else None)
    trainer.fit(Bytes(options), ckpt_path=options.resume)
    torch.save(trainer.lightning_module.model.state_dict(), options.out / "model.pt")  # the same on all replicas


if __name__ == "__main__":
    main()
