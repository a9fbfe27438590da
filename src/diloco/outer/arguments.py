"""Checks of `DiLoCo`'s arguments: that they work together, and that they are the same on all replicas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from diloco.algorithm import (
    Codec,
    FragmentLayout,
    MeanEncoding,
    SyncSchedule,
    buffer_layout,
    check_buffers,
    check_coverage,
    persistent_buffers,
    trainable_parameters,
)
from diloco.errors import CheckpointError, ConfigurationError, ContractError
from diloco.outer.model_watch import frozen_digests
from diloco.plugins import code_digest
from diloco.testing import check_average_rule, check_codec, check_merge_rule, check_outer_optimizer
from diloco.transport import InProcessTransport, Transport

__all__ = [
    "argument_facts",
    "check_arguments",
    "check_kinds",
    "check_saved_facts",
    "check_transport",
    "described",
    "saved_facts",
    "usable_device",
]

_NAMED = 3  # the number of tensors that are always named; a digest covers all of them
_MAX_FRAGMENTS = 32  # of which each is compared by itself, as the message to register has at most 16 kB
_MAX_CHARACTERS = 2000  # of buffers and frozen parameters, which are all named if they fit


def argument_facts(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return what replicas compare of the arguments of `DiLoCo`, as name -> text, the most likely mistakes first."""
    schedule, average = arguments["schedule"], arguments["average"]
    shapes = {name: f"{name} {tuple(p.shape)}" for name, p in trainable_parameters(model).items()}
    frozen = [f"{name} {digest}" for name, digest in frozen_digests(model).items()]
    fragments = {f"fragment {f.index}": _listed([shapes[name] for name in f.names]) for f in arguments["fragments"]}
    if len(fragments) > _MAX_FRAGMENTS:
        fragments = {"fragments": _listed([*map(str, fragments.items())])}
    offsets = list(schedule.fragment_offsets)
    return {
        "schedule": f"H {schedule.inner_steps}, tau {schedule.overlap_steps}, offsets {offsets}",
        "codec": str(MeanEncoding(arguments["codec"])) + _code(arguments["codec"]),
        "error feedback": "yes" if arguments["error_feedback"] else "no",
        "outer optimizer": described(arguments["outer_optimizer"]) + _code(arguments["outer_optimizer"]),
        "merge": described(arguments["merge"]) + _code(arguments["merge"]),
        "max_norm": str(arguments["max_norm"]),
        "mean codec": str(MeanEncoding.of(arguments["mean_codec"])),
        "average": "weighted mean" if average is None else described(average) + _code(average),
        **fragments,
        "buffers": _listed(buffer_layout(model), _MAX_CHARACTERS),
        **({"frozen parameters of these digests": _listed(frozen, _MAX_CHARACTERS)} if frozen else {}),
    }


def saved_facts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint and the run that loads it must share of the arguments of `DiLoCo`."""
    schedule, codec = arguments["schedule"], arguments["codec"]
    feedback = "+error-feedback" if arguments["error_feedback"] else ""
    return {
        "inner_steps": schedule.inner_steps,
        "overlap_steps": schedule.overlap_steps,
        "offsets": list(schedule.fragment_offsets),
        "fragments": [list(fragment.names) for fragment in arguments["fragments"]],
        "codec": {"name": f"{codec.name}{feedback}", **codec.parameters()},
        "merge": described(arguments["merge"]),
        "outer optimizer": type(arguments["outer_optimizer"]).__name__,
    }


def check_saved_facts(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Compare the `saved_facts` of a checkpoint with those of this run.

    Raises:
        CheckpointError: if they differ. The message names both values.
    """
    for key, value in mine.items():
        if value != (theirs := saved.get(key)):
            raise CheckpointError(
                f"The saved state has {key} = {theirs!r} but this run has {value!r}; both must be equal. "
                "Nothing was loaded."
            )


