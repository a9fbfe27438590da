"""What all ranks of a run must agree on before step 0, in words that can be read in a refusal."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash
from torch import nn

from diloco.algorithm.fragments import trainable_parameters
from diloco.train.components import make_configured_codec, make_merge_rule, make_schedule
from diloco.train.settings import RunSettings

__all__ = ["handshake_facts", "model_fingerprint"]

PROTOCOL_VERSION = 4
"""Raised when replicas of the version before could not take part with those of this one."""


def handshake_facts(settings: RunSettings, model: nn.Module, corpus_fingerprint: str) -> Mapping[str, str]:
    """Name -> value, the likeliest mistakes first.

    Args:
        settings: resolved.
        model: the one to be trained; on the meta device will do.
        corpus_fingerprint: of the training data.
    """
    schedule, codec, outer = make_schedule(settings), make_configured_codec(settings.codec), settings.outer
    parameters = ", ".join(f"{name} {value}" for name, value in codec.parameters().items())
    return {
        "protocol version": str(PROTOCOL_VERSION),
        "model": model_fingerprint(model),
        "algorithm": settings.algorithm,
        "schedule": (
            f"H {schedule.inner_steps}, tau {schedule.overlap_steps}, offsets {list(schedule.fragment_offsets)}, "
            f"{settings.train.steps} steps after {settings.train.data_parallel_steps} shared ones"
        ),
        "fragments": f"{settings.fragments.num_fragments} {settings.fragments.strategy}",
        "codec": codec.name + (f" ({parameters})" if parameters else ""),
        "error feedback": "yes" if settings.codec.error_feedback else "no",
        "merge": repr(make_merge_rule(settings.merge)),
        "outer optimizer": f"{outer.name}, learning rate {outer.learning_rate}, momentum {outer.momentum}",
        "clipping": _clipping(settings),
        "token weighting": (
            f"by the steps trained, in batches of {settings.train.batch_size} x {settings.train.sequence_length}"
        ),
        "dynamic steps": "yes" if settings.swarm.dynamic_steps else "no",
        "replicas": _replicas(settings),
        "seed": str(settings.seed),
        "data": corpus_fingerprint,
    }


def _clipping(settings: RunSettings) -> str:
    outer = settings.outer
    return f"max_norm {outer.max_norm}, median_norm_factor {outer.median_norm_factor}"


def _replicas(settings: RunSettings) -> str:
    transport = settings.transport
    if transport.name == "hivemind":
        return f"any number, {settings.swarm.start_replicas} to begin with"
    return f"{transport.replicas} of {transport.replica_size} ranks"


def model_fingerprint(model: nn.Module) -> str:
    """Parameters in number, and a digest of their names, shapes and dtypes."""
    parameters = trainable_parameters(model)
    digest = xxhash.xxh3_64()
    for name, parameter in parameters.items():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    numel = sum(parameter.numel() for parameter in parameters.values())
    dtypes = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()}))
    return f"{numel:,} parameters of {dtypes}, {digest.hexdigest()}"
