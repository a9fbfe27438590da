"""What the examples share: their options, a small model, and text as bytes."""

from __future__ import annotations

import argparse
import math
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from diloco import SyncSchedule, connect_replica, replica_share
from diloco.transport.base import Transport


def parse(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of every example; each adds nothing to them, so that one can be read beside the other."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file to learn; None: part of Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/example"), help="folder of this replica's results")
    parser.add_argument("--steps", type=int, default=200, help="steps of the optimizer")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per replica and micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step of the optimizer")
    parser.add_argument("--sequence-length", type=int, default=64, help="bytes")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak, from which it falls as a cosine")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--inner-steps", type=int, default=20, help="steps between two rounds (H)")
    parser.add_argument("--fragments", type=int, default=1, help="fragments of the model, which travel in turns (P)")
    parser.add_argument("--overlap-steps", type=int, default=3, help="steps that a round has to arrive (tau)")
    parser.add_argument("--codec", default="fp4", help="float32, float16, bfloat16, int8 or fp4")
    parser.add_argument("--replicas", type=int, default=1, help="how many there are (M)")
    parser.add_argument("--replica", type=int, default=0, help="which one this is, from 0")
    parser.add_argument("--rendezvous", default="127.0.0.1:29400", help="HOST:PORT of replica 0, for all replicas")
    parser.add_argument("--resume", type=Path, help="a checkpoint of this replica to go on from")
    parser.add_argument("--save-steps", type=int, default=100, help="steps between two checkpoints")
    return parser.parse_args(arguments)


def connection(
    options: argparse.Namespace, ranks: Literal["alone", "whole", "sharded"] = "alone"
) -> AbstractContextManager[Transport | None]:
    """To the other replicas, where there are any."""
    if options.replicas == 1:
        return nullcontext()
    return connect_replica(
        replica=options.replica, num_replicas=options.replicas, rendezvous=options.rendezvous, ranks=ranks
    )


def schedule(options: argparse.Namespace) -> SyncSchedule:
    """When fragments are sent and merged."""
    return SyncSchedule(
        inner_steps=options.inner_steps, num_fragments=options.fragments, overlap_steps=options.overlap_steps
    )


def share(options: argparse.Namespace) -> Dataset[tuple[Tensor, ...]]:
    """This replica's part of the text: ``(sequence_length + 1,)`` int64 each, no two replicas the same.

    They are dealt out in a random order, so they need not be shuffled again.
    """
    if options.text is None:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
        text = b"".join(source.read_bytes() for source in sources)
    else:
        text = options.text.read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = tokens.unfold(0, options.sequence_length + 1, options.sequence_length)
    return replica_share(TensorDataset(windows), replica=options.replica, num_replicas=options.replicas)


def cosine(step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0, as a fraction of its peak."""
    return (1 + math.cos(math.pi * min(step, steps) / steps)) / 2


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """For AdamW: weight decay for matrices, none for norms and biases."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


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
        """Logits ``(batch, sequence, 256)`` of the byte after each of ``tokens``, ``(batch, sequence)`` int64."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def make_model(options: argparse.Namespace) -> Decoder:
    """The same weights on every replica."""
    torch.manual_seed(0)
    return Decoder(options.layers, options.width, options.sequence_length)


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy, nats per byte; ``windows``: ``(batch, sequence + 1)``."""
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
