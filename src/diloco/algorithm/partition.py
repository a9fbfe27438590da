"""Partitions of a model's trainable parameters into fragments. Each parameter belongs to exactly one fragment.

`partition` divides a model by parameter names and sizes alone. `bind` looks up the parameters of a fragment in a model;
`flatten` and `unflatten_` copy between its tensors and one flat float32 vector. Tied weights count once, under the
first of their names. Frozen parameters belong to no fragment, nor do those that stay at home (`names_at_home`): each
replica trains its own, and they are never sent.

If the ranks of a replica shard its parameters (DTensors), all ranks derive the same partition from the whole
parameters, and each rank copies its own shard, which may be empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from diloco.algorithm.checks import check_choice, check_whole
from diloco.algorithm.settings import Strategy
from diloco.algorithm.tensors import (
    all_buffers,
    all_parameters,
    local_shard,
    named_parameters,
    shared_memory,
    unfit_parameter,
)
from diloco.errors import FragmentError, nearest


@dataclass(frozen=True)
class FragmentLayout:
    """Parameters that are sent together."""

    index: int  # p, counted from 0
    names: tuple[str, ...]  # of the parameters, in the order of the flat vector
    shapes: tuple[tuple[int, ...], ...]  # of the parameters, or of this rank's shards of them

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of values of each parameter in this rank's flat vector, in order."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def numel(self) -> int:
        """The number of values in this rank's flat vector; 0 if all its shards are empty."""
        return sum(self.sizes)

    def named(self, values: Tensor) -> dict[str, Tensor]:
        """Return name -> view of its part of the flat vector ``values``, ``(numel,)``, in the parameter's shape.

        >>> FragmentLayout(0, ("a", "b"), ((2,), (1, 2))).named(torch.arange(4))
        {'a': tensor([0, 1]), 'b': tensor([[2, 3]])}
        """
        pieces = torch.split(values, list(self.sizes))
        return {name: piece.view(shape) for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)}


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> trainable parameter. Tied ones appear once, and wrappers of torch do not change the names.

    Raises:
        FragmentError: if float32 global parameters can't hold the values of one, or if it shares memory with another
            parameter, which would change with it. The message names them.
    """
    named = named_parameters(model)
    parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    for name, parameter in parameters.items():
        if why := unfit_parameter(parameter):
            raise FragmentError(
                f"The trainable parameter {name!r} {why}, or freeze it with requires_grad_(False) before DiLoCo(...)."
            )
    for one, other in shared_memory(named):
        if one in parameters or other in parameters:
            raise FragmentError(
                f"The parameters {one!r} and {other!r} are two objects that share memory. Tie them by assigning one "
                "Parameter to both modules, so that it counts once, or give each its own memory with clone()."
            )
    return parameters


def names_at_home(model: nn.Module, parts: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the trainable parameters and persistent buffers that stay at home, in the order of the model.

    Args:
        parts: whole parts of their dotted names, such as ``lm_head``, ``layers.0`` or ``norm.weight``.

    Raises:
        FragmentError: if a part is in no such name, if nothing would be left to synchronise, or if a tensor that has
            several names stays at home under some of them only. The message names them.

    >>> names_at_home(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), ["0.bias", "1"])[:3]
    ('0.bias', '1.weight', '1.bias')
    """
    parts = [parts] if isinstance(parts, str) else parts
    named: list[tuple[str, Tensor]] = [
        (name, parameter) for name, parameter in all_parameters(model) if parameter.requires_grad
    ]
    trainable = {id(parameter) for _, parameter in named}
    named += all_buffers(model)
    kept = set[str]()
    for part in parts:
        having = [name for name, _ in named if f".{part}." in f".{name}."]
        if not having:
            known = {word for name, _ in named for word in name.split(".") if not word.isdigit()}
            raise FragmentError(
                f"{part!r} can't stay at home, because it is no part of the name of a trained parameter or buffer; "
                f"{nearest(part, known)} A tied output projection has the name of the embedding."
            )
        kept |= {*having}
    of_tensors: dict[int, list[str]] = {}
    for name, tensor in named:
        of_tensors.setdefault(id(tensor), []).append(name)
    for names in of_tensors.values():
        one, other = (next((name for name in names if (name in kept) is inside), "") for inside in (True, False))
        if one and other:
            raise FragmentError(
                f"{one} can't stay at home without {other}, because the two are tied and so one tensor. Name both, "
                "or untie them (model.arguments.tie_word_embeddings=false for a model of transformers)."
            )
    if trainable and trainable <= {id(tensor) for name, tensor in named if name in kept}:
        raise FragmentError(
            f"{', '.join(parts)} at home leaves nothing to synchronise. Name fewer parts, or train alone."
        )
    return tuple(names[0] for names in of_tensors.values() if names[0] in kept)


