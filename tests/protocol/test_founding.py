"""Which of the replicas that look for a run founds it."""

import pytest

from diloco.protocol import Looking, choose_founder


@pytest.mark.parametrize(
    ("looking", "founder"),
    [
        ([Looking(1), Looking(0)], 0),
        ([Looking(0, 10), Looking(1, 30), Looking(2, 30)], 1),
        ([Looking(0, 90, founds=False), Looking(1, 10)], 1),
        ([Looking(0, founds=False), Looking(2, founds=False)], None),
        ([], None),
    ],
)
def test_the_newest_state_founds_and_then_the_lowest_number_of_those_that_may(
    looking: list[Looking], founder: int | None
) -> None:
    """Who was told of others waits for them, also with the newest step or the lowest number."""
    assert choose_founder(looking) == founder
    assert choose_founder(looking[::-1]) == founder
