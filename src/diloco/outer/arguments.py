"""Checks of `DiLoCo`'s arguments: that they work together, and that they are the same on all replicas."""

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
from diloco.algorithm.buffers import buffer_layout, check_buffers
from diloco.algorithm.clipping import Clipping
from diloco.algorithm.codec import Codec
from diloco.algorithm.fragments import Fragment, check_coverage, trainable_parameters
from diloco.algorithm.mean_encoding import MeanEncoding
from diloco.algorithm.merge import MergeRule
from diloco.algorithm.model_tensors import persistent_buffers
from diloco.algorithm.outer_optimizer import OuterOptimizer
from diloco.algorithm.schedule import SyncSchedule
from diloco.errors import CheckpointError, ConfigurationError
from diloco.outer.model_watch import frozen_digests
from diloco.plugins import code_digest

__all__ = ["Arguments", "check_arguments", "check_saved_facts", "described"]

_NAMED = 3  # the number of tensors that are always named; a digest covers all of them
_MOST_CHARACTERS = 2000  # of buffers and frozen parameters, which are all named if they fit


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of `DiLoCo` that all replicas share, with defaults filled in. See `DiLoCo` for each of them."""

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
        """The encoding of means that the owner of a part of the values sends to the others."""
        return MeanEncoding.of(self.mean_codec, float(self.mean_error_feedback))

    def facts(self, model: nn.Module) -> dict[str, str]:
        """Return the facts that replicas compare, as name -> text, the most likely mistakes first."""
        schedule, codec = self.schedule, self.codec
        shapes = {name: f"{name} {tuple(p.shape)}" for name, p in trainable_parameters(model).items()}
        frozen = [f"{name} {digest}" for name, digest in frozen_digests(model).items()]
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
            "buffers": _listed(buffer_layout(model), _MOST_CHARACTERS),
            **({"frozen parameters of these digests": _listed(frozen, _MOST_CHARACTERS)} if frozen else {}),
        }

    def saved_facts(self, codec: Codec) -> dict[str, Any]:
        """Return the facts that a checkpoint and the run that loads it must share. ``codec`` encodes contributions."""
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
        CheckpointError: if they differ. The message names both values.
    """
    for key, value in mine.items():
        if value != (theirs := saved.get(key)):
            raise CheckpointError(
                f"The saved state has {key} = {theirs!r} but this run has {value!r}; both must be equal. "
                "Nothing was loaded."
            )


def check_arguments(model: nn.Module, inner_optimizer: Optimizer | Sequence[Optimizer], arguments: Arguments) -> None:
    """Check that the arguments work together.

    Raises:
        ConfigurationError: if they do not; `FragmentError` if the fragments are not a partition of the parameters.
    """
    schedule, merge, average = arguments.schedule, arguments.merge, arguments.average
    check_coverage(model, arguments.fragments)
    check_buffers(model)
    trainable = trainable_parameters(model)
    _check_devices(trainable)
    if offloaded := [name for name, buffer in persistent_buffers(model).items() if buffer.is_meta]:
        raise ConfigurationError(f"The buffer {', '.join(offloaded)} has no values (meta). Keep buffers in memory.")
    sharded = [name for name, parameter in trainable.items() if hasattr(parameter, "to_local")]
    if arguments.clipping.active and sharded:  # no rank has a whole contribution to take the norm of
        raise ConfigurationError(
            f"Clipping does not work with a sharded model, but {sharded[0]} and {len(sharded) - 1} more parameters are "
            "sharded over ranks. Omit clipping, or keep all parameters on every rank (ddp)."
        )
    if average is not None and not average.elementwise and sharded:
        raise ConfigurationError(
            f"{described(average)} averages whole tensors, but {sharded[0]} and {len(sharded) - 1} more parameters are "
            "sharded over ranks. Omit average, or keep all parameters on every rank (ddp)."
        )
    if schedule.whole_round_late and not merge.keeps_sent:
        raise ConfigurationError(
            f"overlap_steps={schedule.overlap_steps} merges each fragment a whole round late, where {described(merge)} "
            "would drop all work since the fragment was sent. Use RebaseMerge or fewer overlap steps."
        )
    optimizers = [inner_optimizer] if isinstance(inner_optimizer, Optimizer) else inner_optimizer
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if idle := [name for name, parameter in trainable.items() if id(parameter) not in held]:
        raise ConfigurationError(
            f"No inner optimizer holds {', '.join(idle)}. Add it to one, or freeze it with requires_grad_(False)."
        )
    if (given := len(arguments.fragments)) != schedule.num_fragments:
        raise ConfigurationError(
            f"There are {given} fragments, but the schedule has num_fragments={schedule.num_fragments}. Both numbers "
            "must be equal."
        )


def _check_devices(trainable: Mapping[str, nn.Parameter]) -> None:
    """Check that all trainable parameters are on one real device: copies between devices synchronise only one."""
    by_device = {str(parameter.device): name for name, parameter in trainable.items()}
    if len(by_device) > 1 or "meta" in by_device:
        places = ", ".join(f"{name} on {device}" for device, name in by_device.items())
        raise ConfigurationError(
            f"All trainable parameters must be on one device, but there are {places} (meta: offloaded). Load the model "
            "without a device_map, or with one that puts the trainable parameters on one device. Frozen parameters may "
            "be anywhere."
        )


def described(value: object) -> str:
    """Describe a value as text that is the same in every process: objects by attributes, functions by name.

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
    """Return a suffix that identifies the version of user-defined code, or "" for the package's own code."""
    digest = code_digest(value)
    return f", code {digest}" if digest else ""


def _listed(tensors: Sequence[str], most_characters: int = 0) -> str:
    """Name all tensors if that takes few characters; else the first three, the number of others, and a digest of all.

    >>> _listed(["a (2,)", "b (3,)"]), _listed([])
    ('a (2,); b (3,)', 'none')
    """
    whole = "; ".join(tensors) or "none"
    if len(tensors) <= _NAMED or len(whole) <= most_characters:
        return whole
    digest = xxhash.xxh3_64_hexdigest("\n".join(tensors).encode())
    return f"{'; '.join(tensors[:_NAMED])} and {len(tensors) - _NAMED} more ({digest})"
