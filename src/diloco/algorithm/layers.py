"""Reading a model's structure from its parameter names alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from diloco.errors import FragmentError

__all__ = ["group_layers", "layer_container", "match_patterns"]


def group_layers(sizes: Mapping[str, int]) -> tuple[list[str], list[list[str]]]:
    """Parameters outside the layers, and the parameters of each layer, in the order of the layers' numbers.

    The layers are the numbered children of one container; see `layer_container`.

    Args:
        sizes: parameter name -> number of values.

    >>> group_layers({"embedding": 4, "layers.0.w": 2, "layers.1.w": 2, "layers.1.b": 1})
    (['embedding'], [['layers.0.w'], ['layers.1.w', 'layers.1.b']])
    """
    container = layer_container(sizes)
    if container is None:
        return list(sizes), []
    rest: list[str] = []
    layers: dict[int, list[str]] = {}
    for name in sizes:
        parts = tuple(name.split("."))
        depth = len(container)
        if parts[:depth] == container and len(parts) > depth and parts[depth].isdigit():
            layers.setdefault(int(parts[depth]), []).append(name)
        else:
            rest.append(name)
    return rest, [layers[number] for number in sorted(layers)]


def layer_container(sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The path of what holds the layers, such as ``("model", "layers")``; None: nothing is numbered.

    Of all prefixes followed by a number (``model.layers`` in ``model.layers.3.mlp.weight``), it is the one that holds
    the most values, the outermost of equals; but one whose children have a parameter in common, of equal name and size,
    comes before one whose children don't, as an embedding and a decoder in sequence, or the norm and the matrix of a
    head. What is inside such a container (the experts of a layer), or inside an only child, is none.

    Args:
        sizes: parameter name -> number of values.

    >>> layer_container({"head.0.w": 9, "head.1.w": 900, "blocks.0.w": 4, "blocks.1.w": 4})
    ('blocks',)
    """
    children: dict[tuple[str, ...], dict[str, dict[str, int]]] = {}
    for name, size in sizes.items():
        parts = tuple(name.split("."))
        for position, part in enumerate(parts):
            if part.isdigit():
                inside = children.setdefault(parts[:position], {}).setdefault(part, {})
                inside[".".join(parts[position + 1 :])] = size
    alike = {prefix: _have_something_in_common(list(numbered.values())) for prefix, numbered in children.items()}
    closed = [prefix for prefix, numbered in children.items() if alike[prefix] or len(numbered) == 1]
    outermost = [
        prefix
        for prefix in children
        if not any(len(other) < len(prefix) and prefix[: len(other)] == other for other in closed)
    ]
    totals = {prefix: sum(sum(child.values()) for child in children[prefix].values()) for prefix in outermost}
    return max(outermost, key=lambda prefix: (alike[prefix], totals[prefix], -len(prefix)), default=None)


def _have_something_in_common(children: Sequence[Mapping[str, int]]) -> bool:
    """Whether two of them have a parameter of equal name and size."""
    parameters = [parameter for child in children for parameter in child.items()]
    return len(set(parameters)) < len(parameters)


def match_patterns(aliases: Mapping[str, Sequence[str]], patterns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Group names by the list of shell-style patterns that they match.

    Args:
        aliases: name of a parameter -> all its names (tied weights have several); a pattern may match any of them.
        patterns: for each fragment, its patterns.

    Raises:
        FragmentError: if a name matches the patterns of two fragments or of none, or a pattern matches nothing.

    >>> match_patterns({"a.w": ["a.w"], "b.w": ["b.w"]}, [["b.*"], ["a.*"]])
    [['b.w'], ['a.w']]
    """
    groups: list[list[str]] = [[] for _ in patterns]
    for name, names in aliases.items():
        hits = [
            index
            for index, group in enumerate(patterns)
            if any(fnmatchcase(alias, pattern) for pattern in group for alias in names)
        ]
        if len(hits) != 1:
            where = f"the patterns of fragments {hits}" if hits else "no pattern of any fragment"
            raise FragmentError(f"the parameter {name!r} matches {where}, not exactly one.")
        groups[hits[0]].append(name)
    every = [alias for names in aliases.values() for alias in names]
    for index, group in enumerate(patterns):
        for pattern in group:
            if not any(fnmatchcase(alias, pattern) for alias in every):
                raise FragmentError(f"the pattern {pattern!r} of fragment {index} matches no trainable parameter.")
    return groups