def partition(
    model: nn.Module,
    *,
    num_fragments: int = 1,
    strategy: Strategy = "strided",
    at_home: Sequence[str] = (),
) -> tuple[FragmentLayout, ...]:
    """Divide the trainable parameters of ``model``, without those ``at_home``, into ``num_fragments`` fragments.

    Strategies:

    - ``strided`` (Streaming DiLoCo's default): fragment 0 holds everything outside the layers (embeddings, head, final
      norm), fragment i >= 1 the layers i-1, i-1 + (P-1), i-1 + 2(P-1), ... If the layers hold all parameters, fragment
      0 holds layers, too.
    - ``sequential`` (the paper's other pattern): as ``strided``, but fragment i >= 1 holds neighbouring layers; if the
      layers can't be divided evenly, the first fragments hold one more.
    - ``balanced``: single tensors packed into fragments of nearly equal size, the largest first.

    A single fragment holds the whole model. For fragments of your own, construct `FragmentLayout` objects.

    Raises:
        FragmentError: if there are too few layers or parameters for so many fragments. The message says what works.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    >>> [fragment.names for fragment in partition(model, num_fragments=2, strategy="balanced")]
    [('1.weight', '0.weight'), ('2.weight',)]
    """
    check_choice("strategy", strategy, get_args(Strategy))
    num_fragments, parameters = check_whole("num_fragments", num_fragments, 1), trainable_parameters(model)
    if not parameters:
        raise FragmentError("The model has no trainable parameters, so there is nothing to synchronise.")
    kept = names_at_home(model, at_home)
    sizes = {name: parameter.numel() for name, parameter in parameters.items() if name not in kept}
    if num_fragments == 1:
        groups = [list(sizes)]
    elif strategy == "balanced":
        groups = _balanced(sizes, num_fragments)
    else:
        groups = _whole_layers(sizes, num_fragments, strategy)
    return tuple(
        FragmentLayout(index, tuple(names), tuple(tuple(local_shard(parameters[name]).shape) for name in names))
        for index, names in enumerate(groups)
    )


def check_coverage(model: nn.Module, fragments: Sequence[FragmentLayout], at_home: Collection[str] = ()) -> None:
    """Raise `FragmentError` unless every trainable parameter is in exactly one of ``fragments``, or ``at_home``."""
    parameters = trainable_parameters(model)
    seen: dict[str, int] = {}
    for position, fragment in enumerate(fragments):
        # counts whole parameters, since this rank's shards may all be empty
        numel = sum(parameters[name].numel() for name in fragment.names if name in parameters)
        if fragment.index != position or (numel == 0 and fragment.numel == 0):
            raise FragmentError(
                f"The fragment at position {position} has the index {fragment.index} and {numel} values. Indices must "
                "count from 0 and no fragment may be empty. Use fewer fragments or renumber them."
            )
        for name, shape in zip(fragment.names, fragment.shapes, strict=True):
            if name in at_home:
                raise FragmentError(
                    f"The parameter {name!r} is in fragment {position} and stays at home. Leave it out of one of them."
                )
            if name in seen:
                raise FragmentError(
                    f"The parameter {name!r} is in fragments {seen[name]} and {position}; it must be in exactly one."
                )
            if name not in parameters or tuple(local_shard(parameters[name]).shape) != shape:
                raise FragmentError(
                    f"Fragment {position} names {name!r} of shape {shape}, but this model has no such trainable "
                    "parameter."
                )
            seen[name] = position
    if missing := [name for name in parameters if name not in seen and name not in at_home]:
        raise FragmentError(
            f"No fragment holds {', '.join(missing)}, so these parameters would never be synchronised. Add them to a "
            "fragment, name them in at_home, or freeze them with requires_grad_(False)."
        )


def bind(model: nn.Module, fragment: FragmentLayout) -> list[nn.Parameter]:
    """Return the parameters of ``fragment`` in ``model``, in order."""
    parameters = trainable_parameters(model)
    return [parameters[name] for name in fragment.names]


def flatten(tensors: Sequence[Tensor], out: Tensor, copying: set[torch.device] | None = None) -> Tensor:
    """Copy ``tensors``, of any dtype and device, into ``out``, ``(numel,)`` float32, and return ``out``.

    If ``copying`` is given, the GPUs that may still copy to the host are added to it; otherwise they are waited for.
    """
    start, begun = 0, set[torch.device]() if copying is None else copying
    for shard in map(local_shard, tensors):
        stop = start + shard.numel()
        out[start:stop].view(shard.shape).copy_(shard, non_blocking=shard.is_cuda)
        if shard.is_cuda and not out.is_cuda:
            begun.add(shard.device)
        start = stop
    if copying is None:  # the host must not read a copy in progress, which runs on the stream of its source
        for device in begun:
            torch.cuda.current_stream(device).synchronize()
    return out


