"""What `DiLoCo` accepts, what must be the same on all replicas, and what must stay so in the model while it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from diloco.algorithm import (
    GREATEST_WEIGHT,
    LEAST_WEIGHT,
    Mean,
    MeanEncoding,
    buffer_layout,
    check_buffers,
    check_coverage,
    check_number,
    check_parameters,
    collect_buffers,
    digest_tensors,
    local_shard,
    named_parameters,
    not_finite,
    overlaps,
    persistent_buffers,
    restore_buffers_,
    trainable_parameters,
)
from diloco.errors import ConfigurationError, ContractError
from diloco.plugins import code_digest
from diloco.testing import check_average_rule, check_codec, check_merge_rule, check_outer_optimizer
from diloco.transport import InProcessTransport, Transport

__all__ = ["ModelWatch", "argument_facts", "check_arguments", "check_kinds", "check_own_code", "frozen_digests"]

_NAMED = 3  # the number of tensors that are always named; a digest covers all of them
_MAX_FRAGMENTS = 32  # of which each is compared by itself, as the message to register has at most 16 kB
_MAX_CHARACTERS = 2000  # of buffers and frozen parameters, which are all named if they fit
_SAMPLED = 1 << 14  # values per frozen parameter that are compared at every round


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` unless arguments of `DiLoCo` have the types of its signature and are in range."""
    from diloco.outer.diloco import DiLoCo  # which imports this module

    transport, advice = arguments.get("transport"), ""
    if isinstance(transport, AbstractContextManager):
        advice = " Enter it: `with connect_tcp(...) as transport:`."
    elif isinstance(transport, InProcessTransport):
        advice = " Pass one of its endpoints, such as transport.endpoint(0)."
    if transport is not None and not isinstance(transport, Transport):
        raise ConfigurationError(f"transport must be a connected diloco transport, got {_shown(transport)}.{advice}")
    hints, texts = get_type_hints(DiLoCo.__init__), DiLoCo.__init__.__annotations__
    for name in sorted(arguments.keys() & hints.keys()):
        if not _fits(arguments[name], hints[name]):
            raise ConfigurationError(f"{name} must be {texts[name]}, got {_shown(arguments[name])}.")
    check_number("weight", arguments.get("weight", 1.0), LEAST_WEIGHT, GREATEST_WEIGHT)
    check_number("error_feedback", float(arguments.get("error_feedback", False)), 0, 1)
    if arguments.get("max_norm") is not None:
        check_number("max_norm", arguments["max_norm"], 0, above=True)


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
    return repr(value) if isinstance(value, str | Real | None) else f"a {type(value).__module__}.{type(value).__name__}"


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` unless the arguments of `DiLoCo`, with their defaults resolved, work together."""
    model, schedule, fragments, merge, average = (
        arguments[name] for name in ("model", "schedule", "fragments", "merge", "average")
    )
    device = "cpu" if arguments["global_device"] is None else arguments["global_device"]
    try:
        torch.zeros(1, dtype=torch.float32, device=device).cpu()
    except Exception as error:  # torch raises many kinds of them
        raise ConfigurationError(
            f"global_device={str(device)!r} can't hold the global parameters: {str(error).splitlines()[0]} Use 'cpu', "
            "or None for the model's device."
        ) from error
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
    check_own_code(arguments)
    check_coverage(model, fragments)
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
        if type(module).__name__ == "FullyShardedDataParallel" and module.sharding_strategy.name != "NO_SHARD":
            raise ConfigurationError(
                "FullyShardedDataParallel (FSDP1) shards parameters over ranks without DTensors, which can't be "
                "synchronised. Use FSDP2 (fully_shard) or DistributedDataParallel."
            )
    sharded = [name for name, parameter in trainable.items() if hasattr(parameter, "to_local")]
    whole = "max_norm" if arguments["max_norm"] is not None else ""  # which no rank can take of a shard
    if average is not None and not average.elementwise:
        whole = _described(average)
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
    optimizers = arguments["inner_optimizer"]
    optimizers = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if idle := [name for name, parameter in trainable.items() if id(parameter) not in held]:
        raise ConfigurationError(
            f"No inner optimizer holds {', '.join(idle)}. Add it to one, or freeze it with requires_grad_(False)."
        )
    if len(fragments) != schedule.num_fragments:
        raise ConfigurationError(
            f"There are {len(fragments)} fragments, but the schedule has num_fragments={schedule.num_fragments}. Both "
            "numbers must be equal."
        )


_CONTRACTS: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("codec", "mean_codec"), lambda codec: check_codec(lambda: codec)),
    "outer_optimizer": check_outer_optimizer,
    "merge": check_merge_rule,
    "average": check_average_rule,
}
"""The components that users may write, and the check of each against its contract."""


def check_own_code(components: Mapping[str, Any]) -> None:
    """Raise `ContractError` if a component that is not this package's own violates its contract."""
    for name, check in _CONTRACTS.items():
        component = components[name]
        component = None if isinstance(component, str) else component
        if component is not None and not type(component).__module__.startswith("diloco."):
            try:
                check(component)
            except ContractError as error:
                raise ContractError(f"{name} can't be used: {error}") from error


def argument_facts(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return what replicas compare of the arguments of `DiLoCo`, as name -> text, the most likely mistakes first."""
    schedule, average = arguments["schedule"], arguments["average"]
    shapes = {name: f"{name} {tuple(p.shape)}" for name, p in trainable_parameters(model).items()}
    fragments = {f"fragment {f.index}": _listed([shapes[name] for name in f.names]) for f in arguments["fragments"]}
    if len(fragments) > _MAX_FRAGMENTS:
        fragments = {"fragments": _listed([*map(str, fragments.items())])}
    offsets = list(schedule.fragment_offsets)
    codes = {f"code of {name}": code_digest(arguments[name]) for name in _CONTRACTS}
    return {
        "schedule": f"H {schedule.inner_steps}, tau {schedule.overlap_steps}, offsets {offsets}",
        "codec": str(MeanEncoding(arguments["codec"])),
        "error feedback": "yes" if arguments["error_feedback"] else "no",
        "outer optimizer": _described(arguments["outer_optimizer"]),
        "merge": _described(arguments["merge"]),
        "max_norm": str(arguments["max_norm"]),
        "mean codec": str(MeanEncoding.of(arguments["mean_codec"])),
        "average": "weighted mean" if average is None else _described(average),
        **{name: code for name, code in codes.items() if code},
        **fragments,
        "buffers": _listed(buffer_layout(model), _MAX_CHARACTERS),
    }


def frozen_facts(model: nn.Module) -> dict[str, str]:
    """Return the digests of frozen parameters, all of whose values are read, as a fact to compare."""
    frozen = [f"{name} {digest}" for name, digest in frozen_digests(model).items()]
    return {"frozen parameters of these digests": _listed(frozen, _MAX_CHARACTERS)} if frozen else {}


def saved_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Return those of the `argument_facts` that a checkpoint and the run that loads it must share."""
    names = [name for name in facts if name in ("schedule", "codec", "error feedback", "merge")]
    names += [name for name in facts if name.startswith("fragment")]
    kind, _, _ = facts["outer optimizer"].partition("(")  # a run may go on with another learning rate
    return {**{name: facts[name] for name in names}, "outer optimizer": kind}


def _described(value: object) -> str:
    """Describe a value as text that is the same in every process: objects by attributes, functions by name.

    >>> from diloco.algorithm.optim import Nesterov
    >>> _described(Nesterov(learning_rate=1, momentum=max))
    'Nesterov(learning_rate=1.0, momentum=max)'
    """
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


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """Return name -> digest of all values of each frozen parameter in memory. Call it on all ranks that have shards."""
    frozen = {name: parameter for name, parameter in named_parameters(model).items() if not parameter.requires_grad}
    whole = ((name, each.full_tensor() if hasattr(each, "full_tensor") else each) for name, each in frozen.items())
    return {name: digest_tensors(parts) for name, each in whole if (parts := dict(_dense_parts("", each)))}


class ModelWatch:
    """Checks that a model stays what it was when its `DiLoCo` was constructed.

    ``parameters`` are those that fragments hold, by name.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._parameters = parameters
        self._known = {id(parameter) for parameter in parameters.values()}
        self._tensors = self._synchronised()
        self._checked: list[tuple[object, ...]] = []  # what the last check has seen
        self.begin()

    def begin(self) -> None:
        """Take the current buffers and frozen parameters as those of all replicas."""
        self._frozen = self._sampled()
        self._agreed, _ = collect_buffers(self._model)  # the floating-point buffers that all replicas held last

    def outgoing_buffers(self) -> dict[str, Any]:
        """Return the fields of a contribution that carries the model's buffers."""
        buffers, integers = collect_buffers(self._model)
        bad = [] if buffers is None else not_finite(self._model, buffers, self._agreed)
        withdrawn = f"its buffer {', '.join(map(repr, bad))} became NaN or infinite" if bad else ""
        return {"buffers": buffers, "integers": integers, "withdrawn": withdrawn}

    def take_buffers(self, average: Mean) -> None:
        """Put the averaged buffers into the model, if a round had any."""
        if average.buffers is not None or average.integers is not None:
            restore_buffers_(self._model, average.buffers, average.integers)
            self._agreed = average.buffers

    def check(self) -> None:
        """Raise `ConfigurationError` if a parameter or buffer was added, replaced or resized, or can't be synchronised.

        Freezing, and another floating-point type, are allowed.
        """
        current = named_parameters(self._model)
        seen = [(name, *_place(each)) for name, each in (current | persistent_buffers(self._model)).items()]
        if seen == self._checked:
            return
        if changed := sorted(self._tensors ^ self._synchronised()):
            raise ConfigurationError(
                f"The model is no longer the one of which DiLoCo(...) was constructed: {', '.join(changed)} is gone or "
                "new, so it would not be synchronised. Change values in place, and add, resize or unfreeze before. If "
                "the first batch makes a buffer, run one before; if it is derived, use persistent=False."
            )
        check_parameters(self._parameters)
        check_buffers(self._model, self._parameters)
        self._checked = seen

    def drift(self) -> Iterator[str]:
        """Yield a sentence about frozen parameters that have changed, each of them once, if any has."""
        now = self._sampled()
        changed = [name for name, digest in self._frozen.items() if now.get(name, digest) != digest]
        self._frozen = {name: digest for name, digest in self._frozen.items() if name not in changed}
        if changed:
            yield (
                f"The frozen parameter {', '.join(changed)} has changed since the start. Frozen parameters are not "
                "synchronised, so it may differ between replicas. Register it as a buffer, which is averaged, or "
                "change it alike on every replica."
            )

    def _synchronised(self) -> set[str]:
        """Return each parameter and buffer to be synchronised, and those that the model would need to be, as text."""
        current = named_parameters(self._model)
        present = {id(parameter) for parameter in current.values()}
        names = {name for name, each in self._parameters.items() if id(each) in present}
        texts = {f"parameter {name} {tuple(self._parameters[name].shape)}" for name in names}
        texts |= {f"parameter {n}" for n, each in current.items() if each.requires_grad and id(each) not in self._known}
        for name, each in persistent_buffers(self._model).items():  # the type counts of those that are copied as bytes
            kind = "" if each.is_floating_point() else f" {each.dtype}"
            texts.add(f"buffer {name} {tuple(each.shape)}{kind}")
        return texts

    def _sampled(self) -> dict[str, str]:
        frozen = {
            name: dict(_dense_parts(name, parameter))
            for name, parameter in named_parameters(self._model).items()
            if id(parameter) not in self._known
        }
        parts = {part: values for each in frozen.values() for part, values in each.items()}
        pairs = overlaps({**self._parameters, **parts}) if parts else ()
        tied = {part for pair in pairs if self._parameters.keys() & set(pair) for part in pair}  # with a trained one
        return {
            name: digest_tensors({part: _sample(values) for part, values in each.items()})
            for name, each in frozen.items()
            if not tied.intersection(each)
        }


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells a tensor, its memory and its kind from others, at the cost of a few look-ups."""
    shard = tensor if is_lazy(tensor) else local_shard(tensor)
    if type(shard) is not Tensor or shard.layout != torch.strided or shard.is_nested:
        return id(tensor), tensor.requires_grad
    memory = shard.data_ptr(), shard.shape, shard.stride(), shard.dtype, shard.is_inference()
    return id(tensor), tensor.requires_grad, *memory


def _sample(values: Tensor) -> Tensor:
    return values.reshape(-1)[:: max(1, -(-values.numel() // _SAMPLED))]


def _dense_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the dense tensors in memory that hold the values of a tensor of any kind, such as a quantised one."""
    tensor = tensor if is_lazy(tensor) else local_shard(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _dense_parts(f"{name}.{attribute}", getattr(tensor, attribute))
    elif tensor.is_nested:
        for number, part in enumerate(tensor.unbind()):
            yield f"{name}.{number}", part
    elif tensor.layout != torch.strided:
        yield name, tensor.to_dense()
    elif tensor.is_quantized:
        yield name, tensor.dequantize()
    elif not tensor.is_meta and not is_lazy(tensor):
        yield name, tensor.clone() if tensor.is_conj() or tensor._is_zerotensor() else tensor
