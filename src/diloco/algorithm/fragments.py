"""Dividing a model's trainable parameters into fragments, each parameter in exactly one.

A `Fragment` is a value: names, shapes and sizes. `partition` decides from names and sizes alone; `bind` looks the
parameters up in a model; `flatten` and `unflatten_` move between a fragment's tensors and one flat float32 vector.
Tied weights count once, under the first of their names; frozen parameters are in no fragment.

Where the ranks of a replica share its parameters out (DTensors), what is decided is decided from whole parameters,
alike on all ranks, and what is moved is this rank's shard; it may be empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from diloco.algorithm.layers import group_layers, match_patterns
from diloco.algorithm.numbers import check_whole
from diloco.errors import ConfigurationError, FragmentError, nearest

__all__ = [
    "Fragment",
    "Strategy",
    "bind",
    "check_coverage",
    "flatten",
    "holding",
    "local_shard",
    "partition",
    "trainable_parameters",
    "unflatten_",
]

Strategy = Literal["strided", "sequential", "balanced", "patterns"]


@dataclass(frozen=True)
class Fragment:
    """Parameters that travel together.

    Attributes:
        index: p, counted from 0.
        names: the parameters' names, in the order in which they are flattened.
        shapes: the shapes of what this rank holds of them: all of each parameter, or its shard.
    """

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Values of each parameter in this rank's flat vector, in its order."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def numel(self) -> int:
        """Values in this rank's flat vector; 0 where its shards are all empty."""
        return sum(self.sizes)

    def named(self, values: Tensor) -> dict[str, Tensor]:
        """Name -> its part of the flat vector ``values``, ``(numel,)``, as a view in its shape.

        >>> Fragment(0, ("a", "b"), ((2,), (1, 2))).named(torch.arange(4))
        {'a': tensor([0, 1]), 'b': tensor([[2, 3]])}
        """
        pieces = torch.split(values, list(self.sizes))
        return {name: piece.view(shape) for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)}


