"""The registration of ranks: each once, all with the same facts, or a refusal that names both sides."""

from __future__ import annotations

import pytest

from diloco.membership import MOST_RANK
from diloco.protocol import MAX_NAME, Entry, MessageError, decode, encode, table_of

FACTS = {"model": "1,000 parameters", "codec": "fp4", "seed": "0"}


def entry(rank: int, address: str = "", **facts: str) -> Entry:
    return Entry(rank, address or f"10.0.0.{rank}:29400", FACTS | facts)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": -1},
        {"rank": MOST_RANK + 1},
        {"address": "\x1b[2Ja:1"},
        {"address": "a" * 301},
        {"facts": {"seed": 0}},
        {"facts": {str(n): "" for n in range(257)}},
        {"held_step": 1 << 60},
        {"places": [1]},
        {"name": "\x1b[2J"},
        {"name": "x" * (MAX_NAME + 1)},
    ],
    ids=str,
)
def test_what_is_no_entry_is_refused(fields: dict[str, object]) -> None:
    message = vars(entry(0))
    assert decode(encode(message), Entry) == entry(0)
    with pytest.raises(MessageError):
        decode(encode(message | fields), Entry)


def test_a_difference_shows_no_escapes_of_others() -> None:
    words = entry(0, codec="fp4").diff(entry(1, codec="\x1b]0;title\x07" + "x" * 60_000))
    assert words.isprintable()
    assert len(words) < 700


def test_the_table_of_a_thousand_ranks_fits_into_a_message() -> None:
    """Regression: each repeated the facts, of which the names of many buffers make kilobytes."""
    facts = {"buffers": "b" * 2000, "frozen parameters of these digests": "f" * 2000}
    assert len(encode(table_of(entry(rank, **facts) for rank in range(128 * 8)))) < 1 << 18
