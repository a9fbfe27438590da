"""Codecs: what turns a pseudo-gradient into bytes and back.

>>> codec = make_codec("fp4", block_size=64)
>>> codec.payload_bytes(1000)
516
"""

from __future__ import annotations

import inspect
from typing import Any

from diloco.algorithm.codec.base import Codec, codec_class, codec_names, register
from diloco.algorithm.codec.casts import BFloat16, Float16, Float32
from diloco.algorithm.codec.fp4 import FP4
from diloco.algorithm.codec.integers import Int2, Int8
from diloco.algorithm.codec.topk2 import TopK2
from diloco.errors import ConfigurationError, nearest
from diloco.plugins import call, is_own

__all__ = [
    "FP4",
    "BFloat16",
    "Codec",
    "Float16",
    "Float32",
    "Int2",
    "Int8",
    "TopK2",
    "codec_names",
    "make_codec",
    "register",
]


def make_codec(name: str, **parameters: Any) -> Codec:
    """The codec registered as ``name``, or of the class that it names as ``module:Class`` or ``file.py:Class``.

    Block-wise codecs run the compiled kernels on CPU tensors where they were built; `Codec.implementation` says so.

    Args:
        name: float32, float16, bfloat16, int8, fp4, int2, topk2, or what `register` was given.
        parameters: the codec's own: ``block_size`` for int8, fp4 and int2, none for the others.

    Raises:
        ConfigurationError: naming the nearest known codec or parameter, or the values that it takes.

    >>> make_codec("int9")
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: there is no codec 'int9'; did you mean 'int8'?
    >>> make_codec("int8", blocksize=64)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: codec 'int8' has no parameter 'blocksize'; did you mean 'block_size'?
    """
    if is_own(name):
        own: Codec = call("codec.name", name, arguments=parameters)
        return own
    codec = codec_class(name)
    for parameter in parameters:
        taken = inspect.signature(codec).parameters.values()
        known = [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
        if parameter not in known:
            hint = nearest(parameter, known) if known else "it has none."
            raise ConfigurationError(f"codec {name!r} has no parameter {parameter!r}; {hint}")
    return codec(**parameters)
