"""The arguments of `DiLoCo`: their defaults and checks, and what replicas compare of them.

The annotation of an argument says its type, its range, and whether it must be the same on all replicas (`Shared`) and
in a run that goes on from a saved state (`Saved`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import xxhash
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from diloco.algorithm import (
    GREATEST_WEIGHT,
    LEAST_WEIGHT,
    AlphaMerge,
    AverageRule,
    Codec,
    FragmentLayout,
    MergeRule,
    Nesterov,
    OuterOptimizer,
    RebaseMerge,
    SyncSchedule,
    buffer_layout,
    check_buffers,
    check_coverage,
    check_range,
    digest_tensors,
    hidden_matrices,
    local_shard,
    make_codec,
    named_parameters,
    names_at_home,
    partition,
    persistent_buffers,
    trainable_parameters,
)
from diloco.errors import ConfigurationError, ContractError
from diloco.events import Event
from diloco.plugins import code_digest
from diloco.testing import check_average_rule, check_codec, check_merge_rule, check_outer_optimizer
from diloco.transport import Transport

T = TypeVar("T")
Shared = Annotated[T, "shared"]
Saved = Annotated[T, "shared", "saved"]

_NAMED = 3  # the number of tensors that are always named; a digest covers all of them
_MAX_FRAGMENTS = 32  # of which each is compared by itself, as the message to register has at most 16 kB
_MAX_FRAGMENT_CHARACTERS = 8000  # of all fragments, likewise
_MAX_CHARACTERS = 2000  # of buffers and frozen parameters, which are all named if they fit

FIRST_WEIGHTS = (
    "first weights (seed all replicas alike, not by rank; processors of several kinds draw others from one seed: load "
    "those that replica 0 has saved; compare_weights=False if a saved run goes on)"
)

_CONTRACTS: Mapping[type, Callable[[Any], object]] = {
    Codec: lambda codec: check_codec(lambda: codec),
    OuterOptimizer: check_outer_optimizer,
    MergeRule: check_merge_rule,
    AverageRule: check_average_rule,
}
"""The components that users may write, and the check of each against its contract."""


@dataclass(frozen=True)
class _Given:
    """A mark of an argument that may be given in another form, or as None for what follows from the others."""

    kind: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Arguments:
    """The arguments of `DiLoCo`, which describes them, with their defaults."""

    model: nn.Module
    inner_optimizer: Optimizer | Sequence[Optimizer] = ()
    transport: Transport | None = None
    schedule: Annotated[Saved[SyncSchedule], _Given(SyncSchedule | None)]
    fragments: Annotated[tuple[FragmentLayout, ...], _Given(Sequence[FragmentLayout] | None)]
    outer_optimizer: Annotated[Shared[OuterOptimizer], _Given(OuterOptimizer | None)]
    merge: Annotated[Saved[MergeRule], _Given(MergeRule | None)]
    codec: Annotated[Saved[Codec], _Given(Codec | str)]
    error_feedback: Annotated[Saved[bool | float], Meta(ge=0, le=1)]
    global_device: torch.device | str | None = None
    weight: Annotated[float, Meta(ge=LEAST_WEIGHT, le=GREATEST_WEIGHT)] = 1.0
    max_norm: Annotated[Shared[float | None], Meta(gt=0)]
    at_home: Sequence[str]  # once completed, whole names
    average: Shared[AverageRule | None]
    isotropic: Shared[bool]
    mean_codec: Shared[Codec | str]
    on_event: Callable[[Event], None] | None = None
    compare_arguments: bool = True
    compare_weights: bool = True


@functools.cache
def _hints() -> Mapping[str, Any]:
    return get_type_hints(Arguments, include_extras=True)


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` unless arguments of `DiLoCo` have the types of `Arguments` and are in range.

    A component that is not this package's own must keep its contract, else it is a `ContractError`.
    """
    for name in sorted(arguments.keys() & _hints().keys()):
        value, hint = arguments[name], _hints()[name]
        marks = getattr(hint, "__metadata__", ())
        kind = getattr(hint, "__origin__", hint) if marks else hint
        kind = next((mark.kind for mark in marks if isinstance(mark, _Given)), kind)
        check_kind(name, value, kind)
        check_range(name, float(value) if isinstance(value, bool) else value, hint)
        for contract, check in _CONTRACTS.items():
            if isinstance(value, contract) and not type(value).__module__.startswith("diloco."):
                try:
                    check(value)
                except ContractError as error:
                    raise ContractError(f"{name} can't be used: {error}") from error


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Raise `ConfigurationError` unless an argument has a type, as it stands in an annotation."""
    if not _fits(value, kind):
        shown = re.sub(r"\w+\.", "", inspect.formatannotation(kind))
        raise ConfigurationError(f"{name} must be {shown}, got {_shown(value)}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inside)
    if origin is Sequence:
        return isinstance(value, Sequence) and all(_fits(each, inside[0]) for each in value)
    if origin is Callable:
        return callable(value)
    if isinstance(value, type):  # which has the methods of its instances
        return False
    if hint is Optimizer:  # some libraries have their own
        return isinstance(getattr(value, "param_groups", None), list)
    return isinstance(value, Real if hint is float else hint)


def _shown(value: Any) -> str:
    if isinstance(value, type):
        advice = "" if value.__module__.startswith("torch.") else f". Create one: {value.__qualname__}(...)"
        return f"the class {value.__qualname__}{advice}"
    if isinstance(value, list | tuple):
        return f"[{', '.join([*map(_shown, value[:_NAMED]), *(['...'] if value[_NAMED:] else [])])}]"
    return repr(value) if isinstance(value, str | Real | None) else f"a {type(value).__module__}.{type(value).__name__}"


def complete(**given: Any) -> Arguments:
    """Return arguments as given to `DiLoCo` with their defaults, of which some follow from others."""
    check_kinds(given)
    schedule = given["schedule"] or SyncSchedule(inner_steps=100)
    model, at_home = given["model"], given["at_home"]
    layouts = given["fragments"] or partition(model, num_fragments=schedule.num_fragments, at_home=at_home)
    codec, mean = given["codec"], given["mean_codec"]
    completed = {
        "schedule": schedule,
        "fragments": tuple(layouts),
        "at_home": names_at_home(model, at_home),
        "outer_optimizer": given["outer_optimizer"] or Nesterov(learning_rate=0.7 if len(layouts) == 1 else 0.4),
        "merge": given["merge"] or (RebaseMerge() if schedule.overlap_steps else AlphaMerge()),
        "codec": make_codec(codec) if isinstance(codec, str) else codec,
        "mean_codec": make_codec(mean) if isinstance(mean, str) and mean != "auto" else mean,
    }
    return Arguments(**given | completed)


def check_arguments(arguments: Arguments) -> None:
    """Raise `ConfigurationError` unless the arguments of `DiLoCo` work together."""
    model, schedule, fragments = arguments.model, arguments.schedule, arguments.fragments
    merge, average, codec = arguments.merge, arguments.average, arguments.codec
    if codec.needs_error_feedback and not arguments.error_feedback:
        raise ConfigurationError(
            f"codec={codec.name!r} leaves out {codec.left_out}, so it needs error feedback, but error_feedback is "
            f"{arguments.error_feedback!r}. Use error_feedback={codec.usual_error_feedback}, or another codec."
        )
    mean = arguments.mean_codec
    if isinstance(mean, Codec) and mean.needs_error_feedback:
        raise ConfigurationError(
            f"mean_codec={mean.name!r} leaves out much of what it encodes, and means have no error feedback. Use "
            "another."
        )
    check_coverage(model, fragments, arguments.at_home)
    trainable = trainable_parameters(model)
    check_buffers(model)
    inner = arguments.inner_optimizer
    groups = [group for each in (inner if isinstance(inner, Sequence) else [inner]) for group in each.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    if left_out := [name for name, parameter in trainable.items() if id(parameter) not in held]:
        raise ConfigurationError(
            f"The inner optimizer does not hold {', '.join(left_out[:3])} of this model, so no step would train it. "
            "Pass all optimizers of the model, or freeze the parameter with requires_grad_(False)."
        )
    by_device = {str(parameter.device): name for name, parameter in trainable.items()}
    if len(by_device) > 1 or "meta" in by_device:  # copies between devices synchronise only one
        places = ", ".join(f"{name} on {device}" for device, name in by_device.items())
        raise ConfigurationError(
            f"All trainable parameters must be on one device, but there are {places} (meta: offloaded). Load the model "
            "without a device_map, or with one that puts them on one device. Frozen ones may be anywhere."
        )
    for module in model.modules():
        strategy: Any = getattr(module, "sharding_strategy", None)
        # known by name, since importing FSDP is slow
        if type(module).__name__ == "FullyShardedDataParallel" and strategy.name != "NO_SHARD":
            raise ConfigurationError(
                "FullyShardedDataParallel (FSDP1) shards parameters over ranks without DTensors, which can't be "
                "synchronised. Use FSDP2 (fully_shard) or DistributedDataParallel."
            )
    sharded = [name for name, parameter in trainable.items() if hasattr(parameter, "to_local")]
    whole = "max_norm" if arguments.max_norm is not None else ""  # which no rank can take of a shard
    if average is not None and not average.elementwise:
        whole = _described(average)
    if arguments.isotropic and hidden_matrices(model).keys() <= {*arguments.at_home}:
        raise ConfigurationError(
            "isotropic=True needs hidden matrices, but what is sent of this model has none besides its embeddings and "
            "head. Omit it."
        )
    if whole and sharded:
        raise ConfigurationError(
            f"{whole} needs whole tensors, but {sharded[0]} and {len(sharded) - 1} more parameters are sharded over "
            "ranks. Omit it, or keep all parameters on every rank (ddp)."
        )
    if schedule.whole_round_late and not merge.keeps_sent:
        raise ConfigurationError(
            f"overlap_steps={schedule.overlap_steps} merges each fragment a whole round late, where "
            f"{_described(merge)} would drop all work since the fragment was sent. Use RebaseMerge or fewer overlap "
            "steps."
        )
    if len(fragments) != schedule.num_fragments:
        raise ConfigurationError(
            f"There are {len(fragments)} fragments, but the schedule has num_fragments={schedule.num_fragments}. Both "
            "numbers must be equal."
        )


def argument_facts(arguments: Arguments, kind: str = "shared") -> dict[str, str]:
    """Return what replicas compare of the arguments of `DiLoCo`, as name -> text.

    ``kind`` "saved": only what a saved state and the run that loads it must share.
    """
    model = arguments.model
    names = [name for name, hint in _hints().items() if kind in getattr(hint, "__metadata__", ())]
    facts = {name.replace("_", " "): _described(getattr(arguments, name)) for name in names}
    facts["at home"] = _listed(arguments.at_home, _MAX_CHARACTERS)
    if kind == "saved":  # a run may go on with another learning rate
        facts["outer optimizer"] = type(arguments.outer_optimizer).__name__
    else:
        codes = {f"code of {name}": code_digest(getattr(arguments, name)) for name in names}
        facts |= {name: code for name, code in codes.items() if code}
    shapes = {name: f"{name} {tuple(p.shape)}" for name, p in trainable_parameters(model).items()}
    fragments = {f"fragment {f.index}": _listed([shapes[name] for name in f.names]) for f in arguments.fragments}
    if len(fragments) > _MAX_FRAGMENTS or sum(map(len, fragments.values())) > _MAX_FRAGMENT_CHARACTERS:
        fragments = {"fragments": _listed([*map(str, fragments.items())])}
    if kind == "shared":
        fragments["buffers"] = _listed(buffer_layout(model, arguments.at_home), _MAX_CHARACTERS)
    return facts | fragments


def _described(value: object) -> str:
    """Describe a value as text that is the same in every process: objects by attributes, functions by name.

    >>> from diloco.algorithm.optim import Nesterov
    >>> _described(Nesterov(learning_rate=1, momentum=max))
    'Nesterov(learning_rate=1.0, momentum=max)'
    """
    if isinstance(value, SyncSchedule | Codec):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, bool | str) or value is None:
        return repr(value)
    if isinstance(value, Real):
        return repr(float(value))
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        names = list(getattr(value, "__dict__", ()))
    return f"{type(value).__name__}({', '.join(f'{name}={_described(getattr(value, name))}' for name in names)})"


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


def frozen_facts(model: nn.Module) -> dict[str, str]:
    """Return the digests of frozen parameters, all of whose values are read, as a fact to compare."""
    frozen = [f"{name} {digest}" for name, digest in frozen_digests(model).items()]
    return {"frozen parameters of these digests": _listed(frozen, _MAX_CHARACTERS)} if frozen else {}


def first_weights(model: nn.Module, at_home: Collection[str] = ()) -> str:
    """Return the trainable parameters and the buffers with digests of their values, all of which are read, as a fact.

    Those ``at_home`` are left out. Call it on all ranks that have shards.
    """
    tensors = trainable_parameters(model) | persistent_buffers(model)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in at_home}
    digests = {name: digest_tensors({"": _whole(tensor).float()}) for name, tensor in tensors.items()}
    return _listed([f"{name} {digest[:16]}" for name, digest in digests.items()], _MAX_CHARACTERS // 2)


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """Return name -> digest of all values of each frozen parameter in memory. Call it on all ranks that have shards."""
    frozen = {name: parameter for name, parameter in named_parameters(model).items() if not parameter.requires_grad}
    whole = ((name, _whole(each)) for name, each in frozen.items())
    return {name: digest_tensors(parts) for name, each in whole if (parts := dict(_dense_parts("", each)))}


def _dense_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the dense tensors in memory that hold the values of a tensor, such as a quantised one of bitsandbytes."""
    tensor = tensor if is_lazy(tensor) else local_shard(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _dense_parts(f"{name}.{attribute}", getattr(tensor, attribute))
    elif not tensor.is_meta and not is_lazy(tensor):
        yield name, tensor.to_dense()


def synchronised(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Return each tensor to be synchronised as text: those of ``parameters`` that the model has, and new ones."""
    known, texts = {id(parameter): name for name, parameter in parameters.items()}, set()
    for name, parameter in named_parameters(model).items():
        if id(parameter) in known:
            texts.add(f"parameter {known[id(parameter)]} {tuple(parameter.shape)}")
        elif parameter.requires_grad:
            texts.add(f"parameter {name}")
    for name, each in persistent_buffers(model).items():  # the type counts of those that are copied as bytes
        kind = "" if each.is_floating_point() else f" {each.dtype}"
        texts.add(f"buffer {name} {tuple(each.shape)}{kind}")
    return texts
