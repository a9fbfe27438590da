"""A model with batch norm, for runs that average buffers. It imports nothing from the package."""

import torch
from torch import Tensor, nn


class Normed(nn.Module):
    """Four layers with batch norm."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(4))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (batch, length, vocab_size) float32."""
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden.flatten(0, 1)).view_as(hidden))
        logits: Tensor = self.head(hidden)
        return logits


def normed(vocab_size: int) -> nn.Module:
    """Return the model for ``--model FILE:normed``."""
    return Normed(vocab_size, 8)
