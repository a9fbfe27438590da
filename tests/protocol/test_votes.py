"""Votes: a round is applied by all or by none, in whatever order votes arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco.membership import Vote
from diloco.protocol import Tally, tally

VOTES = st.one_of(
    st.sampled_from([Vote(True, "a"), Vote(True, "b")]),
    st.sampled_from([Vote(False, reason="was late"), Vote(False, reason="diverged")]),
)


@given(st.dictionaries(st.integers(0, 7), VOTES, min_size=1, max_size=6), st.data())
def test_no_two_members_decide_differently_whatever_order_votes_come_in(
    votes: dict[int, Vote], data: st.DataObject
) -> None:
    """Property: once all votes are in, each member has a final decision, or knows that the round is disputed."""
    voters, taken = sorted(votes), set()
    for me in voters:
        order = data.draw(st.permutations(voters))
        told = [
            tally(voters, {voter: votes[voter] for voter in order[:count]}, me=me) for count in range(len(order) + 1)
        ]
        decided = [each.committed for each in told if each.committed is not None]
        assert len(set(decided)) <= 1
        assert decided or told[-1].disputed
        taken.update(decided)
    assert taken <= {all(vote == Vote(True, votes[voters[0]].digest) for vote in votes.values())}


@given(st.dictionaries(st.integers(0, 7), VOTES, min_size=2, max_size=6), st.integers(0, 7), st.data())
def test_what_a_liar_tells_each_makes_no_two_outcomes(honest: dict[int, Vote], liar: int, data: st.DataObject) -> None:
    """Property: if one honest member commits, no other one can declare the round void."""
    honest.pop(liar, None)
    voters = sorted({*honest, liar})
    told = {me: tally(voters, {**honest, liar: data.draw(VOTES)}, me=me) for me in honest}
    if any(each.committed for each in told.values()):
        assert all(each.committed or each.disputed for each in told.values())


def test_digests_must_be_equal_within_a_group_and_only_there() -> None:
    """Two replicas of two ranks: ranks at the same position hold the same shard."""
    positions = {0: 0, 1: 1, 2: 0, 3: 1}
    shards = {0: Vote(True, "first"), 1: Vote(True, "second"), 2: Vote(True, "first"), 3: Vote(True, "second")}
    assert tally(range(4), shards, me=0, groups=positions) == Tally(True)
    assert tally(range(4), shards, me=0).disputed
    mixed = shards | {3: Vote(True, "odd")}
    wanted = Tally(None, "rank 3 holds a different average than rank 1", disputed=True)
    assert tally(range(4), mixed, me=0, groups=positions) == wanted
