"""Control messages on the wire: a small JSON object and a blob, both with their sizes in front. No pickle.

::

    4 bytes  b"DLC1"      protocol and its version
    4 bytes  json size    big-endian; at most `MAX_JSON_BYTES`
    8 bytes  blob size    big-endian; at most `MAX_BLOB_BYTES`
    json, blob

Sizes are checked before anything is allocated.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

from diloco.errors import TransportError

__all__ = ["MAX_BLOB_BYTES", "MAX_JSON_BYTES", "PROTOCOL", "pack", "read_frame", "unpack_head"]

PROTOCOL = b"DLC1"
MAX_JSON_BYTES = 1 << 20
MAX_BLOB_BYTES = 1 << 24

_HEAD = struct.Struct(">4sIQ")


def pack(message: Mapping[str, Any], blob: bytes | memoryview = b"") -> bytes:
    """One frame.

    Raises:
        TransportError: if it is larger than a reader takes. Nothing was sent.

    >>> head = pack({"kind": "beat"})[:16]
    >>> unpack_head(head)
    (15, 0)
    """
    text = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_JSON_BYTES or len(blob) > MAX_BLOB_BYTES:
        raise TransportError(
            f"a control message of {len(text)} + {len(blob)} bytes was to be sent; {MAX_JSON_BYTES} + "
            f"{MAX_BLOB_BYTES} would work. Nothing was sent."
        )
    return b"".join((_HEAD.pack(PROTOCOL, len(text), len(blob)), text, blob))


def unpack_head(head: bytes) -> tuple[int, int]:
    """Sizes of the JSON text and the blob that follow.

    Raises:
        TransportError: if the sender speaks another protocol, or announces more than is taken.
    """
    protocol, json_bytes, blob_bytes = _HEAD.unpack(head)
    if protocol != PROTOCOL:
        raise TransportError(
            f"something that begins with {protocol!r} came in where {PROTOCOL!r} was due; the sender is no diloco of "
            "this protocol version. The connection was closed."
        )
    if json_bytes > MAX_JSON_BYTES or blob_bytes > MAX_BLOB_BYTES:
        raise TransportError(
            f"a message of {json_bytes} + {blob_bytes} bytes was announced; {MAX_JSON_BYTES} + {MAX_BLOB_BYTES} are "
            "taken. The connection was closed."
        )
    return json_bytes, blob_bytes


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """The next message and its blob.

    Raises:
        TransportError: for anything malformed.
        asyncio.IncompleteReadError, OSError: when the connection ends.
    """
    json_bytes, blob_bytes = unpack_head(await reader.readexactly(_HEAD.size))
    text = await reader.readexactly(json_bytes)
    blob = await reader.readexactly(blob_bytes) if blob_bytes else b""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a message that is no JSON came in ({error}). The connection was closed.") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise TransportError(f"a message without a kind came in: {text[:80]!r}. The connection was closed.")
    return message, blob