def unflatten_(values: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy ``values``, ``(numel,)`` float32, into ``tensors`` in place, in their own dtype and device."""
    start = 0
    for shard in map(local_shard, tensors):
        stop = start + shard.numel()
        shard.copy_(values[start:stop].view(shard.shape))
        start = stop


@contextmanager
def holding(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Set ``parameters`` to ``values`` of the same names inside a ``with`` block and restore them at its end.

    For a DTensor parameter, ``values`` contains this rank's shard. What the parameters held waits in host memory
    (pinned if it is of a GPU, which then does not need room for all of them twice), and is what the block gets.
    """
    shards = {name: local_shard(parameter) for name, parameter in parameters.items()}
    before = {
        name: torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=shard.is_cuda).copy_(shard)
        for name, shard in shards.items()
    }
    try:
        for name, shard in shards.items():
            shard.copy_(values[name])
        yield before
    finally:
        for name, shard in shards.items():
            shard.copy_(before[name])


def _whole_layers(
    sizes: Mapping[str, int], num_fragments: int, strategy: Literal["strided", "sequential"]
) -> list[list[str]]:
    rest, layers = group_layers(sizes)
    outside = [rest] if rest else []
    num_blocks = num_fragments - len(outside)
    if not 1 <= num_blocks <= len(layers):
        works = f"1 to {len(layers) + len(outside)} fragments" if layers else "1 fragment"
        balanced = f'partition(model, num_fragments={num_fragments}, strategy="balanced")'
        raise FragmentError(
            f"A model with {len(layers) or 'no numbered'} layers"
            f"{' and parameters outside them' if outside and layers else ''} can't have {num_fragments} {strategy} "
            f"fragments, which consist of whole layers. Use {works}, or fragments={balanced}, which divides parameters "
            "by size alone."
        )
    blocks = [layers[first::num_blocks] for first in range(num_blocks)]
    if strategy == "sequential":
        in_order = iter(layers)
        blocks = [list(itertools.islice(in_order, len(block))) for block in blocks]  # of the same lengths
    return [*outside, *([name for layer in block for name in layer] for block in blocks)]


def _balanced(sizes: Mapping[str, int], num_fragments: int) -> list[list[str]]:
    if num_fragments > len(sizes):
        raise FragmentError(
            f"A model with {len(sizes)} parameter tensors can't have {num_fragments} balanced fragments. "
            f"Use 1 to {len(sizes)}."
        )
    groups: list[list[str]] = [[] for _ in range(num_fragments)]
    loads = [0] * num_fragments
    # sorted() is stable: tensors of equal size keep the model's order, so all replicas get the same partition
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        lightest = min(range(num_fragments), key=lambda index: (loads[index], len(groups[index])))
        groups[lightest].append(name)
        loads[lightest] += sizes[name]
    return groups


def group_layers(sizes: Mapping[str, int]) -> tuple[list[str], list[list[str]]]:
    """Return the parameters outside the layers and those of each layer, in the order of the layers' numbers.

    The layers are the numbered children of one container; see `layer_container`.

    >>> group_layers({"embedding": 4, "layers.0.w": 2, "layers.1.w": 2, "layers.1.b": 1})
    (['embedding'], [['layers.0.w'], ['layers.1.w', 'layers.1.b']])
    """
    container = layer_container(sizes)
    rest: list[str] = []
    layers: dict[int, list[str]] = {}
    for name in sizes:
        parts, depth = name.split("."), len(container or ())
        number = "".join(parts[depth : depth + 1])
        if container is not None and tuple(parts[:depth]) == container and number.isdigit():
            layers.setdefault(int(number), []).append(name)
        else:
            rest.append(name)
    return rest, [layers[number] for number in sorted(layers)]


def layer_container(sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the path of the module that contains the layers, such as ``("model", "layers")``.

    The candidates are all prefixes followed by a number, such as ``model.layers`` in ``model.layers.3.mlp.weight``.
    Candidates inside a container with similar children (the experts of a layer), or inside an only child, do not count.
    Children are similar if two of them have a parameter of equal name and size. A container with similar children is
    preferred to one without, such as an embedding and a decoder in sequence, or the norm and the matrix of a head.
    Among the remaining candidates the one with the most values wins, and among equals the outermost.

    It is None if no module is numbered.

    >>> layer_container({"head.0.w": 9, "head.1.w": 900, "blocks.0.w": 4, "blocks.1.w": 4})
    ('blocks',)
    """
    # prefix -> the number, the name below it and the size of each parameter
    inside: dict[tuple[str, ...], list[tuple[str, str, int]]] = {}
    for name, size in sizes.items():
        parts = name.split(".")
        for position, part in enumerate(parts):
            if part.isdigit():
                inside.setdefault(tuple(parts[:position]), []).append((part, ".".join(parts[position + 1 :]), size))
    alike = {prefix: len({each[1:] for each in below}) < len(below) for prefix, below in inside.items()}
    closed = set[tuple[str, ...]]()
    for prefix, below in inside.items():
        children = {number for number, *_ in below}
        if alike[prefix] or len(children) == 1:
            closed.add(prefix)
    outermost = []
    for prefix in inside:
        around = {prefix[:length] for length in range(len(prefix))}
        if around.isdisjoint(closed):
            outermost.append(prefix)
    totals = {prefix: sum(size for *_, size in inside[prefix]) for prefix in outermost}
    return max(outermost, key=lambda prefix: (alike[prefix], totals[prefix], -len(prefix)), default=None)
