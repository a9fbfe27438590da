"""Which replicas count as late: those unchanged for several consecutive looks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol import Lateness

SEEN = st.lists(st.dictionaries(st.integers(0, 2), st.integers(0, 1)), max_size=20)


@given(SEEN)
def test_who_has_not_changed_since_so_many_looks_is_late(looks: list[dict[int, int]]) -> None:
    """Reference: a comparison of all the last looks."""
    lateness = Lateness()
    for number, seen in enumerate(looks, 1):
        last = looks[max(0, number - Lateness.LOOKS - 1) : number]
        whole = len(last) == Lateness.LOOKS + 1
        expected = {replica for replica in seen if whole and {look.get(replica) for look in last} == {seen[replica]}}
        assert lateness.look(seen) == expected


def test_who_stood_still_itself_accuses_nobody_at_its_first_look() -> None:
    lateness = Lateness()
    assert not lateness.look({1: 5})
    assert not lateness.look({1: 5}), "however long after"
    for _ in range(10):
        assert not lateness.look({}), "its messages have been read"
