"""Votes: applied by all or by none, whatever order they come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from diloco.membership.ballot import Tally, Vote, tally

VOTES = st.one_of(
    st.sampled_from([Vote(True, "a"), Vote(True, "b")]),
    st.sampled_from([Vote(False, reason="was late"), Vote(False, reason="diverged")]),
)


def decided(voters: Sequence[int], votes: Mapping[int, Vote], order: Sequence[int]) -> list[Tally]:
    """What a member says after each vote that comes in, beginning with none."""
    return [tally(voters, {voter: votes[voter] for voter in order[:count]}) for count in range(len(order) + 1)]


@given(st.dictionaries(st.integers(0, 7), VOTES, min_size=1, max_size=6), st.data())
def test_any_two_members_decide_alike_whatever_order_votes_come_in(votes: dict[int, Vote], data: st.DataObject) -> None:
    """Property: the first decision of each member is the last one of all, and it stays."""
    voters = sorted(votes)
    wanted = all(vote.ok for vote in votes.values()) and len({vote.digest for vote in votes.values()}) == 1
    for order in (data.draw(st.permutations(voters)), data.draw(st.permutations(voters))):
        said = decided(voters, votes, order)
        taken = [each.committed for each in said if each.committed is not None]
        assert taken, "everybody voted, and nothing was decided"
        assert set(taken) == {wanted}
        first = next(index for index, each in enumerate(said) if each.committed is not None)
        assert all(each.committed is None for each in said[:first])
        assert all(each.committed is not None for each in said[first:]), "a decision does not become undone"


@given(st.dictionaries(st.integers(0, 7), VOTES, min_size=2, max_size=6), st.data())
def test_nothing_commits_before_the_last_vote(votes: dict[int, Vote], data: st.DataObject) -> None:
    missing = data.draw(st.sampled_from(sorted(votes)))
    come = {voter: vote for voter, vote in votes.items() if voter != missing}
    assert tally(sorted(votes), come).committed in (None, False)


@given(st.sets(st.integers(0, 7), min_size=1), st.data())
def test_one_vote_against_is_enough_and_gives_the_reason(voters: set[int], data: st.DataObject) -> None:
    against = data.draw(st.sampled_from(sorted(voters)))
    come = {against: Vote(False, reason="its link ended")}
    assert tally(voters, come) == Tally(False, "its link ended")
    everybody = dict.fromkeys(voters, Vote(True, "a")) | come
    assert tally(voters, everybody) == Tally(False, "its link ended")


def test_digests_must_be_equal_within_a_group_and_only_there() -> None:
    """Two replicas of two ranks: those at the same position hold the same shard."""
    positions = {0: 0, 1: 1, 2: 0, 3: 1}
    shards = {0: Vote(True, "first"), 1: Vote(True, "second"), 2: Vote(True, "first"), 3: Vote(True, "second")}
    assert tally(range(4), shards, groups=positions) == Tally(True)
    assert tally(range(4), shards) == Tally(False, "0 holds another average than 1")
    mixed = shards | {3: Vote(True, "odd")}
    assert tally(range(4), mixed, groups=positions) == Tally(False, "1 holds another average than 3")


@given(st.lists(st.sampled_from("ab"), min_size=6, max_size=6), st.integers(1, 3))
def test_groups_commit_exactly_when_each_of_them_would_alone(digests: list[str], size: int) -> None:
    votes = {rank: Vote(True, digest) for rank, digest in enumerate(digests)}
    groups = {rank: rank % size for rank in votes}
    each = [tally([r for r in votes if groups[r] == group], votes).committed for group in range(size)]
    assert tally(range(6), votes, groups=groups).committed == all(each)


def test_votes_of_strangers_count_for_nothing() -> None:
    ours = {0: Vote(True, "a"), 1: Vote(True, "a")}
    assert tally([0, 1], ours | {5: Vote(False, reason="I am none of you"), 6: Vote(True, "b")}) == Tally(True)
    assert tally([0, 1], {0: Vote(True, "a"), 5: Vote(True, "a")}) == Tally(None)


def test_a_member_alone_decides_by_its_own_vote() -> None:
    assert tally([4], {}) == Tally(None)
    assert tally([4], {4: Vote(True, "x")}) == Tally(True)
    assert tally([4], {4: Vote(False, reason="not finite")}) == Tally(False, "not finite")
