"""Whether a model keeps the documents of a packed row apart: it is tried on a few tokens, whatever its architecture.

A row holds two documents. The logits of the second one must not change with the first, and must be those of the second
document alone. This is how a leak shows in attention of any kind, in a recurrent state, and in an argument that is
taken and not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.algorithm import holding, local_shard, reshard, trainable_parameters
from diloco.checkpoint import Lazy
from diloco.devices import uncompiled

if TYPE_CHECKING:
    from diloco.model.language_model import LanguageModel

# The second document begins inside the shortest window, and where no chunk of attention begins.
_FIRST, _SECOND = 5, 7
_NOISE = 0.05  # standard deviation, large enough for a model whose layers begin as zeros


@torch.no_grad()
def leak_between_documents(model: LanguageModel) -> str:
    """Return how the documents of a packed row see each other in ``model``, or "" if they don't.

    Call it on all ranks of a replica. It takes five forward passes of a few tokens. The model, its mode and the random
    generators stay as they are.

    Raises:
        Exception: the model does not take documents.
    """
    with _as_it_was(model):
        found = _compare(model)
        if found is None:  # its layers begin as zeros, so that no token has seen another yet
            parameters = trainable_parameters(model)
            with holding(parameters, _with_noise(parameters)):
                found = _compare(model)
    return found or ""


def _compare(model: LanguageModel) -> str | None:
    """Return what is wrong, "" if nothing is, and None if no token sees another one, with masks or without."""
    device = next(model.parameters()).device
    length = min(_FIRST + _SECOND, model.max_sequence_length)
    split = min(_FIRST, length // 2)
    tokens = 3 + torch.arange(length, dtype=torch.int64, device="cpu") * 5
    first, second = tokens[:split] % model.vocab_size, tokens[split:] % model.vocab_size
    other = (first + 1 + model.vocab_size // 2) % model.vocab_size
    numbers = torch.arange(length, dtype=torch.int64, device="cpu") >= split
    after = slice(split, None)

    def logits(row: tuple[Tensor, ...], documents: Tensor | None) -> Tensor:
        """One row at a time: what else is in a batch may change how experts round."""
        marks = None if documents is None else documents.long()[None].to(device)
        of_rows: Tensor = model(torch.cat(row)[None].to(device), documents=marks)
        return of_rows[0].float()

    changed = (logits((first, second), None)[after] - logits((other, second), None)[after]).abs().mean()
    expected = logits((second,), None)
    behind = logits((first, second), numbers)[after]
    leaked = (behind - logits((other, second), numbers)[after]).abs().mean()
    moved = (behind - expected).abs().mean()
    exact = all(parameter.dtype == torch.float32 for parameter in model.parameters()) and not model.attends_in_half
    rounding = (1e-6 if exact else 0.03) * expected.abs().mean()
    most = (0.01 if exact else 0.1) * changed + rounding
    if leaked > most:
        return (
            f"changing a document moves the logits of the next one by {leaked / changed:.0%} of what it does unmasked"
        )
    if moved > most:
        return "behind another document, a document has other logits than alone"
    return None if changed <= rounding else ""


@contextmanager
def _as_it_was(model: LanguageModel) -> Iterator[None]:
    was_training, device = model.training, next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    model.eval()
    try:
        with (
            torch.random.fork_rng(devices),
            uncompiled(),  # else blocks would be compiled for this length
            torch.autocast(device.type, torch.bfloat16, enabled=model.attends_in_half),
        ):
            yield
    finally:
        reshard(model)
        model.train(was_training)


def _with_noise(parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noisy(name: str) -> Tensor:
        shard = local_shard(parameters[name])
        noise = torch.randn(shard.shape, generator=generator, dtype=torch.float32, device="cpu")
        return shard + (_NOISE * noise).to(shard)

    return Lazy({name: name for name in parameters}, noisy)