def check_kinds(given: Mapping[str, Any]) -> None:
    """Check that each argument of `DiLoCo` in ``given`` is of a kind that can work; None stands for the default.

    Raises:
        ConfigurationError: if one is not. The message says what was given and what works.
    """
    for name in sorted(given.keys() & _KINDS.keys()):
        (fits, works), value = _KINDS[name], given[name]
        if not (value is None and name in _OPTIONAL) and (isinstance(value, type) or not fits(value)):
            raise ConfigurationError(f"{name} must be {works}, got {_shown(value)}.")
    if (transport := given.get("transport")) is not None:
        check_transport(transport)


def check_transport(transport: Any) -> None:
    """Raise `ConfigurationError`, which says what works, unless ``transport`` connects a replica."""
    if isinstance(transport, Transport):
        return
    advice = ""
    if isinstance(transport, AbstractContextManager):
        advice = " Enter it: `with connect_tcp(...) as transport:`."
    elif isinstance(transport, InProcessTransport):
        advice = " Pass one of its endpoints, such as transport.endpoint(0)."
    raise ConfigurationError(f"transport must be a connected diloco transport, got {_shown(transport)}.{advice}")


def usable_device(place: torch.device | str) -> torch.device:
    """Return the device for global parameters; raise `ConfigurationError` if it can't hold them."""
    try:
        device = torch.device(place)
        torch.zeros(1, dtype=torch.float32, device=device).cpu()
    except Exception as error:  # torch raises many kinds of them
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"global_device={str(place)!r} can't hold the global parameters: {reason} Use 'cpu', or None for the "
            "model's device."
        ) from error
    return device


def _are_optimizers(value: Any) -> bool:
    several = value if isinstance(value, Sequence) and value else [value]
    return all(isinstance(getattr(optimizer, "param_groups", None), list) for optimizer in several)


def _are_layouts(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(layout, FragmentLayout) for layout in value)


_A_CODEC = "a codec or its name, such as 'fp4'"
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda value: isinstance(value, nn.Module), "a torch.nn.Module"),
    "inner_optimizer": (_are_optimizers, "a torch optimizer of the model's parameters, or a list of them"),
    "schedule": (lambda value: isinstance(value, SyncSchedule), "a schedule, such as SyncSchedule(inner_steps=100)"),
    "fragments": (_are_layouts, "the result of diloco.partition(model, ...)"),
    "outer_optimizer": (
        lambda value: hasattr(value, "init"),
        "an outer optimizer, such as Nesterov(), Sgd() or Adam()",
    ),
    "merge": (lambda value: hasattr(value, "merge"), "a merge rule, such as AlphaMerge(0.5) or RebaseMerge()"),
    "codec": (lambda value: isinstance(value, Codec | str), _A_CODEC),
    "mean_codec": (lambda value: isinstance(value, Codec | str), f"{_A_CODEC}, or 'auto'"),
    "max_norm": (lambda value: isinstance(value, Real) and 0 < float(value) < math.inf, "a finite number above 0"),
    "average": (lambda value: hasattr(value, "combine"), "an average rule, such as SendersMean(), or None"),
    "on_event": (callable, "a function of one event"),
    "error_feedback": (lambda value: isinstance(value, Real) and 0 <= float(value) <= 1, "a number from 0 to 1"),
    **dict.fromkeys(("telemetry", "compare_arguments"), (lambda value: isinstance(value, bool), "True or False")),
}
_OPTIONAL = {"schedule", "fragments", "outer_optimizer", "merge", "max_norm", "average", "on_event"}


def _shown(value: Any) -> str:
    """Describe a value of the wrong kind; large ones, such as models, by their class."""
    if isinstance(value, type):
        advice = "" if value.__module__.startswith("torch.") else f". Create one: {value.__qualname__}(...)"
        return f"the class {value.__qualname__}{advice}"
    return repr(value) if isinstance(value, str | Real | None) else f"a {type(value).__module__}.{type(value).__name__}"


