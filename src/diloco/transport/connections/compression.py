"""Lossless compression of parts of payloads, with Zstandard.

Codecs use a fixed number of bits per value, but their codes are not equally frequent. The entropy coder of Zstandard,
at its fastest level that has one, saves 10 to 15 % of fp4 and 5 % of int8. Values are not changed.
"""

from __future__ import annotations

import zstandard

from diloco.errors import TransportError

__all__ = ["compress", "decompress"]

_LEVEL = 1
_WORTH = 0.98  # compressed parts that are larger than this share of the part are not sent


def compress(data: memoryview) -> memoryview | bytes:
    """Return ``data`` compressed, or ``data`` itself if that saves less than 2 %.

    >>> len(compress(memoryview(bytes(1000)))) < 100
    True
    """
    found = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    return found if len(found) <= _WORTH * len(data) else data


def decompress(data: memoryview, most_bytes: int) -> bytes:
    """Return what `compress` was given. No more than ``most_bytes`` are allocated.

    Raises:
        TransportError: ``data`` is not one complete frame of a known size, or its content is empty or larger.

    >>> decompress(memoryview(compress(memoryview(bytes(1000)))), 1000) == bytes(1000)
    True
    """
    try:
        size = zstandard.frame_content_size(data)
        if not 0 < size <= most_bytes:
            raise TransportError(f"a compressed part of {size} bytes arrived where 1 to {most_bytes} were expected")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise TransportError(f"a compressed part can't be decompressed: {error}") from error
