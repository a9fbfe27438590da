"""Which of the replicas that look for a run founds it."""

import pytest

from diloco.membership import Candidate, choose_founder


@pytest.mark.parametrize(
    ("looking", "founder"),
    [
        ([Candidate(1), Candidate(0)], 0),
        ([Candidate(0, 10), Candidate(1, 30), Candidate(2, 30)], 1),
        ([Candidate(0, 90, founds=False), Candidate(1, 10)], 1),
        ([Candidate(0, founds=False), Candidate(2, founds=False)], None),
        ([], None),
    ],
)
def test_the_newest_state_founds_and_then_the_lowest_number_of_those_that_may(
    looking: list[Candidate], founder: int | None
) -> None:
    """Who was told of others waits for them, also with the newest step or the lowest number."""
    assert choose_founder(looking) == founder
    assert choose_founder(looking[::-1]) == founder
