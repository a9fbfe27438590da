"""The parser of messages from other processes: every value is in its range, and only `ValueError` is raised."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.protocol import Fields, json_object
from diloco.units import visible

REFUSED = {
    "nothing": b"",
    "no text": b"\xff\xfe{}",
    "half of a pair": b'{"a": "\\ud800"}',
    "half of a pair as bytes": b'{"a": "\xed\xa0\x80"}',
    "no object": b"[]",
    "infinity": b'{"a": Infinity}',
    "NaN": b'{"a": NaN}',
    "a number that is infinite": b'{"a": 1e400}',
    "an integer of 5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "33 levels": b'{"a": ' + b"[" * 32 + b"]" * 32 + b"}",
    "3,000 levels": b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    "100,000 levels": b"[" * 100_000,
    "350,000 lists": b'{"a": [' + b"[]," * 350_000 + b"0]}",
    "more than an object": b"{} {}",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_no_bounded_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        json_object(data)


def test_what_is_just_within_the_bounds_is_taken() -> None:
    deep = b'{"a": ' + b"[" * 31 + b"]" * 31 + b"}"
    assert json_object(deep) == json.loads(deep)
    assert json_object(b'{"a": 1e308, "b": "\\ud83d\\ude00", "c": -0.0}') == {"a": 1e308, "b": "\U0001f600", "c": 0.0}


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:0123456789e.-+nulrtafsEN\\ ', max_size=200).map(str.encode))
def test_whatever_the_bytes_are_nothing_else_is_raised(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(json_object(data), dict)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=80)
    | st.integers() | st.sampled_from([10**400, -(10**400), 1 << 31, (1 << 31) - 1, 1 << 53, -1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip

READERS = (
    "integer", "rank", "text", "words", "printable", "flag", "number", "number_in_text", "integers", "ranks",
    "round", "pairs", "digests", "numbered", "texts", "message", "list_of_messages",
)  # fmt: skip


@settings(max_examples=60)
@given(VALUES)
def test_a_field_is_what_it_should_be_or_is_named(value: Any) -> None:
    fields = Fields({"a": value})
    for reader in READERS:
        refusal = "field 'a' must be "
        try:
            getattr(fields, reader)("a")
        except ValueError as error:
            refusal = str(error)
        assert refusal.startswith("field 'a' must be "), reader
        assert refusal.isprintable(), reader
        assert len(refusal) < 300, reader
        with pytest.raises(ValueError, match="field 'b' is missing"):
            getattr(fields, reader)("b")


@given(st.text(max_size=300), st.integers(4, 400))
def test_what_is_visible_prints_is_cut_and_stays_as_it_is(text: str, most: int) -> None:
    shown = visible(text, most)
    assert shown.isprintable()
    assert len(shown) <= most
    assert visible(shown, most) == shown
    assert shown == text or not text.isprintable() or len(text) > most
