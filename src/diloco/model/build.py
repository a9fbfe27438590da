"""One way to every model: the native decoder, one of ``transformers``, or somebody's own."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from diloco.errors import ConfigurationError
from diloco.model.language_model import LanguageModel
from diloco.model.settings import ModelSettings, parse_source
from diloco.model.transformer import build_model

__all__ = ["base_digest", "build_language_model", "check_vocabulary", "drawing_from", "with_vocabulary"]


def build_language_model(
    settings: ModelSettings,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    definition: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """The model that ``settings`` describe. Fresh weights depend on them and ``seed`` alone, to the bit, everywhere.

    No global generator advances. A model of ``transformers`` has float32 parameters, whatever its files have.

    Args:
        settings: with ``vocab_size``, but where ``source`` says it.
        device: to put it on; ``"meta"``: it takes no memory, and no weights are read or drawn.
        definition: what `LanguageModel.definition` gave when a checkpoint was made: the model is built from that, with
            weights that are to be replaced, and its source may be gone. Empty or None: from its source.

    Raises:
        ConfigurationError: if there is no such model, or it can't be trained.

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

            with drawing_from(seed):  # anew: how many draws loading took must not matter
                add_adapters(model, settings)
        return model.to(device)
    from diloco.model.foreign import build_foreign

    with drawing_from(seed):
        if not on_meta:
            return build_foreign(settings).to(device)
        try:
            with torch.device("meta"):
                return build_foreign(settings)
        except ConfigurationError:
            # Code that reads its own values can't run without memory; any other error comes again.
            return build_foreign(settings).to(device)


def base_digest(settings: ModelSettings, definition: Mapping[str, Any] | None = None) -> str:
    """A digest of the stored weights that a model begins from; "" where there are none.

    Args:
        definition: as for `build_language_model`.

    Raises:
        ConfigurationError, CheckpointError: they can't be read.
    """
    if settings.source is None or parse_source(settings.source).kind != "hf":
        return ""
    from diloco.model.huggingface_source import stored_digest

    return stored_digest(settings, definition or None)


def with_vocabulary(settings: ModelSettings, tokens: int) -> ModelSettings:
    """The settings with a vocabulary of ``tokens``, where nothing else says how large it is."""
    says_itself = settings.source is not None and parse_source(settings.source).kind == "hf"
    if settings.vocab_size is not None or says_itself:
        return settings
    return dataclasses.replace(settings, vocab_size=tokens)


def check_vocabulary(model: LanguageModel, tokens: int) -> None:
    """Raise `ConfigurationError` unless the ``tokens`` ids of a tokeniser fit in the model's vocabulary."""
    if tokens > model.vocab_size:
        raise ConfigurationError(
            f"The tokeniser has {tokens} tokens, and the model a vocabulary of {model.vocab_size}. Use a smaller "
            f"tokeniser (--data.tokenizer), such as the model's own, or --model.vocab-size {tokens}, for a model of "
            "transformers with --model.weights fresh. Nothing was started."
        )


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Inside, the global CPU generators of Python, NumPy and torch begin from ``seed``; afterwards they are as before.

    For code that draws from global generators, as other people's models do. CUDA's are left alone: what is built inside
    is built on the CPU, for the same bits on every device.

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
