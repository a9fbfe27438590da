"""What all ranks of a run must agree on before step 0, as a refusal says it."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash
from torch import nn

from diloco.algorithm.fragments import trainable_parameters
from diloco.model.language_model import LanguageModel
from diloco.outer.arguments import facts_of_arguments
from diloco.train.components import outer_arguments
from diloco.train.settings import RunSettings

__all__ = ["handshake_facts", "model_fingerprint"]

PROTOCOL_VERSION = 4
"""Raised when replicas of the version before could not take part with those of this one."""


def handshake_facts(settings: RunSettings, model: LanguageModel, corpus_fingerprint: str) -> Mapping[str, str]:
    """Name -> value, the likeliest mistakes first.

    Args:
        settings: resolved.
        model: the one to be trained; a model on the meta device will do.
        corpus_fingerprint: of the training data.
    """
    train, transport = settings.train, settings.transport
    replicas = f"{transport.replicas} of {transport.replica_size} ranks"
    if transport.name == "hivemind":
        replicas = f"any number, {settings.swarm.start_replicas} to begin with"
    outer = {"codec": str(settings.codec.name)}
    if settings.algorithm in ("streaming", "diloco"):
        outer = facts_of_arguments(model, **outer_arguments(settings, model))
    return {
        "protocol version": str(PROTOCOL_VERSION),
        "model": model_fingerprint(model),
        "algorithm": settings.algorithm,
        "steps": f"{train.steps}, {train.data_parallel_steps} of them shared ones",
        **outer,
        "token weighting": f"by the steps trained, in batches of {train.batch_size} x {train.sequence_length}",
        "dynamic steps": "yes" if settings.swarm.dynamic_steps else "no",
        "replicas": replicas,
        "seed": str(settings.seed),
        "data": corpus_fingerprint,
    }


def model_fingerprint(model: nn.Module) -> str:
    """Parameters in number, and a digest of their names, shapes and dtypes."""
    parameters = trainable_parameters(model)
    digest = xxhash.xxh3_64()
    for name, parameter in parameters.items():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    numel = sum(parameter.numel() for parameter in parameters.values())
    dtypes = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()}))
    return f"{numel:,} parameters of {dtypes}, {digest.hexdigest()}"
