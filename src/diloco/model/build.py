"""Build any model: the native decoder, a model of ``transformers``, or a user-defined one."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diloco.errors import ConfigurationError
from diloco.model.language_model import LanguageModel, TokensSeen
from diloco.model.settings import ModelSettings, parse_source
from diloco.model.transformer import build_model
from diloco.plugins import call

__all__ = [
    "ForeignModel",
    "base_digest",
    "build_foreign",
    "build_language_model",
    "check_vocabulary",
    "drawing_from",
    "with_vocabulary",
]


class ForeignModel(LanguageModel):
    """A module whose ``forward(tokens)`` returns logits, adapted to the interface of a language model.

    Args:
        wrapped: takes ``(batch, sequence)`` int64 and returns ``(batch, sequence, vocab)``, or an object that has it as
            ``.logits``. Its forward may also take ``documents``, as `LanguageModel.forward` describes them.
        vocab_size: size of the last dimension of the logits.
        max_sequence_length: the longest supported sequence, in tokens.
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
                f"A sequence of {tokens.shape[1]} tokens is longer than max_sequence_length="
                f"{self.max_sequence_length}. Shorten it, or increase model.arguments.max_sequence_length."
            )
        given: dict[str, Tensor] = {}
        if documents is not None:
            if not self._takes_documents:
                raise ConfigurationError(
                    f"{type(self.wrapped).__name__}.forward can't mask the documents of a packed row from each other, "
                    "because it has no argument `documents`. Add one, or turn off document masks."
                )
            given["documents"] = documents
        output = self.wrapped(tokens, **given)
        logits: Any = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.shape != (*tokens.shape, self.vocab_size):
            got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"type {type(logits).__name__}"
            raise ConfigurationError(
                f"{type(self.wrapped).__name__} returned logits of {got}, not of shape (batch, sequence, vocab) = "
                f"{(*tokens.shape, self.vocab_size)}."
            )
        return logits[:, -new:]


def build_foreign(settings: ModelSettings) -> LanguageModel:
    """Call the function that ``settings.source`` names, with those of these keyword arguments that it takes:

    - ``vocab_size``: int, larger than every id: ``model.arguments.vocab_size``, or that of the tokeniser;
    - ``max_sequence_length``: int, ``model.arguments.max_sequence_length``;
    - everything in ``model.arguments``, which it must take.

    It returns a `LanguageModel`, which is used directly, or another module, which is wrapped in a `ForeignModel`. The
    attributes ``vocab_size`` and ``max_sequence_length`` of such a module take precedence over the arguments.

    Raises:
        ConfigurationError: the function can't be found or called, or returns something else.
    """
    assert settings.source is not None
    source = settings.source
    offered = {"vocab_size": settings.vocab_size, "max_sequence_length": settings.max_sequence_length}
    made = call("model.source", source, kind=nn.Module, arguments=settings.arguments, offered=offered)
    if isinstance(made, LanguageModel):
        return made
    vocab_size = getattr(made, "vocab_size", settings.vocab_size)
    if not isinstance(vocab_size, int):
        raise ConfigurationError(
            f"The vocabulary size of the model that {source} returned is unknown. Give the model an attribute "
            "vocab_size, or set model.arguments.vocab_size."
        )
    longest = getattr(made, "max_sequence_length", settings.max_sequence_length)
    return ForeignModel(made, vocab_size=vocab_size, max_sequence_length=int(longest), z_loss=settings.z_loss)


def build_language_model(
    settings: ModelSettings,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    definition: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """Build the model that ``settings`` describe. Fresh weights depend only on them and ``seed``, to the bit.

    No global generator advances. A model of ``transformers`` has float32 parameters, whatever its files have.

    Args:
        settings: with ``vocab_size``, unless ``source`` determines it.
        device: the device of the model. ``"meta"``: it takes no memory, and no weights are read or drawn.
        definition: what `LanguageModel.definition` returned when a checkpoint was made. The model is built from it, its
            weights are meant to be replaced, and its source may no longer exist. Empty or None: it is built from its
            source.

    Raises:
        ConfigurationError: there is no such model, or it can't be trained.

    >>> build_language_model(ModelSettings(vocab_size=257), seed=0, device="meta").num_parameters()
    1115520
    """
    if settings.source is None:
        return build_model(settings, seed=seed, device=device)
    on_meta = torch.device(device).type == "meta"
    if parse_source(settings.source).kind == "hf":
        from diloco.model.huggingface_source import build_huggingface

        with drawing_from(seed):
            model = build_huggingface(settings, on_meta=on_meta, definition=definition or None)
        if settings.lora_rank:
            from diloco.model.adapters import add_adapters

            with drawing_from(seed):  # reseeded, so that the number of draws during loading does not matter
                add_adapters(model, settings)
        return model.to(device)
    with drawing_from(seed):
        if not on_meta:
            return build_foreign(settings).to(device)
        try:
            with torch.device("meta"):
                return build_foreign(settings)
        except ConfigurationError:
            # Code that reads its own values can't run on meta; any other error is raised again.
            return build_foreign(settings).to(device)


def base_digest(settings: ModelSettings, definition: Mapping[str, Any] | None = None) -> str:
    """Return a digest of the stored weights from which a model begins; "" if there are none.

    Args:
        definition: as for `build_language_model`.

    Raises:
        ConfigurationError, CheckpointError: the weights can't be read.
    """
    if settings.source is None or parse_source(settings.source).kind != "hf":
        return ""
    from diloco.model.huggingface_source import stored_digest

    return stored_digest(settings, definition or None)


def with_vocabulary(settings: ModelSettings, tokens: int) -> ModelSettings:
    """Return the settings with a vocabulary of ``tokens``, if neither they nor the source determine its size."""
    says_itself = settings.source is not None and parse_source(settings.source).kind == "hf"
    if settings.vocab_size is not None or says_itself:
        return settings
    return dataclasses.replace(settings, vocab_size=tokens)


def check_vocabulary(model: LanguageModel, tokens: int) -> None:
    """Raise `ConfigurationError` unless the ``tokens`` ids of a tokeniser fit in the model's vocabulary."""
    if tokens > model.vocab_size:
        raise ConfigurationError(
            f"The tokeniser has {tokens} tokens, but the model has a vocabulary of {model.vocab_size}. Use a smaller "
            f"tokeniser (--tokenizer), such as the model's own, or use --model.arguments.vocab-size "
            f"{tokens}; a model of transformers then also needs --model.arguments.weights fresh."
        )


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed the global CPU generators of Python, NumPy and torch inside the context, and restore them afterwards.

    It is for code that draws from global generators, such as third-party models. CUDA generators are not touched:
    models are built on the CPU, for the same bits on every device.

    >>> with drawing_from(3):
    ...     first = torch.rand(2)
    >>> with drawing_from(3):
    ...     second = torch.rand(2)
    >>> torch.equal(first, second)
    True
    """
    words = [int(word) for word in np.random.SeedSequence(seed).generate_state(3, np.uint64)]
    python, numpy, generator = random.getstate(), np.random.get_state(legacy=False), torch.default_generator
    state = generator.get_state()
    try:
        random.seed(words[0])
        np.random.seed(words[1] % 2**32)
        generator.manual_seed(words[2])
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        generator.set_state(state)
