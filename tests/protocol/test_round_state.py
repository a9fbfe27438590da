"""What follows from the state of a round: late replicas, diverged state, this rank's result, and what is remembered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import RoundId
from diloco.errors import DivergedError, RoundVoidError, TransportError
from diloco.membership import Lateness, Vote
from diloco.protocol import Decided, Header, RoundState, Rules, donor_for

ROUND = RoundId(1, 4)
HEADER = Header(ROUND, 8, 1.0, 1.0, "d", None, None, "", False)
RANKS = range(6)
RULES = Rules(2, 1, 2, None, 10.0, 1 << 19, bytes(32))
"""Rank 2 of replicas 0 to 2 of two ranks each."""


def late_ones(state: RoundState, spoken: dict[int, int]) -> tuple[frozenset[int], ...]:
    """Look as often as it takes; ``spoken``: rank -> the messages that arrive from it between two looks."""
    for look in range(Lateness.LOOKS + 1):
        late = state.look(RANKS, RULES, {rank: look * words for rank, words in spoken.items()})
        assert look == Lateness.LOOKS or late == (frozenset(),) * 3
    return late


def test_who_has_not_contributed_is_late_whatever_else_it_says() -> None:
    state = RoundState(ROUND, headers=dict.fromkeys([0, 1, 2, 3, 4], HEADER))
    assert state.missing(RANKS, RULES) == (2,)
    state.votes.update(dict.fromkeys(range(4), Vote(True, "mean")))
    assert late_ones(state, {4: 1, 5: 1}) == (frozenset({2}), frozenset(), frozenset())


def test_who_has_not_contributed_and_says_nothing_is_not_heard() -> None:
    state = RoundState(ROUND, headers=dict.fromkeys([0, 1, 2, 3, 4], HEADER))
    assert late_ones(state, {0: 1}) == (frozenset({2}), frozenset(), frozenset({2}))


@pytest.mark.parametrize("last_word", [1, 2, 3])
def test_who_falls_silent_before_it_contributes_is_not_called_late_before_it_is_not_heard(
    last_word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica called late would be excluded; if it is not heard, the reports decide whether its link is at fault."""
    monkeypatch.setattr(Lateness, "LOOKS", 4)
    state = RoundState(ROUND, headers=dict.fromkeys([0, 1, 2, 3, 4], HEADER))
    state.votes.update(dict.fromkeys(range(4), Vote(True, "mean")))
    found = []
    for look in range(Lateness.LOOKS + last_word + 1):
        spoken = {rank: min(look, last_word) for rank in (4, 5)}
        found.append(state.look(RANKS, RULES, spoken))
    named = [late for late in found if late[0]]
    if last_word <= 1:  # silent for so long by the time it is late that the next look decides
        assert named == [(frozenset({2}), frozenset(), frozenset({2}))]
    else:
        assert named[0] == (frozenset({2}), frozenset(), frozenset())


@pytest.mark.parametrize(("spoken", "late"), [({}, {0}), ({0: 1}, set()), ({1: 1}, {0}), ({5: 1}, {0})])
def test_who_does_not_vote_is_late_when_it_says_nothing_at_all(spoken: dict[int, int], late: set[int]) -> None:
    """Rank 0 has not voted. Rank 1 of its replica has: its messages show nothing about rank 0."""
    state = RoundState(ROUND, headers=dict.fromkeys(RANKS, HEADER))
    state.votes.update(dict.fromkeys(range(1, 6), Vote(True, "mean")))
    assert late_ones(state, spoken) == (frozenset(), frozenset(late), frozenset(late))


def test_another_rank_of_my_own_replica_is_the_others_business() -> None:
    state = RoundState(ROUND, headers=dict.fromkeys([0, 1, 2, 4, 5], HEADER))
    state.votes.update(dict.fromkeys([0, 1, 4, 5], Vote(True, "mean")))
    assert state.missing(RANKS, RULES) == (1,)
    assert late_ones(state, {}) == (frozenset(),) * 3


@pytest.mark.parametrize(
    ("taking_over", "mine", "donor"),
    [
        ({2}, "d", None),
        ({2}, "other", 0),
        ({0, 2}, "other", 2),
        ({0, 2, 4}, "other", None),
        ({1, 2}, "other", 0),
    ],
)
def test_state_is_compared_with_that_of_the_first_one_that_has_it(
    taking_over: set[int], mine: str, donor: int | None
) -> None:
    """At this rank's position: rank 1 holds another shard than rank 2, so its state does not matter."""
    headers = {rank: replace(HEADER, taking_over=rank in taking_over) for rank in RANKS}
    headers |= {rank: replace(headers[rank], digest="another shard") for rank in (1, 3, 5)}
    headers[2] = replace(headers[2], digest=mine)
    assert donor_for(2, headers, members=(0, 1, 2), ranks_per_replica=2) == donor
    assert RoundState(ROUND, headers, donor=donor).held(RULES) == ("" if donor is None else "d")


def test_who_has_diverged_hears_that_and_else_why_the_round_is_void() -> None:
    failed = TransportError("all is over")
    state = RoundState(ROUND, committed=False, reason="no contribution of 2")
    assert state.failure(failed) is failed
    void = state.failure(None)
    assert isinstance(void, RoundVoidError)
    assert str(void) == "fragment 1, outer step 4 is void: no contribution of 2."
    state.fault = DivergedError("1 holds another state", donor=0, digest="d", replicas=(1,))
    assert state.failure(failed) is state.fault


KEYS = st.tuples(st.integers(-1, 2), st.integers(0, 30))


@given(st.lists(st.tuples(KEYS, st.booleans()), max_size=60))
def test_what_is_remembered_is_the_newest_and_what_is_committed_is_not_void(
    decisions: list[tuple[tuple[int, int], bool]],
) -> None:
    """Property, after every decision: other fragments are unchanged, and the latest decision is known."""
    decided = Decided()
    for key, committed in decisions:
        fragment, outer_step = key
        before = decided.commits, decided.void
        if committed:
            decided.commit(key, f"digest of {key}")
            assert decided.commits[key] == f"digest of {key}"
            assert all(step >= outer_step - 1 for of, step in decided.commits if of == fragment)
            assert all(step > outer_step for of, step in decided.void if of == fragment)
        else:
            decided.call_off(key)
            void = {step for of, step in before[1] | {key} if of == fragment}
            assert {step for of, step in decided.void if of == fragment} == set(sorted(void)[-8:])
            assert decided.commits == before[0]
        assert {k: d for k, d in decided.commits.items() if k[0] != fragment} == {
            k: d for k, d in before[0].items() if k[0] != fragment
        }
        assert {k for k in decided.void if k[0] != fragment} == {k for k in before[1] if k[0] != fragment}


def test_how_late_contributors_are_is_counted_from_whoever_was_first() -> None:
    state = RoundState(ROUND, heard_s={0: 7.0, 1: 9.0, 2: 7.5, 3: 8.0, 4: 7.25, 5: 7.25})
    assert state.late_s((0, 1, 2), RULES) == (0.0, 0.5, 0.25)
    assert state.late_s((1,), RULES) == (0.5,)
