"""Evaluate a model on held-out text: loss, perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from diloco.data import PackedRows, PackedTokens, TokenArray, Tokenizer, heldout_batches
from diloco.devices import to_device
from diloco.errors import DataError
from diloco.model import ENDS, NOT_COUNTED, LanguageModel, documents_of
from diloco.units import perplexity

__all__ = ["evaluate"]

Precision = Literal["float32", "bfloat16", "float16"]
LOGITS_BYTES = 1 << 30  # limit for the float32 logits of one forward pass, unless one sequence needs more


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts held-out text."""

    loss: float  # mean cross-entropy in nats per token, end-of-document tokens included
    bits_per_byte: float  # the same cross-entropy in bits per byte of text, comparable between tokenisers
    tokens: int  # number of predicted tokens
    num_bytes: int  # number of UTF-8 bytes that they stand for

    @property
    def perplexity(self) -> float:
        """``exp(loss)``, or infinity if that overflows."""
        return perplexity(self.loss)

    @property
    def bits_per_token(self) -> float:
        """``loss`` in bits."""
        return self.loss / math.log(2)


def evaluate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    tokens: PackedTokens | PackedRows | TokenArray,
    *,
    sequence_length: int,
    batch_size: int,
    sequences: int = 0,
    document_masks: bool = False,
    precision: Precision = "float32",
    progress: Callable[[int], None] = lambda tokens: None,
) -> Evaluation:
    """Evaluate ``model`` on held-out ``tokens``, ``(n,)``; afterwards its mode is restored.

    Args:
        batch_size: sequences per forward pass; fewer if their logits would take more than `LOGITS_BYTES`.
        sequences: how many sequences to use, always the same ones, spread evenly; 0: all.
        document_masks: mask the documents of a sequence from each other.
        precision: the autocast type of the forward pass, as in training.
        progress: called after each batch with the number of tokens predicted so far.

    Raises:
        DataError: there is nothing to predict.
    """
    fitting = LOGITS_BYTES // (4 * sequence_length * model.vocab_size)
    end = tokenizer.eos_id if document_masks else None
    end = ENDS if getattr(tokens, "marks_ends", False) else end
    device, was_training = next(model.parameters()).device, model.training
    nats, count, num_bytes, dtype = 0.0, 0, 0, getattr(torch, precision)
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=precision != "float32"):
            for inputs, targets in heldout_batches(
                tokens, sequence_length, max(1, min(batch_size, fitting)), sequences
            ):
                rows, following = to_device(inputs, device), to_device(targets, device)
                logits = model(rows, documents=documents_of(rows, following, end)).flatten(0, 1).float()
                following = torch.where(following < 0, NOT_COUNTED, following).flatten()
                loss = nn.functional.cross_entropy(logits, following, ignore_index=NOT_COUNTED, reduction="sum")
                counted = targets[targets >= 0]
                nats += float(loss)
                count += counted.numel()
                num_bytes += tokenizer.num_bytes(counted)
                progress(count)
    finally:
        model.train(was_training)
    if not count:
        raise DataError("There is no token to predict in the text.")
    return Evaluation(nats / count, nats / math.log(2) / max(1, num_bytes), count, num_bytes)
