"""Text from single tokens equals text from all at once, up to the stop that is complete first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data import ByteTokenizer, Tokenizer, train_bpe
from diloco.errors import ConfigurationError
from diloco.trained import TextStream

BPE = train_bpe(["abab cabab ümlaut abc abcd 日本語 ababab"] * 4, 275)


def until_stop(text: str, stops: list[str]) -> str:
    """Of all stops in the text, return the one that ends first, and of several the longest."""
    ends = [(at + len(stop), at) for stop in stops for at in range(len(text)) if text.startswith(stop, at)]
    return text[: min(ends)[1]] if ends else text


@given(
    tokens=st.lists(st.integers(0, 280), max_size=40) | st.text("abé本\n", max_size=30).map(lambda t: list(t.encode())),
    stops=st.lists(st.text("abé本\n", min_size=1, max_size=4), max_size=3),
    tokenizer=st.sampled_from([ByteTokenizer(), BPE]),
)
def test_pieces_together_are_the_text_up_to_the_first_stop(
    tokens: list[int], stops: list[str], tokenizer: Tokenizer
) -> None:
    stream = TextStream(tokenizer, stops)
    pieces = [stream.feed(token) for token in tokens]
    whole = tokenizer.decode(tokens)
    assert "".join(pieces) + stream.finish() == until_stop(whole, stops)
    assert stream.stopped == any(stop in whole for stop in stops)


@given(st.text("abé本🙂\n\r", max_size=20))
def test_without_stops_every_character_comes_with_its_last_byte(text: str) -> None:
    stream = TextStream(ByteTokenizer())
    for letter in text:
        *before, last = letter.encode()
        assert [stream.feed(byte) for byte in before] == [""] * len(before)
        assert stream.feed(last) == letter
    assert stream.finish() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="A stop text must not be empty"):
        TextStream(ByteTokenizer(), [""])