def check_arguments(
    model: nn.Module, inner_optimizer: Optimizer | Sequence[Optimizer], arguments: Mapping[str, Any]
) -> None:
    """Check that the arguments work together.

    Raises:
        ConfigurationError: if they do not; `FragmentError` if the fragments are not a partition of the parameters.
    """
    schedule, merge, average = arguments["schedule"], arguments["merge"], arguments["average"]
    codec, mean_codec = arguments["codec"], MeanEncoding.of(arguments["mean_codec"]).codec
    if codec.needs_error_feedback and not arguments["error_feedback"]:
        raise ConfigurationError(
            f"codec={codec.name!r} drops most of the values, which are lost without error feedback, but error_feedback "
            f"is {arguments['error_feedback']!r}. Use error_feedback=0.95, or another codec."
        )
    if mean_codec.needs_error_feedback:
        raise ConfigurationError(
            f"mean_codec={mean_codec.name!r} drops most of the values, and means have no error feedback. Use another."
        )
    _check_own_code(arguments, {"codec": codec, "mean_codec": mean_codec})
    check_coverage(model, arguments["fragments"])
    trainable = trainable_parameters(model)
    check_buffers(model, trainable)
    by_device = {str(parameter.device): name for name, parameter in trainable.items()}
    if len(by_device) > 1 or "meta" in by_device:  # copies between devices synchronise only one
        places = ", ".join(f"{name} on {device}" for device, name in by_device.items())
        raise ConfigurationError(
            f"All trainable parameters must be on one device, but there are {places} (meta: offloaded). Load the model "
            "without a device_map, or with one that puts them on one device. Frozen ones may be anywhere."
        )
    if offloaded := [name for name, buffer in persistent_buffers(model).items() if buffer.is_meta]:
        raise ConfigurationError(f"The buffer {', '.join(offloaded)} has no values (meta). Keep buffers in memory.")
    for module in model.modules():
        # known by name, since importing FSDP is slow
        if type(module).__name__ == "FullyShardedDataParallel" and module.sharding_strategy.name != "NO_SHARD":  # type: ignore[union-attr]  # of FSDP
            raise ConfigurationError(
                "FullyShardedDataParallel (FSDP1) shards parameters over ranks without DTensors, which can't be "
                "synchronised. Use FSDP2 (fully_shard) or DistributedDataParallel."
            )
    sharded = [name for name, parameter in trainable.items() if hasattr(parameter, "to_local")]
    whole = "max_norm" if arguments["max_norm"] is not None else ""  # which no rank can take of a shard
    if average is not None and not average.elementwise:
        whole = described(average)
    if whole and sharded:
        raise ConfigurationError(
            f"{whole} needs whole tensors, but {sharded[0]} and {len(sharded) - 1} more parameters are sharded over "
            "ranks. Omit it, or keep all parameters on every rank (ddp)."
        )
    if schedule.whole_round_late and not merge.keeps_sent:
        raise ConfigurationError(
            f"overlap_steps={schedule.overlap_steps} merges each fragment a whole round late, where {described(merge)} "
            "would drop all work since the fragment was sent. Use RebaseMerge or fewer overlap steps."
        )
    optimizers = inner_optimizer if isinstance(inner_optimizer, Sequence) else [inner_optimizer]
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if idle := [name for name, parameter in trainable.items() if id(parameter) not in held]:
        raise ConfigurationError(
            f"No inner optimizer holds {', '.join(idle)}. Add it to one, or freeze it with requires_grad_(False)."
        )
    if (given := len(arguments["fragments"])) != schedule.num_fragments:
        raise ConfigurationError(
            f"There are {given} fragments, but the schedule has num_fragments={schedule.num_fragments}. Both numbers "
            "must be equal."
        )


def _check_own_code(arguments: Mapping[str, Any], codecs: Mapping[str, Codec]) -> None:
    """Check components that are not this package's own against their contracts."""
    checks: dict[str, Callable[[Any], object]] = {
        **dict.fromkeys(codecs, lambda codec: check_codec(lambda: codec)),
        "outer_optimizer": check_outer_optimizer,
        "merge": check_merge_rule,
        "average": check_average_rule,
    }
    for name, check in checks.items():
        component = codecs.get(name, arguments.get(name))
        if component is not None and not type(component).__module__.startswith("diloco."):
            try:
                check(component)
            except ContractError as error:
                raise ContractError(f"{name} can't be used: {error}") from error


def described(value: object) -> str:
    """Describe a value as text that is the same in every process: objects by attributes, functions by name.

    >>> from diloco.algorithm.optim import Nesterov
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
