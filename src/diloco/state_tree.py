"""Nested state as JSON and named tensors, for files and messages. There is no pickle, so reading runs no code.

A tree consists of None, bool, int, float, str, list, tuple, dict and `torch.Tensor`; keys are text, numbers or None.
In the JSON, plain values and lists stand for themselves. Everything else is an object with one tag: ``tuple``, ``dict``
(a list of pairs if not all keys are text), ``tensor`` (its name) or ``float`` (infinities and NaN, which JSON lacks).
Devices, strides and shared memory are not preserved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from diloco.errors import CheckpointError, DiLoCoError

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""The supported dtypes and their names in the safetensors format."""

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError)
"""What a state raises that lacks values, or holds others than its reader expects."""

_KEYS = (str, int, float, bool, type(None))


def flatten(tree: Any) -> tuple[JSON, dict[str, torch.Tensor]]:
    """Return the skeleton of a tree and its tensors by name, which are not copied.

    >>> skeleton, tensors = flatten({"optimizer": {0: (torch.ones(2), 0.9)}})
    >>> skeleton
    {'dict': {'optimizer': {'dict': [[0, {'tuple': [{'tensor': 'optimizer.0.0'}, 0.9]}]]}}}
    >>> tensors
    {'optimizer.0.0': tensor([1., 1.])}

    Raises:
        CheckpointError: if a value can't be represented. The message contains its path inside the tree.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(tree, "", tensors), tensors


def unflatten(skeleton: JSON, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree that `flatten` converted. It contains the tensors of ``tensors`` themselves, not copies.

    >>> unflatten({"tuple": [1, {"float": "-inf"}, {"dict": [[0, None]]}]}, {})
    (1, -inf, {0: None})

    Raises:
        CheckpointError: if the skeleton is malformed or does not belong to ``tensors``.
    """
    unused = set(tensors)
    try:
        tree = _decode(skeleton, tensors, unused)
        if unused:
            raise ValueError(f"it does not name the tensors {', '.join(sorted(unused)[:5])}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"The saved state is malformed: {error!r}. Nothing was loaded.") from error
    return tree


@contextmanager
def readable_state(what: str) -> Iterator[None]:
    """Turn `UNREADABLE` into a `CheckpointError`, except for errors that this package raises on purpose."""
    try:
        yield
    except DiLoCoError:
        raise
    except UNREADABLE as error:
        raise CheckpointError(
            f"{what} is not what this version saves ({type(error).__name__}: {error}). Load one that it has saved."
        ) from error


# Not closures: a function that refers to itself would keep the tensors until Python collects garbage.
def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> JSON:
    kind = type(value)  # compared exactly, because a subclass would be restored as its parent class
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value  # type: ignore[no-any-return]  # narrowed by `kind`, which mypy does not follow
    if kind is float:
        return {"float": str(value)}
    if kind in (list, tuple):
        items: list[JSON] = [_encode(item, f"{path}.{number}", tensors) for number, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, dict) and all(type(key) in _KEYS for key in value):
        pairs: list[list[JSON]] = [[key, _encode(item, f"{path}.{key}", tensors)] for key, item in value.items()]
        return {"dict": dict(pairs) if all(type(key) is str for key in value) else pairs}  # type: ignore[arg-type,dict-item]  # pairs of a text and a value
    plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta
    if plain and value.dtype in DTYPE_NAMES and not value.requires_grad:
        name = path.removeprefix(".") or "value"
        while name in tensors or name == "__metadata__":  # which safetensors reserves
            name += "~"
        tensors[name] = value
        return {"tensor": name}
    what = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, torch.Tensor):
        what += f" of {value.dtype}, {value.layout}{', which requires a gradient' if value.requires_grad else ''}"
    raise CheckpointError(
        f"{path.removeprefix('.')!r} in the state is a {what}, which can't be saved. Use plain values and detached "
        "tensors. Nothing was saved."
    )


def _decode(node: JSON, tensors: Mapping[str, torch.Tensor], unused: set[str]) -> Any:
    match node:
        case list():
            return [_decode(item, tensors, unused) for item in node]
        case {"tuple": list(items), **rest} if not rest:
            return tuple(_decode(item, tensors, unused) for item in items)
        case {"dict": dict(items), **rest} if not rest:
            return {key: _decode(item, tensors, unused) for key, item in items.items()}
        case {"dict": list(items), **rest} if not rest:
            pairs = [pair for pair in items if isinstance(pair, list)]
            if len(pairs) < len(items):
                raise ValueError(f"{node!r:.100} does not consist of pairs")
            return {key: _decode(item, tensors, unused) for key, item in pairs}
        case {"tensor": str(name), **rest} if not rest:
            unused.discard(name)
            return tensors[name]
        case {"float": "inf" | "-inf" | "nan" as text, **rest} if not rest:
            return float(text)
        case dict():
            raise ValueError(f"{node!r:.100} is not part of the format")
    return node
