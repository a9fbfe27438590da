"""The wire format of control messages: they survive a round trip, and malformed ones cost no memory."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import TransportError
from diloco.transport import MAX_BLOB_BYTES, MAX_JSON_BYTES, PROTOCOL, pack, read_frame, unpack_head

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
MESSAGES = st.builds(
    lambda kind, rest: {**rest, "kind": kind}, st.text(max_size=64), st.dictionaries(st.text(), VALUES)
)


def read(*chunks: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """Read the frames of a connection on which ``chunks`` arrive before it ends."""

    async def all_frames() -> list[tuple[dict[str, Any], bytes]]:
        reader = asyncio.StreamReader()
        for chunk in chunks:
            reader.feed_data(chunk)
        reader.feed_eof()
        frames = []
        while not reader.at_eof():
            frames.append(await read_frame(reader, MAX_JSON_BYTES, MAX_BLOB_BYTES))
        return frames

    return asyncio.run(all_frames())


@given(st.lists(st.tuples(MESSAGES, st.binary(max_size=64)), min_size=1, max_size=3))
def test_frames_arrive_one_by_one_as_they_were_sent(frames: list[tuple[dict[str, Any], bytes]]) -> None:
    assert read(*[pack(message, blob) for message, blob in frames]) == frames


@given(MESSAGES, st.binary(max_size=64), st.data())
def test_where_a_stream_is_cut_into_packets_means_nothing(
    message: dict[str, Any], blob: bytes, data: st.DataObject
) -> None:
    whole = pack(message, blob)
    cut = data.draw(st.integers(0, len(whole)))
    assert read(whole[:cut], whole[cut:]) == [(message, blob)]


@given(MESSAGES, st.data())
def test_a_connection_that_ends_inside_a_frame_is_an_end(message: dict[str, Any], data: st.DataObject) -> None:
    whole = pack(message, b"blob")
    with pytest.raises(asyncio.IncompleteReadError):
        read(whole[: data.draw(st.integers(1, len(whole) - 1))])


def test_sizes_up_to_the_limits_are_sent_and_above_are_not() -> None:
    overhead = len(json.dumps({"kind": ""}, separators=(",", ":")))
    assert len(pack({"kind": "k" * (MAX_JSON_BYTES - overhead)})) == 16 + MAX_JSON_BYTES
    with pytest.raises(TransportError, match=rf"{MAX_JSON_BYTES + 1} \+ 0 bytes exceeds.*Nothing was sent"):
        pack({"kind": "k" * (MAX_JSON_BYTES - overhead + 1)})
    blob = bytes(MAX_BLOB_BYTES + 1)
    assert unpack_head(pack({"kind": ""}, memoryview(blob)[1:])[:16]) == (overhead, MAX_BLOB_BYTES)
    with pytest.raises(TransportError, match=rf"\+ {MAX_BLOB_BYTES + 1} bytes exceeds"):
        pack({"kind": ""}, blob)


@pytest.mark.parametrize(
    ("json_bytes", "blob_bytes"),
    [(MAX_JSON_BYTES + 1, 0), (0, MAX_BLOB_BYTES + 1), (0xFFFFFFFF, 0), (2, (1 << 64) - 1)],
)
def test_announced_sizes_above_the_limits_are_refused_by_the_head_alone(json_bytes: int, blob_bytes: int) -> None:
    """Nothing follows the header, so a reader that waited for the body would fail otherwise."""
    head = struct.pack(">4sIQ", PROTOCOL, json_bytes, blob_bytes)
    with pytest.raises(TransportError, match=rf"{json_bytes} \+ {blob_bytes} bytes was announced.*was closed"):
        read(head)


@pytest.mark.parametrize(
    "opening", [b"GET / HTTP/1.1\r\nHost: x\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"DLC0"]
)
def test_other_protocols_are_told_apart_by_their_first_bytes(opening: bytes) -> None:
    with pytest.raises(TransportError, match=r"version of diloco's protocol\. The connection was closed"):
        read(opening.ljust(16, b"\0"))


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b"[1]", b"null", b'"kind"', b"{}", b'{"kind":1}', b'{"kind":null}', b"[" * 100_000],
    ids=lambda text: repr(text[:12]),
)
def test_what_is_no_message_is_an_error_of_its_own(text: bytes) -> None:
    with pytest.raises(TransportError, match="The connection was closed"):
        read(struct.pack(">4sIQ", PROTOCOL, len(text), 0) + text)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_not_sent(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        pack({"kind": "header", "weight": value})
