"""Lossless conversion of nested state to a JSON skeleton and named tensors. It uses no pickle, so reading runs no code.

Checkpoints, state transfer and the ranks of one replica use it. A tree consists of None, bool, int, float, str, bytes,
list, tuple, dict, OrderedDict, `torch.Tensor` and `numpy.ndarray`. Keys consist of the first six types and tuples of
them. In the skeleton, None, bool, int, finite floats, str and lists represent themselves. Everything else is an object
with one tag:

========================= =======================================================================
``{"tuple": [...]}``      a tuple
``{"dict": {...}}``       a dict whose keys are all str; with other keys ``{"dict": [[key, value], ...]}``
``{"ordered": ...}``      an OrderedDict, likewise
``{"tensor": name}``      a tensor; two at the same place in memory share a name and become one
``{"complex": name}``     a complex tensor, saved as real numbers with a last dimension of 2
``{"array": name}``       a NumPy array, ``{"complex_array": name}`` a complex one
``{"bytes": base64}``
``{"float": "inf"}``      infinities and NaN, which JSON lacks
``{"int": "0x..."}``      an integer beyond 64 bits
========================= =======================================================================

Not preserved: devices, strides, shared lists and dictionaries, and tensors that overlap only in part.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from diloco.errors import CheckpointError

__all__ = ["DTYPE_NAMES", "JSON", "flatten", "unflatten"]

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

_RESERVED_NAME = "__metadata__"  # reserved by the safetensors format

_Path: TypeAlias = tuple[str, ...]


def flatten(tree: Any) -> tuple[JSON, dict[str, torch.Tensor]]:
    """Return the skeleton of a tree and its tensors by name. Tensors are copied only if they can't be used as they are.

    >>> skeleton, tensors = flatten({"optimizer": {0: (torch.ones(2), 0.9)}})
    >>> skeleton
    {'dict': {'optimizer': {'dict': [[0, {'tuple': [{'tensor': 'optimizer.0.0'}, 0.9]}]]}}}
    >>> tensors
    {'optimizer.0.0': tensor([1., 1.])}

    Raises:
        CheckpointError: if a value can't be represented exactly. The message contains its path inside the tree.
    """
    encoder = _Encoder()
    try:
        return encoder.encode(tree, ()), encoder.tensors
    except RecursionError as error:
        raise CheckpointError("The state is nested too deeply to be saved. Nothing was saved.") from error


def unflatten(skeleton: JSON, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree that `flatten` converted. It contains the tensors of ``tensors`` themselves, not copies.

    >>> unflatten({"tuple": [1, {"float": "-inf"}, {"dict": [[0, None]]}]}, {})
    (1, -inf, {0: None})

    Raises:
        CheckpointError: if the skeleton is malformed or does not belong to ``tensors``.
    """
    decoder = _Decoder(tensors)
    try:
        tree = decoder.decode(skeleton, ())
    except RecursionError as error:
        raise CheckpointError("The saved state is nested too deeply to be read. Nothing was loaded.") from error
    if left_over := sorted(tensors.keys() - decoder.used):
        raise CheckpointError(f"The skeleton does not name the saved tensors {_some(left_over)}. Nothing was loaded.")
    return tree


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[object, str] = {}  # place in memory -> name
        self._entered: set[int] = set()  # the containers around the current value

    def encode(self, value: Any, path: _Path) -> JSON:
        # types are compared exactly, because a subclass would be restored as its parent class
        kind = type(value)
        if value is None or kind is bool:
            return value  # type: ignore[no-any-return]  # narrowed by `kind`, which mypy does not follow
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is str:
            return _checked_text(value, path)
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is torch.Tensor:
            return self._tensor(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        if kind in (list, tuple, dict, OrderedDict):
            if id(value) in self._entered:
                raise _refused(path, "contains itself")
            self._entered.add(id(value))
            encoded = self._container(value, path)
            self._entered.remove(id(value))
            return encoded
        hint = "a plain tensor, such as from .detach()" if isinstance(value, torch.Tensor) else "a plain value"
        raise _refused(path, f"is a {kind.__module__}.{kind.__qualname__}, which can't be saved; use {hint}")

    def _container(self, value: Any, path: _Path) -> JSON:
        if isinstance(value, dict):
            tag = "dict" if type(value) is dict else "ordered"
            if all(type(key) is str for key in value):
                return {tag: {_checked_text(key, path): self.encode(item, (*path, key)) for key, item in value.items()}}
            return {tag: [[self._key(key, path), self.encode(item, (*path, str(key)))] for key, item in value.items()]}
        items: list[JSON] = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}

    def _key(self, key: Any, path: _Path) -> JSON:
        if type(key) is tuple:
            return {"tuple": [self._key(item, path) for item in key]}
        if key is None or type(key) in (bool, int, float, str, bytes):
            return self.encode(key, path)
        raise _refused(path, f"has the key {key!r:.100}; keys must be text, numbers or tuples of them")

    def _tensor(self, tensor: torch.Tensor, path: _Path) -> JSON:
        if tensor.requires_grad:
            raise _refused(path, "requires a gradient, which can't be saved; use .detach()")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
            raise _refused(
                path, f"is a {tensor.layout} tensor on {tensor.device}; only dense tensors with data can be saved"
            )
        if tensor.is_complex():
            return {"complex": self._name(torch.view_as_real(tensor.resolve_conj()), path)}
        return {"tensor": self._name(tensor, path)}

    def _array(self, array: Any, path: _Path) -> JSON:
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = np.array(array, order="C")  # torch supports neither
        try:
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise _refused(path, f"is a NumPy array of {array.dtype}; only native number types can be saved") from error
        if tensor.is_complex():
            return {"complex_array": self._name(torch.view_as_real(tensor), path)}
        return {"array": self._name(tensor, path)}

    def _name(self, tensor: torch.Tensor, path: _Path) -> str:
        if tensor.dtype not in DTYPE_NAMES:
            raise _refused(path, f"is {tensor.dtype}, which can't be saved; use one of {_some(map(str, DTYPE_NAMES))}")
        # `self.tensors` keeps the tensors alive, so no address or id is reused meanwhile
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg())
        where: object = place if tensor.numel() else id(tensor)
        if where not in self._names:
            name = base = ".".join(path) or "value"
            count = 1
            while name in self.tensors or name == _RESERVED_NAME:
                count += 1
                name = f"{base}~{count}"
            self._names[where] = name
            self.tensors[name] = tensor
        return self._names[where]


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.used: set[str] = set()

    def decode(self, node: JSON, path: _Path) -> Any:
        if isinstance(node, list):
            return self._items(node, path)
        if not isinstance(node, dict):
            return node
        if len(node) != 1:
            raise _malformed(path, f"has {len(node)} tags ({_some(node)}) instead of one")
        try:
            return self._tagged(node, path)
        except (ValueError, TypeError, RuntimeError) as error:
            raise _malformed(path, f"can't be read: {error}") from error

    def _tagged(self, node: dict[str, JSON], path: _Path) -> Any:
        match node:
            case {"tuple": list(items)}:
                return tuple(self._items(items, path))
            case {"dict": dict() | list() as items}:
                return self._pairs(items, path)
            case {"ordered": dict() | list() as items}:
                return OrderedDict(self._pairs(items, path))
            case {"tensor": str(name)}:
                return self._named(name, path)
            case {"complex": str(name)}:
                return torch.view_as_complex(self._named(name, path))
            case {"array": str(name)}:
                return self._named(name, path).cpu().numpy()
            case {"complex_array": str(name)}:
                return torch.view_as_complex(self._named(name, path)).cpu().numpy()
            case {"bytes": str(text)}:
                return base64.b64decode(text, validate=True)
            case {"float": "inf" | "-inf" | "nan" as text}:
                return float(text)
            case {"int": str(text)}:
                return int(text, 16)
        raise _malformed(path, f"is {node!r:.100}, which is not part of the format")

    def _items(self, items: list[JSON], path: _Path) -> list[Any]:
        return [self.decode(item, (*path, str(index))) for index, item in enumerate(items)]

    def _pairs(self, items: dict[str, JSON] | list[JSON], path: _Path) -> dict[Any, Any]:
        if isinstance(items, dict):
            return {key: self.decode(item, (*path, key)) for key, item in items.items()}
        pairs = {}
        for pair in items:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _malformed(path, f"has {pair!r:.100} instead of a key and its value")
            key = self.decode(pair[0], path)
            pairs[key] = self.decode(pair[1], (*path, str(key)))
        return pairs

    def _named(self, name: str, path: _Path) -> torch.Tensor:
        if name not in self.tensors:
            raise _malformed(path, f"is the tensor {name!r}, which is missing")
        self.used.add(name)
        return self.tensors[name]


def _checked_text(text: str, path: _Path) -> str:
    # half a surrogate pair is not valid Unicode: two halves would be restored as one character
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refused(path, f"has the text {text!r:.100}, which isn't valid Unicode; use bytes") from error
    return text


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _where(path: _Path) -> str:
    return f"{'.'.join(path)!r} in the state" if path else "The state"


def _refused(path: _Path, why: str) -> CheckpointError:
    return CheckpointError(f"{_where(path)} {why}. Nothing was saved.")


def _malformed(path: _Path, why: str) -> CheckpointError:
    return CheckpointError(f"{_where(path)} {why}. Nothing was loaded.")
