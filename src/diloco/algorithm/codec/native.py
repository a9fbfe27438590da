"""Loads the compiled kernels of codecs and of the digest in ``_kernels.c``.

They are built when the package is installed if there is a C compiler. Without them, or if a codec has none, the same
arithmetic runs as torch operations and gives the same bytes. Each call uses one thread; ctypes releases the GIL during
the call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco.errors import ConfigurationError

_VERSION = 3  # must equal KERNELS_VERSION of _kernels.c

_ADDRESS, _COUNT, _WEIGHT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

BLOCKWISE = {
    "encode": (_ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS),  # values, numel, block size, scales, codes
    "decode": (_ADDRESS, _ADDRESS, _COUNT, _COUNT, _ADDRESS),  # scales, codes, numel, block size, out
    "accumulate": (_ADDRESS, _ADDRESS, _COUNT, _COUNT, _WEIGHT, _ADDRESS),
}
SPARSE = {
    "encode": (_ADDRESS, _COUNT, _ADDRESS),  # values, numel, payload
    "accumulate": (_ADDRESS, _COUNT, _WEIGHT, _ADDRESS),  # payload, numel, weight, out
}
FLOAT32 = {
    "accumulate": (_ADDRESS, _COUNT, _WEIGHT, _ADDRESS),  # payload, numel, weight, out
    "largest": (_ADDRESS, _COUNT, _ADDRESS),  # values, numel, their largest magnitude
}
DIGEST = {"sums": (_ADDRESS, _COUNT, _ADDRESS, _COUNT, _ADDRESS)}  # lanes, their number, keys, block size, sums
"""The functions of a codec and the types of their arguments. Codecs check that tensors fit and are on the CPU."""


def load(
    codec: str, functions: Mapping[str, tuple[Any, ...]], implementation: str | None
) -> Mapping[str, Callable[..., None]] | None:
    """Return name -> compiled function of a codec, or of the digest, or None to compute with torch operations.

    ``implementation`` is ``"torch"``, ``"native"``, or None: native if it was built.
    """
    if implementation not in (None, "torch", "native"):
        raise ConfigurationError(f"{codec}: implementation must be 'torch' or 'native', got {implementation!r}.")
    library, reason = (None, "") if implementation == "torch" else _load_library()
    if library is not None and not all(hasattr(library, f"diloco_{codec}_{name}") for name in functions):
        library, reason = None, f"_kernels.c has no functions of {codec}"
    if library is None:
        if implementation == "native":
            raise ConfigurationError(
                f"{codec}: the native implementation is not available ({reason}). Use implementation='torch'."
            )
        return None
    compiled = {name: library[f"diloco_{codec}_{name}"] for name in functions}
    for name, function in compiled.items():
        function.argtypes, function.restype = functions[name], None
    return compiled


@functools.cache
def _load_library() -> tuple[ctypes.CDLL | None, str]:
    """Return the compiled library and "", or None and why it is not available."""
    if sys.byteorder != "little":
        return None, "the kernels write little-endian scales and this machine is big-endian"
    folder = Path(__file__).parent
    paths = [folder / f"_kernels{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None, f"{folder} has no compiled _kernels: there was no C compiler when the package was installed"
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.diloco_kernels_version())
    except (OSError, AttributeError) as error:
        return None, f"{path} could not be loaded: {error}"
    if version != _VERSION:
        return None, f"{path} has version {version} but this package needs {_VERSION}: reinstall the package"
    return library, ""
