"""`DiLoCo`'s arguments: which do not work together, and which must be the same on all replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import xxhash
from torch import nn
from torch.optim import Optimizer

from diloco.algorithm.average_rules import AverageRule
from diloco.algorithm.buffers import check_buffers
from diloco.algorithm.clipping import Clipping
from diloco.algorithm.codec import Codec
from diloco.algorithm.fragments import Fragment, check_coverage, trainable_parameters
from diloco.algorithm.mean_encoding import MeanEncoding
from diloco.algorithm.merge import MergeRule
from diloco.algorithm.outer_optimizer import OuterOptimizer
from diloco.algorithm.schedule import SyncSchedule
from diloco.errors import CheckpointError, ConfigurationError
from diloco.plugins import code_digest

__all__ = ["Arguments", "check_arguments", "check_saved_facts", "described"]

_NAMED = 3  # so many tensors are named one by one; the rest go into a digest


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Those arguments of `DiLoCo` that all replicas must have alike, defaults filled in; `DiLoCo` describes them."""

    schedule: SyncSchedule
    fragments: Sequence[Fragment]
    outer_optimizer: OuterOptimizer
    merge: MergeRule
    codec: Codec
    error_feedback: float
    clipping: Clipping
    average: AverageRule | None
    telemetry: bool = True
    mean_codec: Codec | str
    mean_error_feedback: float

    @property
    def mean(self) -> MeanEncoding:
        """How means travel from those who own a stretch of the values."""
        return MeanEncoding.of(self.mean_codec, float(self.mean_error_feedback))

    def facts(self, model: nn.Module) -> dict[str, str]:
        """What is compared between replicas: name -> value, the likeliest mistakes first."""
        schedule, codec = self.schedule, self.codec
        shapes = {name: f"{name} {tuple(p.shape)}" for name, p in trainable_parameters(model).items()}
        persistent = model.state_dict().keys()
        buffers = [f"{n} {tuple(b.shape)} {b.dtype}" for n, b in model.named_buffers() if n in persistent]
        parameters = ", ".join(f"{name} {value}" for name, value in codec.parameters().items())
        return {
            "schedule": (
                f"H {schedule.inner_steps}, tau {schedule.overlap_steps}, offsets {list(schedule.fragment_offsets)}"
            ),
            "codec": codec.name + (f" ({parameters})" if parameters else "") + _code(codec),
            "error feedback": "yes" if self.error_feedback else "no",
            "outer optimizer": described(self.outer_optimizer) + _code(self.outer_optimizer),
            "merge": described(self.merge) + _code(self.merge),
            "clipping": described(self.clipping),
            "mean codec": str(self.mean),
            "average": "weighted mean" if self.average is None else described(self.average) + _code(self.average),
            **{f"fragment {each.index}": _listed([shapes[name] for name in each.names]) for each in self.fragments},
            "buffers": _listed(buffers),
        }

    def saved_facts(self, codec: Codec) -> dict[str, Any]:
        """What must be the same on both sides of a checkpoint, where ``codec`` encodes the contributions."""
        return {
            "inner_steps": self.schedule.inner_steps,
            "overlap_steps": self.schedule.overlap_steps,
            "offsets": list(self.schedule.fragment_offsets),
            "fragments": [list(fragment.names) for fragment in self.fragments],
            "codec": {"name": codec.name, **codec.parameters()},
            "merge": described(self.merge),
            "outer optimizer": type(self.outer_optimizer).__name__,
        }


