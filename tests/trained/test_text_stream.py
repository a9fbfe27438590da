"""Text from single tokens equals text from all at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco.data import ByteTokenizer, Tokenizer, train_bpe
from diloco.trained import TextStream

BPE = train_bpe(["abab cabab ümlaut abc abcd 日本語 ababab"] * 4, 275)


@given(
    tokens=st.lists(st.integers(0, 280), max_size=40) | st.text("abé本\n", max_size=30).map(lambda t: list(t.encode())),
    tokenizer=st.sampled_from([ByteTokenizer(), BPE]),
)
def test_pieces_together_are_the_text(tokens: list[int], tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert "".join(stream.feed(token) for token in tokens) + stream.finish() == tokenizer.decode(tokens)


@given(st.text("abé本🙂\n\r", max_size=20))
def test_every_character_comes_with_its_last_byte(text: str) -> None:
    stream = TextStream(ByteTokenizer())
    for letter in text:
        *before, last = letter.encode()
        assert [stream.feed(byte) for byte in before] == [""] * len(before)
        assert stream.feed(last) == letter
    assert stream.finish() == ""
