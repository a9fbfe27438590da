"""Functions that derive the layers of a model from its parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from diloco.errors import FragmentError

__all__ = ["group_layers", "layer_container", "match_patterns"]


def group_layers(sizes: Mapping[str, int]) -> tuple[list[str], list[list[str]]]:
    """Return the parameters outside the layers and those of each layer, in the order of the layers' numbers.

    The layers are the numbered children of one container; see `layer_container`.

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
    """Return whether two children have a parameter of equal name and size."""
    parameters = [parameter for child in children for parameter in child.items()]
    return len(set(parameters)) < len(parameters)


def match_patterns(aliases: Mapping[str, Sequence[str]], patterns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Group parameter names by the list of shell-style patterns that they match.

    Args:
        aliases: Parameter name -> all its names (tied weights have several). A pattern may match any of them.
        patterns: The patterns of each fragment.

    Raises:
        FragmentError: if a name matches the patterns of no fragment or of several, or a pattern matches no name.

    >>> match_patterns({"a.w": ["a.w"], "b.w": ["b.w"]}, [["b.*"], ["a.*"]])
    [['b.w'], ['a.w']]
    """
    listed = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not listed or any(isinstance(group, str) or not isinstance(group, Sequence) for group in patterns):
        raise FragmentError(
            "patterns must be a list of patterns for each fragment, such as [['layers.0.*'], ['layers.1.*', 'head.*']],"
            f" got {patterns!r}."
        )
    groups: list[list[str]] = [[] for _ in patterns]
    for name, names in aliases.items():
        hits = [
            index
            for index, group in enumerate(patterns)
            if any(fnmatchcase(alias, pattern) for pattern in group for alias in names)
        ]
        if len(hits) != 1:
            where = f"the patterns of fragments {hits}" if hits else "no pattern of any fragment"
            raise FragmentError(f"The parameter {name!r} matches {where}; it must match those of exactly one fragment.")
        groups[hits[0]].append(name)
    every = [alias for names in aliases.values() for alias in names]
    for index, group in enumerate(patterns):
        for pattern in group:
            if not any(fnmatchcase(alias, pattern) for alias in every):
                raise FragmentError(f"The pattern {pattern!r} of fragment {index} matches no trainable parameter.")
    return groups
