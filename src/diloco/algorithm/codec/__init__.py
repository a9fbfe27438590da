"""Codecs, which encode pseudo-gradients as bytes and decode them.

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
from diloco.algorithm.codec.integers import Int8
from diloco.algorithm.codec.topk2 import TopK2
from diloco.algorithm.numbers import check_type
from diloco.errors import ConfigurationError, nearest
from diloco.plugins import call, is_own

__all__ = [
    "FP4",
    "BFloat16",
    "Codec",
    "Float16",
    "Float32",
    "Int8",
    "TopK2",
    "codec_names",
    "make_codec",
    "register",
]


def make_codec(name: str, **parameters: Any) -> Codec:
    """Make the codec registered as ``name``, or one of your own named as ``module:Class`` or ``file.py:Class``.

    Block-wise codecs and topk2 use the compiled kernels for CPU tensors if these were built; see
    `Codec.implementation`.

    Args:
        name: float32, float16, bfloat16, int8, fp4, topk2, or a name added with `register`.
        parameters: The parameters of the codec: ``block_size`` for int8 and fp4, none for the others.

    Raises:
        ConfigurationError: if a name or value is invalid. The message gives the nearest known name or the valid values.

    >>> make_codec("int9")
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: There is no codec 'int9'; did you mean 'int8'?
    >>> make_codec("int8", blocksize=64)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: The codec 'int8' has no parameter 'blocksize'; did you mean 'block_size'?
    """
    check_type("a codec's name", name, str, "a text such as 'fp4'")
    if is_own(name):
        own: Codec = call("sync.codec", name, kind=Codec, arguments=parameters)
        return own
    codec = codec_class(name)
    for parameter in parameters:
        taken = inspect.signature(codec).parameters.values()
        known = [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
        if parameter not in known:
            hint = nearest(parameter, known) if known else "it has none."
            raise ConfigurationError(f"The codec {name!r} has no parameter {parameter!r}; {hint}")
    return codec(**parameters)