def check_saved_facts(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Compare the `Arguments.saved_facts` of a checkpoint with those of this run.

    Raises:
        CheckpointError: they differ; it names both sides.
    """
    for key, value in mine.items():
        if value != (theirs := saved.get(key)):
            raise CheckpointError(
                f"The saved state has {key} = {theirs!r}, and this run has {value!r}. They must be the same. "
                "Nothing was loaded."
            )


def check_arguments(model: nn.Module, inner_optimizer: Optimizer | Sequence[Optimizer], arguments: Arguments) -> None:
    """Refuse arguments that do not work together.

    Raises:
        ConfigurationError: it says which; `FragmentError` if the fragments are not a partition of the model.
    """
    schedule, merge, average = arguments.schedule, arguments.merge, arguments.average
    check_coverage(model, arguments.fragments)
    check_buffers(model)
    trainable = trainable_parameters(model)
    _check_devices(trainable)
    sharded = [name for name, parameter in trainable.items() if hasattr(parameter, "to_local")]
    if arguments.clipping.active and sharded:  # no rank has a whole contribution to take the norm of
        raise ConfigurationError(
            f"Clipping does not work with a sharded model, and this one shards {sharded[0]} and {len(sharded) - 1} "
            "more parameters over ranks. Leave clipping out, or let every rank hold all parameters (ddp)."
        )
    if average is not None and not average.elementwise and sharded:
        raise ConfigurationError(
            f"{described(average)} averages whole tensors, and this model shards {sharded[0]} and {len(sharded) - 1} "
            "more over ranks. Leave average out, or let every rank hold all parameters (ddp)."
        )
    if schedule.whole_round_late and not merge.keeps_sent:
        raise ConfigurationError(
            f"overlap_steps={schedule.overlap_steps}, a whole round late, was given with {described(merge)}, which "
            "drops what was trained since the fragment was sent, and so all of it. Use RebaseMerge, or fewer steps."
        )
    optimizers = [inner_optimizer] if isinstance(inner_optimizer, Optimizer) else inner_optimizer
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if idle := [name for name, parameter in trainable.items() if id(parameter) not in held]:
        raise ConfigurationError(
            f"No inner optimizer holds {', '.join(idle)}. Add it to one, or freeze it with requires_grad_(False)."
        )
    if (given := len(arguments.fragments)) != schedule.num_fragments:
        raise ConfigurationError(
            f"{given} fragments were given with a schedule for {schedule.num_fragments}. Both must have the "
            "same number."
        )


def _check_devices(trainable: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters on several devices, or on none: copies between devices are waited for on one of them only."""
    by_device = {str(parameter.device): name for name, parameter in trainable.items()}
    if len(by_device) > 1 or "meta" in by_device:
        places = ", ".join(f"{name} on {device}" for device, name in by_device.items())
        raise ConfigurationError(
            f"The parameters that are trained are not all on one device: {places} (meta: offloaded). Load the model "
            "without a device_map, or with one that leaves what is trained on one device; what is frozen may be "
            "anywhere."
        )


def described(value: object) -> str:
    """A value as text that is the same in every process: an object by its attributes, a function by its name.

    >>> from diloco.algorithm.outer_optimizer import Nesterov
    >>> described(Nesterov(learning_rate=1, momentum=max))
    'Nesterov(learning_rate=1.0, momentum=max)'
    """
    if isinstance(value, tuple | list):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, bool | str) or value is None:
        return repr(value)
    if isinstance(value, Real):
        return repr(float(value))
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if dataclasses.is_dataclass(value):
        attributes = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        attributes = getattr(value, "__dict__", {})
    return f"{type(value).__name__}({', '.join(f'{name}={described(held)}' for name, held in attributes.items())})"


def _code(value: object) -> str:
    """Which version of somebody's own code it is; "" for ours."""
    digest = code_digest(value)
    return f", code {digest}" if digest else ""


def _listed(tensors: Sequence[str]) -> str:
    """
    >>> _listed(["a (2,)", "b (3,)"]), _listed([])
    ('a (2,), b (3,)', 'none')
    """
    if len(tensors) <= _NAMED:
        return ", ".join(tensors) or "none"
    digest = xxhash.xxh3_64_hexdigest("\n".join(tensors).encode())
    return f"{', '.join(tensors[:_NAMED])} and {len(tensors) - _NAMED} more ({digest})"
