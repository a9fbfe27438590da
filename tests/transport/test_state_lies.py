"""Donors that are malicious, damaged or hold an invalid state: the fetch survives and names them."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash

from diloco.errors import TransportError
from tests.same import same_values
from tests.transport.state_donors import Fetcher, MakeDonor, lying, size_of, state


def wrong_bytes(message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
    """Undamaged in transit, but not what the digest identifies."""
    if message["kind"] == "chunk":
        blob = bytes(len(blob))
        message["checksum"] = xxhash.xxh3_64_hexdigest(blob)
    return message, blob


def always_damaged(message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
    return message, blob[:-1] + bytes([blob[-1] ^ 1]) if blob else blob


def wrong_digest(message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
    return ({**message, "snapshot": "0" * 16} if message["kind"] == "offer" else message), blob


def wrong_place(message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
    return ({**message, "offset": "here"} if message["kind"] == "chunk" else message), blob


def too_much(message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
    if message["kind"] == "chunk":
        blob = blob * 2
        message["checksum"] = xxhash.xxh3_64_hexdigest(blob)
    return message, blob


def huge(message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
    if message["kind"] == "offer":
        message["tensors"]["global_params"][1] = [1 << 30, 1 << 30]
    return message, blob


def other_words(message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
    return {"kind": "what"}, b""


LIES = [
    (wrong_bytes, "block 0 does not match the digest"),
    (always_damaged, "were damaged in transit"),
    (wrong_digest, "names its snapshot '0000000000000000'"),
    (wrong_place, "bytes at here arrived where byte 0 was next"),
    (too_much, "was announced, more than the limit"),
    (huge, "it offers a tensor of the excessive shape"),
    (other_words, "it answered 'what'"),
]


@pytest.mark.parametrize(("lie", "words"), LIES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_donor_that_lies_is_survived_and_named(fetcher: Fetcher, make_donor: MakeDonor, lie: Any, words: str) -> None:
    liar, honest = lying(make_donor(state()), lie), make_donor(state())
    assert same_values(fetcher.fetch({0: liar, 1: honest}), {**state(), "fragment": 0})
    with pytest.raises(TransportError, match=f"replica 0: .*{words}"):
        fetcher.fetch({0: liar})


def test_who_offers_another_state_of_more_rounds_is_not_believed_beside_two(
    fetcher: Fetcher, make_donor: MakeDonor
) -> None:
    """Also if these two end a round one after the other: they are asked until they offer the same snapshot."""
    liar, behind, ahead = (make_donor(state(seed, finished=n)) for seed, n in ((7, 1 << 50), (1, 1), (1, 2)))

    def version(fragment: int) -> int:
        if behind.copies == 1:  # it has been asked before
            behind.held = ahead.held
        return behind.changes

    behind.service.version = version
    fetched = fetcher.fetch({0: liar, 1: behind, 2: ahead})
    assert same_values(fetched, {**state(1, finished=2), "fragment": 0})
    assert not fetcher.received_from(liar)


def test_parts_of_a_block_from_a_liar_and_an_honest_one_blame_nobody_in_vain(
    fetcher: Fetcher, make_donor: MakeDonor
) -> None:
    """The faulty donor sends the first chunk of a block and is cut. The honest one sends the rest, then all of it."""
    held = state()
    liar, honest, chunks = lying(make_donor(held), wrong_bytes), make_donor(held), [0]

    def cut(port: int, data: bytes) -> bytes:
        if port == liar.address.port:
            chunks[0] += 1
            if chunks[0] > 1:
                raise ConnectionResetError("cut")
        return data

    fetcher.streams.hook = cut
    assert same_values(fetcher.fetch({0: liar, 1: honest}), {**held, "fragment": 0})
    assert fetcher.received_from(honest) >= size_of(held)


@pytest.mark.parametrize("place", ["global_params", "momentum"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_refused_and_named(
    fetcher: Fetcher, make_donor: MakeDonor, place: str, value: float
) -> None:
    held = state(numel=5)
    {**held, **held["slots"]}[place][3] = value
    with pytest.raises(TransportError, match=rf"replica 0: its .*{place} hold NaN or infinity"):
        fetcher.fetch({0: make_donor(held)})
    assert same_values(
        fetcher.fetch({0: make_donor(held), 1: make_donor(held), 2: make_donor(state())}), {**state(), "fragment": 0}
    )


def test_more_than_expected_is_refused_before_it_comes(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    donor = make_donor(state())
    assert fetcher.fetch({0: donor}, expected_bytes=size_of(state()))
    fetcher.streams.received.clear()
    with pytest.raises(TransportError, match="at most 12799999 bytes are expected"):
        fetcher.fetch({0: donor}, expected_bytes=size_of(state()) - 1)
    assert not fetcher.streams.received