def local_shard(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``, detached and on the same memory: its shard of a DTensor, else all of it."""
    # asked by its method, so that the algorithm needs to know nothing of process groups
    to_local = getattr(tensor.detach(), "to_local", None)
    shard: Tensor = tensor.detach() if to_local is None else to_local()
    return shard


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, trainable ones only, tied ones once.

    Raises:
        FragmentError: if two distinct parameters share memory, which would be updated twice.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    owners: dict[tuple[str, int], str] = {}
    for name, parameter in parameters.items():
        shard = local_shard(parameter)
        if shard.is_meta or shard.numel() == 0:
            continue
        place = (str(shard.device), shard.data_ptr())
        if place in owners:
            raise FragmentError(
                f"the parameters {owners[place]!r} and {name!r} are two objects on the same memory; tie them by "
                "assigning one Parameter to both modules, so that it is counted once."
            )
        owners[place] = name
    return parameters


def partition(
    model: nn.Module,
    *,
    num_fragments: int = 1,
    strategy: Strategy = "strided",
    patterns: Sequence[Sequence[str]] = (),
) -> tuple[Fragment, ...]:
    """Divide the trainable parameters of ``model`` into ``num_fragments`` fragments.

    - One fragment is the whole model, under every strategy but ``patterns``.
    - ``strided`` (Streaming DiLoCo's default): fragment 0 holds everything outside the layers (embeddings, head, final
      norm), fragment i >= 1 the layers i-1, i-1 + (P-1), i-1 + 2(P-1), ... Where nothing is outside, all hold layers.
    - ``sequential``: the same, but with blocks of neighbouring layers.
    - ``balanced``: single tensors packed into fragments of nearly equal size, the largest first.
    - ``patterns``: fragment i holds the names that match one of ``patterns[i]`` (shell-style, ``layers.[01].*``).

    Raises:
        FragmentError: if a parameter is in no fragment or in two, or a fragment would be empty; it names them.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    >>> [fragment.names for fragment in partition(model, num_fragments=2, strategy="balanced")]
    [('1.weight', '0.weight'), ('2.weight',)]
    """
    if strategy not in get_args(Strategy):
        raise ConfigurationError(
            f"fragment strategy {strategy!r} was given; {nearest(str(strategy), get_args(Strategy))}"
        )
    num_fragments, parameters = check_whole("num_fragments", num_fragments, 1), trainable_parameters(model)
    if not parameters:
        raise FragmentError("the model has no trainable parameters; there is nothing to synchronise.")
    if strategy == "patterns":
        groups = match_patterns(_names_with_aliases(model, parameters), patterns)
    elif num_fragments == 1:
        groups = [list(parameters)]
    elif strategy == "balanced":
        groups = _balanced({name: p.numel() for name, p in parameters.items()}, num_fragments)
    else:
        groups = _layered({name: p.numel() for name, p in parameters.items()}, num_fragments, strategy)
    fragments = tuple(
        Fragment(index, tuple(names), tuple(tuple(local_shard(parameters[name]).shape) for name in names))
        for index, names in enumerate(groups)
    )
    check_coverage(model, fragments)
    return fragments


def check_coverage(model: nn.Module, fragments: Sequence[Fragment]) -> None:
    """Raise `FragmentError` unless every trainable parameter of ``model`` is in exactly one of ``fragments``."""
    parameters = trainable_parameters(model)
    seen: dict[str, int] = {}
    for position, fragment in enumerate(fragments):
        # of the whole parameters: what this rank holds of them may well be empty
        numel = sum(parameters[name].numel() for name in fragment.names if name in parameters)
        if fragment.index != position or (numel == 0 and fragment.numel == 0):
            raise FragmentError(
                f"fragment {fragment.index} at position {position} holds {numel} values; fragments "
                "are numbered from 0, and none may be empty. Use fewer."
            )
        for name, shape in zip(fragment.names, fragment.shapes, strict=True):
            if name in seen:
                raise FragmentError(
                    f"the parameter {name!r} is in fragments {seen[name]} and {position}; it must be in exactly one."
                )
            if name not in parameters or tuple(local_shard(parameters[name]).shape) != shape:
                raise FragmentError(
                    f"fragment {position} names {name!r} of shape {shape}, which is no trainable parameter of this "
                    "model."
                )
            seen[name] = position
    if missing := [name for name in parameters if name not in seen]:
        raise FragmentError(
            f"no fragment holds {', '.join(missing)}; a parameter left out would never be synchronised. Add it to a "
            "fragment, or freeze it with requires_grad_(False)."
        )


def bind(model: nn.Module, fragment: Fragment) -> list[nn.Parameter]:
    """The parameters of ``fragment`` in ``model``, in order."""
    parameters = trainable_parameters(model)
    return [parameters[name] for name in fragment.names]


def flatten(tensors: Sequence[Tensor], out: Tensor) -> Tensor:
    """Copy ``tensors``, of any dtype and device, into ``out``: ``(numel,)`` float32; returns ``out``."""
    start = 0
    for shard in map(local_shard, tensors):
        stop = start + shard.numel()
        # CUDA's copies are waited for below; another device's to the host must not be on its way still
        out[start:stop].view(shard.shape).copy_(shard, non_blocking=shard.is_cuda or out.is_cuda)
        start = stop
    if out.device.type == "cpu" and any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream().synchronize()  # the host must not read a copy that is still on its way
    return out


def unflatten_(values: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy ``values``, ``(numel,)`` float32, into ``tensors`` in place, in their own dtype and on their own device."""
    start = 0
    for shard in map(local_shard, tensors):
        stop = start + shard.numel()
        shard.copy_(values[start:stop].view(shard.shape))
        start = stop


@contextmanager
def holding(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """Inside, the parameters named in ``values`` hold them; afterwards they hold what they held before.

    Of a parameter that is a DTensor, ``values`` has this rank's shard.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> before = model.weight.item()
    >>> with holding(model, {"weight": torch.tensor([[7.0]])}):
    ...     model.weight.item()
    7.0
    >>> model.weight.item() == before
    True
    """
    parameters = {name: local_shard(p) for name, p in trainable_parameters(model).items() if name in values}
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
        yield model
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(before[name])


def _names_with_aliases(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """First name -> every name of the same parameter, so that a pattern may use any of them."""
    first = {id(parameter): name for name, parameter in parameters.items()}
    aliases: dict[str, list[str]] = {name: [] for name in parameters}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            aliases[first[id(parameter)]].append(name)
    return aliases


def _layered(sizes: Mapping[str, int], num_fragments: int, strategy: str) -> list[list[str]]:
    rest, layers = group_layers(sizes)
    outside = [rest] if rest else []
    blocks = num_fragments - len(outside)
    if not 1 <= blocks <= len(layers):
        works = f"1 to {len(layers) + len(outside)}" if layers else "1"
        balanced = f'partition(model, num_fragments={num_fragments}, strategy="balanced")'
        raise FragmentError(
            f"num_fragments={num_fragments} was given for a model with {len(layers) or 'no numbered'} layers"
            f"{' and parameters outside them' if outside and layers else ''}, of which {strategy} fragments are made. "
            f"Use {works}, or fragments={balanced}, which goes by the sizes of parameters alone."
        )
    if strategy == "strided":
        members = [layers[block::blocks] for block in range(blocks)]
    else:
        bounds = [block * len(layers) // blocks for block in range(blocks + 1)]
        members = [layers[low:high] for low, high in itertools.pairwise(bounds)]
    return [*outside, *([name for layer in block for name in layer] for block in members)]


def _balanced(sizes: Mapping[str, int], num_fragments: int) -> list[list[str]]:
    if num_fragments > len(sizes):
        raise FragmentError(
            f"{num_fragments} balanced fragments were asked of a model with {len(sizes)} parameter tensors. "
            f"Use 1 to {len(sizes)}."
        )
    groups: list[list[str]] = [[] for _ in range(num_fragments)]
    loads = [0] * num_fragments
    # sorted() is stable: tensors of one size keep the model's order, so every replica packs alike.
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        lightest = min(range(num_fragments), key=lambda index: (loads[index], len(groups[index])))
        groups[lightest].append(name)
        loads[lightest] += sizes[name]
    return groups
