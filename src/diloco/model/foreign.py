"""Somebody's own model: ``module:function``, called with what it takes, and any module that gives logits."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from diloco.errors import ConfigurationError
from diloco.model.language_model import LanguageModel, LossParts, TokensSeen
from diloco.model.loss import cross_entropy_with_z_loss
from diloco.model.settings import ModelSettings
from diloco.plugins import call

__all__ = ["ForeignModel", "build_foreign"]


class ForeignModel(LanguageModel):
    """A module whose ``forward(tokens)`` gives logits, with the rest of the interface around it.

    Args:
        wrapped: takes ``(batch, sequence)`` int64 and gives ``(batch, sequence, vocab)``, or something that has this as
            ``.logits``. Its forward may take ``documents`` as well, as `LanguageModel.forward` describes them.
        vocab_size: of the logits.
        max_sequence_length: the longest sequence to give it.
        z_loss: weight of the squared log-partition in the loss.
    """

    def __init__(self, wrapped: nn.Module, *, vocab_size: int, max_sequence_length: int, z_loss: float = 0.0) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.z_loss = z_loss
        self.num_layers = self.count_layers()
        self._takes_documents = "documents" in inspect.signature(wrapped.forward).parameters

    def forward(self, tokens: Tensor, cache: TokensSeen | None = None, documents: Tensor | None = None) -> Tensor:
        new = tokens.shape[1]
        if cache is not None:
            tokens = cache.extend(tokens)
        if tokens.shape[1] > self.max_sequence_length:
            raise ConfigurationError(
                f"A sequence of {tokens.shape[1]} tokens is longer than model.max_sequence_length="
                f"{self.max_sequence_length}. Shorten it, or set a larger one."
            )
        given: dict[str, Tensor] = {}
        if documents is not None:
            if not self._takes_documents:
                raise ConfigurationError(
                    f"{type(self.wrapped).__name__}.forward can't keep the documents of a packed row apart, as it has "
                    "no argument `documents`. Give it one, or turn off document masks. Nothing was computed."
                )
            given["documents"] = documents
        output = self.wrapped(tokens, **given)
        logits: Any = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.shape != (*tokens.shape, self.vocab_size):
            got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"type {type(logits).__name__}"
            raise ConfigurationError(
                f"{type(self.wrapped).__name__} gave logits of {got}, not of shape (batch, sequence, vocab) = "
                f"{(*tokens.shape, self.vocab_size)}. Nothing was trained."
            )
        return logits[:, -new:]

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        logits = self(tokens, documents=documents).flatten(0, 1).float()
        return LossParts(*cross_entropy_with_z_loss(logits, targets.flatten(), self.z_loss))

    def new_cache(self) -> TokensSeen:
        return TokensSeen()

    def flops_per_token(self, sequence_length: int | None = None) -> float:
        """``6 * N``, N counting the matrices but embeddings; attention is unknown here, and left out."""
        looked_up = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        used_twice = {id(module.weight) for module in self.modules() if isinstance(module, nn.Linear)}
        counted = (p for p in self.parameters() if p.dim() >= 2 and (id(p) not in looked_up or id(p) in used_twice))
        return 6.0 * sum(parameter.numel() for parameter in counted)


def build_foreign(settings: ModelSettings) -> LanguageModel:
    """Call the function that ``settings.source`` names, with those of these keyword arguments that it takes:

    - ``vocab_size``: int, ids are below it: ``model.vocab_size``, or as many as the tokeniser has;
    - ``max_sequence_length``: int, ``model.max_sequence_length``;
    - everything in ``model.arguments``, which it must take.

    It gives a `LanguageModel`, which is used as it is, or another module, which becomes a `ForeignModel`; attributes
    ``vocab_size`` and ``max_sequence_length`` of that one count more than the arguments.

    Raises:
        ConfigurationError: if it can't be found or called, or gives something else.
    """
    assert settings.source is not None
    source = settings.source
    offered = {"vocab_size": settings.vocab_size, "max_sequence_length": settings.max_sequence_length}
    made = call("model.source", source, arguments=settings.arguments, offered=offered)
    if isinstance(made, LanguageModel):
        return made
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"{source} gave a {type(made).__name__}, not a torch.nn.Module whose forward(tokens) gives logits, or a "
            "diloco LanguageModel. Nothing was started."
        )
    vocab_size = getattr(made, "vocab_size", settings.vocab_size)
    if not isinstance(vocab_size, int):
        raise ConfigurationError(
            f"The vocabulary of the model that {source} gave is unknown. Give it an attribute vocab_size, or set "
            "model.vocab_size. Nothing was started."
        )
    longest = getattr(made, "max_sequence_length", settings.max_sequence_length)
    return ForeignModel(made, vocab_size=vocab_size, max_sequence_length=int(longest), z_loss=settings.z_loss)
