"""DiLoCo in a Hugging Face Accelerate loop with gradient accumulation. A complete example in one file.

python examples/accelerate_loop.py --accumulation 4
accelerate launch --num_processes 8 examples/accelerate_loop.py --replicas 2 --replica 0 --join HOST:29400 ...
accelerate launch --num_processes 8 examples/accelerate_loop.py --replicas 2 --replica 1 --join HOST:29400 ...
"""

from __future__ import annotations

import argparse
import itertools
import math
import sysconfig
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from diloco import SyncSchedule, connect_tcp, replica_share
from diloco.integrations.accelerate import AcceleratedDiLoCo
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


def batches_after(accelerator: Accelerator, loader: DataLoader[Any], number: int) -> Iterator[Any]:
    """Yield the batches that follow the first ``number`` of the run, epoch by epoch.

    So a resumed run goes on exactly, also with dropout: the random numbers that starting an epoch again in its middle
    would draw are put back. A loader with ``shuffle=True`` needs ``DataLoaderConfiguration(use_seedable_sampler=True)``
    in the accelerator, so that the order depends on the epoch alone.
    """
    epoch, skipped = divmod(number, len(loader))
    if skipped:
        loader.set_epoch(epoch)
        rest = iter(accelerator.skip_first_batches(loader, skipped))
        with torch.random.fork_rng(devices=[]):
            first = next(rest)
        yield first
        yield from rest
        epoch += 1
    for each in itertools.count(epoch):
        loader.set_epoch(each)
        yield from loader


def train(accelerator: Accelerator, options: argparse.Namespace, transport: Transport | None) -> nn.Module:
    model = make_model(options)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=options.learning_rate, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * min(step, options.steps) / options.steps)) / 2
    )
    loader = DataLoader(share(options), batch_size=options.batch_size, drop_last=True)
    # the scheduler is not prepared: a prepared one would step once per process
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)
    schedule = SyncSchedule(
        inner_steps=options.inner_steps, num_fragments=options.fragments, overlap_steps=options.overlap_steps
    )

    with AcceleratedDiLoCo(
        accelerator, model, optimizer, transport=transport, schedule=schedule, codec=options.codec
    ) as diloco:
        if options.resume is not None:
            accelerator.load_state(options.resume)  # also restores DiLoCo's state
        batches = batches_after(accelerator, loader, diloco.steps * options.accumulation)

        while diloco.steps < options.steps:
            (windows,) = next(batches)
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                scheduler.step()
            diloco.step()  # counts only after gradients were synchronised

            if accelerator.sync_gradients and diloco.steps % options.save_steps == 0:
                accelerator.print({"step": diloco.steps, "loss": loss.item(), **diloco.figures()})
                accelerator.save_state(options.out / f"step-{diloco.steps}")

    accelerator.save_model(model, options.out / "model")  # the global parameters, the same on all replicas
    return accelerator.unwrap_model(model)


def connect(
    options: argparse.Namespace, ranks: Literal["whole", "sharded"]
) -> AbstractContextManager[Transport | None]:
    """Connect to the other replicas, if there are any.

    Args:
        ranks: whether each process of a replica holds the whole model or a shard of it.
    """
    if options.replicas == 1:
        return nullcontext()
    return connect_tcp(replica=options.replica, num_replicas=options.replicas, rendezvous=options.join, ranks=ranks)


def main() -> None:
    options = parse()
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=options.accumulation
    )
    with connect(options, "sharded" if accelerator.is_fsdp2 else "whole") as transport:
        train(accelerator, options, transport)


if __name__ == "__main__":
    main()
