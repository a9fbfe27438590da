"""Votes: a round is applied by all or by none, in whatever order votes arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import RoundId
from diloco.protocol import RoundVote, tally


def vote(digest: str, reason: str = "") -> RoundVote:
    return RoundVote(0, RoundId(0, 0), digest, reason)


VOTES = st.sampled_from([vote("a"), vote("b"), vote("", "was late"), vote("")])


@given(st.dictionaries(st.integers(0, 7), VOTES, min_size=1, max_size=6), st.data())
def test_no_two_members_decide_differently_whatever_order_votes_come_in(
    votes: dict[int, RoundVote], data: st.DataObject
) -> None:
    """Property: once all votes are in, each member has a final decision, or knows that the round is disputed."""
    voters, taken = sorted(votes), set()
    for me in voters:
        order = data.draw(st.permutations(voters))
        told = [
            tally(voters, {voter: votes[voter] for voter in order[:count]}, me=me) for count in range(len(order) + 1)
        ]
        decided = [committed for committed, _ in told if committed is not None]
        assert len(set(decided)) <= 1
        assert decided or told[-1][1]
        taken.update(decided)
    assert taken <= {all(each == vote(votes[voters[0]].digest) and each.ok for each in votes.values())}


@given(st.dictionaries(st.integers(0, 7), VOTES, min_size=2, max_size=6), st.integers(0, 7), st.data())
def test_what_a_liar_tells_each_makes_no_two_outcomes(
    honest: dict[int, RoundVote], liar: int, data: st.DataObject
) -> None:
    """Property: if one honest member commits, no other one can declare the round void."""
    honest.pop(liar, None)
    voters = sorted({*honest, liar})
    told = [tally(voters, {**honest, liar: data.draw(VOTES)}, me=me) for me in honest]
    if any(committed for committed, _ in told):
        assert all(committed or (committed is None and reason) for committed, reason in told)


def test_digests_must_be_equal_within_a_group_and_only_there() -> None:
    """Two replicas of two ranks: ranks at the same position hold the same shard."""
    positions, shards = {0: 0, 1: 1, 2: 0, 3: 1}, dict(enumerate(map(vote, ("first", "second", "first", "second"))))
    assert tally(range(4), shards, me=0, groups=positions) == (True, "")
    assert tally(range(4), shards, me=0)[1]
    mixed = shards | {3: vote("odd")}
    assert tally(range(4), mixed, me=0, groups=positions) == (None, "rank 3 holds a different average than rank 1")
