"""Held-out loss, perplexity and bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from diloco.data.packed import Tokens
from diloco.data.tokens import Tokenizer
from diloco.data.windows import heldout_batches
from diloco.model.language_model import LanguageModel, document_numbers
from diloco.train.feed import to_device

__all__ = ["Evaluation", "evaluate", "mean_evaluation"]

LOGITS_BYTES = 1 << 30
"""The most that the logits of one forward pass take, in float32, unless one sequence's take more."""


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts held-out text.

    Attributes:
        loss: mean cross-entropy in nats per token, end-of-document tokens included.
        bits_per_byte: the same cross-entropy in bits per byte of text, comparable between tokenisers.
        tokens: number of predicted tokens.
    """

    loss: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    tokens: Tokens,
    *,
    sequence_length: int,
    batch_size: int,
    sequences: int = 0,
    document_masks: bool = False,
) -> Evaluation:
    """Evaluate ``model`` on held-out ``tokens``; its mode is put back afterwards.

    Args:
        model: on any device.
        tokenizer: tells how many bytes each token stands for.
        tokens: ``(n,)`` packed held-out tokens.
        sequence_length: tokens per sequence.
        batch_size: sequences per forward pass; fewer where their logits would take more than `LOGITS_BYTES`.
        sequences: how many, always the same ones, spread evenly; 0: all.
        document_masks: whether no token is to see those of other documents in its sequence.
    """
    batch_size = max(1, min(batch_size, LOGITS_BYTES // (4 * sequence_length * model.vocab_size)))
    device = next(model.parameters()).device
    was_training = model.training
    nats, count, num_bytes = 0.0, 0, 0
    model.eval()
    try:
        with torch.no_grad():
            for inputs, targets in heldout_batches(tokens, sequence_length, batch_size, sequences):
                shown = to_device(inputs, device)
                documents = document_numbers(shown, tokenizer.eos_id) if document_masks else None
                logits = model(shown, documents=documents).float()
                wanted = to_device(targets, device).flatten()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum")
                nats += float(loss)
                count += targets.numel()
                num_bytes += tokenizer.num_bytes(targets)
    finally:
        model.train(was_training)
    return Evaluation(nats / count, nats / math.log(2) / max(1, num_bytes), count)


def mean_evaluation(evaluations: list[Evaluation]) -> Evaluation:
    """The mean over models evaluated on the same tokens (independent replicas have no global parameters)."""
    size = len(evaluations)
    return Evaluation(
        sum(e.loss for e in evaluations) / size, sum(e.bits_per_byte for e in evaluations) / size, evaluations[0].tokens
    )
