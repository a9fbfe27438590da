"""Loads and calls the compiled codec kernels in ``_kernels.c``.

They are built when the package is installed if there is a C compiler. Without them the codecs run the same arithmetic
as torch operations and give the same bytes. Each call uses one thread; ctypes releases the GIL during the call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import sys
from pathlib import Path

from torch import Tensor

__all__ = [
    "VERSION",
    "Kernels",
    "SparseKernels",
    "available",
    "load",
    "load_library",
    "load_sparse",
    "unavailable_reason",
]

VERSION = 2  # must equal KERNELS_VERSION of _kernels.c

_ADDRESS = ctypes.c_void_p
_COUNT = ctypes.c_int64


class Kernels:
    """The functions of one block-wise codec.

    All tensors must be contiguous, on the CPU and of the right size, which the codec checks. ``values`` and ``out`` are
    float32; ``payload`` is uint8 with the scales of all blocks before the codes.
    """

    def __init__(self, library: ctypes.CDLL, codec: str, scale_bytes: int) -> None:
        self._scale_bytes = scale_bytes
        self._encode = library[f"diloco_{codec}_encode"]
        self._encode.argtypes = (_ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS)
        self._decode = library[f"diloco_{codec}_decode"]
        self._decode.argtypes = (_ADDRESS, _ADDRESS, _COUNT, _COUNT, _ADDRESS)
        self._accumulate = library[f"diloco_{codec}_accumulate"]
        self._accumulate.argtypes = (_ADDRESS, _ADDRESS, _COUNT, _COUNT, ctypes.c_float, _ADDRESS)
        for function in (self._encode, self._decode, self._accumulate):
            function.restype = None

    def encode(self, values: Tensor, block_size: int, payload: Tensor) -> None:
        """Write the payload of ``values``."""
        scales, codes = self._parts(payload, values.numel(), block_size)
        self._encode(values.data_ptr(), values.numel(), block_size, scales, codes)

    def decode(self, payload: Tensor, block_size: int, out: Tensor) -> None:
        """Write the values of ``payload``."""
        scales, codes = self._parts(payload, out.numel(), block_size)
        self._decode(scales, codes, out.numel(), block_size, out.data_ptr())

    def accumulate(self, payload: Tensor, block_size: int, weight: float, out: Tensor) -> None:
        """Add ``weight`` times the values of ``payload``."""
        scales, codes = self._parts(payload, out.numel(), block_size)
        self._accumulate(scales, codes, out.numel(), block_size, weight, out.data_ptr())

    def _parts(self, payload: Tensor, numel: int, block_size: int) -> tuple[int, int]:
        scales = payload.data_ptr()
        return scales, scales + -(-numel // block_size) * self._scale_bytes


class SparseKernels:
    """The functions of a codec whose payload is a sequence of records. Requires the same of tensors as `Kernels`."""

    def __init__(self, library: ctypes.CDLL, codec: str) -> None:
        self._encode = library[f"diloco_{codec}_encode"]
        self._encode.argtypes = (_ADDRESS, _COUNT, _ADDRESS)
        self._accumulate = library[f"diloco_{codec}_accumulate"]
        self._accumulate.argtypes = (_ADDRESS, _COUNT, ctypes.c_float, _ADDRESS)
        for function in (self._encode, self._accumulate):
            function.restype = None

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Write the payload of ``values``."""
        self._encode(values.data_ptr(), values.numel(), payload.data_ptr())

    def accumulate(self, payload: Tensor, weight: float, out: Tensor) -> None:
        """Add ``weight`` times the values of ``payload``."""
        self._accumulate(payload.data_ptr(), out.numel(), weight, out.data_ptr())


def available() -> bool:
    """Return whether the kernels were built and could be loaded."""
    return load_library()[0] is not None


def unavailable_reason() -> str | None:
    """Return why the kernels are not available, or None if they are."""
    return load_library()[1]


def load(codec: str, scale_bytes: int) -> Kernels | None:
    """Return the kernels of ``codec``, or None if they are not available."""
    library, _ = load_library()
    return None if library is None else Kernels(library, codec, scale_bytes)


def load_sparse(codec: str) -> SparseKernels | None:
    """Return the kernels of a sparse codec, or None if they are not available."""
    library, _ = load_library()
    return None if library is None else SparseKernels(library, codec)


@functools.cache
def load_library() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the compiled library and None, or None and why it is not available."""
    if sys.byteorder != "little":
        return None, "the kernels write little-endian scales and this machine is big-endian"
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_kernels{suffix}"
        if path.exists():
            break
    else:
        return None, f"{folder} has no compiled _kernels: there was no C compiler when the package was installed"
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.diloco_kernels_version())
    except (OSError, AttributeError) as error:
        return None, f"{path} could not be loaded: {error}"
    if version != VERSION:
        return None, f"{path} has version {version} but this package needs {VERSION}: reinstall the package"
    return library, None
