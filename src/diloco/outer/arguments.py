"""`DiLoCo`'s arguments: what can't work, and what must be the same on all replicas, in words for a refusal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Real

import xxhash
from torch import nn
from torch.optim import Optimizer

from diloco.algorithm.clipping import Clipping
from diloco.algorithm.codec import Codec
from diloco.algorithm.fragments import Fragment, trainable_parameters
from diloco.algorithm.schedule import SyncSchedule
from diloco.errors import ConfigurationError

__all__ = ["check_trained", "check_unsharded", "described", "facts_of_arguments"]

_NAMED = 3
"""Tensors that are named one by one; of more there is a digest."""


def facts_of_arguments(
    model: nn.Module,
    *,
    schedule: SyncSchedule,
    fragments: Sequence[Fragment],
    codec: Codec,
    error_feedback: bool,
    outer_optimizer: object,
    merge: object,
    clipping: Clipping,
) -> dict[str, str]:
    """Name -> value, the likeliest mistakes first; the same on all ranks of a replica."""
    shapes = {name: f"{name} {tuple(p.shape)}" for name, p in trainable_parameters(model).items()}
    persistent = model.state_dict().keys()
    buffers = [f"{n} {tuple(b.shape)} {b.dtype}" for n, b in model.named_buffers() if n in persistent]
    parameters = ", ".join(f"{name} {value}" for name, value in codec.parameters().items())
    return {
        "schedule": (
            f"H {schedule.inner_steps}, tau {schedule.overlap_steps}, offsets {list(schedule.fragment_offsets)}"
        ),
        "codec": codec.name + (f" ({parameters})" if parameters else ""),
        "error feedback": "yes" if error_feedback else "no",
        "outer optimizer": described(outer_optimizer),
        "merge": described(merge),
        "clipping": described(clipping),
        **{f"fragment {each.index}": _listed([shapes[name] for name in each.names]) for each in fragments},
        "buffers": _listed(buffers),
    }


def check_trained(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Every trainable parameter must be in an inner optimizer."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if idle := [name for name, p in trainable_parameters(model).items() if id(p) not in held]:
        raise ConfigurationError(
            f"no inner optimizer holds {', '.join(idle)}; add it to one, or freeze it with requires_grad_(False). "
            "Nothing was started."
        )


def check_unsharded(model: nn.Module) -> None:
    """Where ranks share a replica's parameters out, none of them has a whole contribution to take the norm of."""
    if sharded := [name for name, p in trainable_parameters(model).items() if hasattr(p, "to_local")]:
        raise ConfigurationError(
            f"clipping was given for a model whose {sharded[0]} and {len(sharded) - 1} more parameters are sharded "
            "over ranks; without clipping, or with ranks that hold all parameters (ddp), it would work. Nothing was "
            "started."
        )


def described(value: object) -> str:
    """A value in words that are the same in every process that has the same; a function by its name.

    >>> from diloco.algorithm.outer_optimizer import Nesterov
    >>> described(Nesterov(learning_rate=1, momentum=max))
    'Nesterov(learning_rate=1.0, momentum=max)'
    """
    if dataclasses.is_dataclass(value):
        fields = (f"{field.name}={described(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, bool | str) or value is None:
        return repr(value)
    if isinstance(value, Real):
        return repr(float(value))
    name: str = getattr(value, "__qualname__", type(value).__qualname__)
    return name


def _listed(tensors: Sequence[str]) -> str:
    """
    >>> _listed(["a (2,)", "b (3,)"]), _listed([])
    ('a (2,), b (3,)', 'none')
    """
    if len(tensors) <= _NAMED:
        return ", ".join(tensors) or "none"
    digest = xxhash.xxh3_64_hexdigest("\n".join(tensors).encode())
    return f"{', '.join(tensors[:_NAMED])} and {len(tensors) - _NAMED} more ({digest})"
