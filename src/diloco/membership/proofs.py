"""Signed votes that members show to each other when a view ends, and what the votes prove. Pure.

A member's report says which rounds it has committed, but a report alone proves nothing. That all have voted for a round
is known from the voters' own reports or from their signed votes. So all honest members have voted for a committed
round, and each of them can be convinced of that. Two different signed votes of one rank on one round prove that the
rank is faulty.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Commits", "SignedVote", "equivocators", "minimal_votes", "unproven", "votes_to_show"]

Commits = Mapping[tuple[int, int], str]
"""(fragment, outer step) -> digest of an average."""


@dataclass(frozen=True, order=True)
class SignedVote:
    """A rank's signed vote on a round."""

    rank: int
    round: tuple[int, int]  # fragment and outer step
    ok: bool  # whether the vote is for the round
    digest: str  # of the average that the rank voted for
    signature: str  # made with the key that the rank's header names for this round


def minimal_votes(votes: Iterable[SignedVote]) -> frozenset[SignedVote]:
    """Return at most two of the ``votes`` for each rank and round; two different ones already prove a fault."""
    distinct: dict[tuple[object, ...], dict[tuple[bool, str], SignedVote]] = defaultdict(dict)
    for vote in sorted(votes):
        distinct[vote.rank, vote.round].setdefault((vote.ok, vote.digest), vote)
    return frozenset(vote for votes_of_one in distinct.values() for vote in [*votes_of_one.values()][:2])


def equivocators(votes: Collection[SignedVote], ranks_per_replica: int) -> frozenset[int]:
    """Return the replicas with a rank that has signed two different votes on one round.

    Args:
        votes: the result of `minimal_votes`.
        ranks_per_replica: S; rank r belongs to replica r // S.

    >>> no, yes = SignedVote(2, (0, 1), False, "", "s"), SignedVote(2, (0, 1), True, "mean", "t")
    >>> sorted(equivocators([yes], 1)), sorted(equivocators([no, yes], 1))
    ([], [2])
    """
    times = Counter((vote.rank, vote.round) for vote in votes)
    return frozenset(rank // ranks_per_replica for (rank, _), count in times.items() if count > 1)


def unproven(
    claims: Mapping[int, Commits],
    held: Mapping[int, Commits],
    shown: Collection[SignedVote],
    ranks_per_replica: int,
) -> frozenset[int]:
    """Return the ranks that claim to have committed a round for which a vote of another rank is not proven.

    Args:
        claims: rank -> the rounds that it claims to have committed.
        held: rank -> the rounds that it says it has committed or voted for, for all ranks whose votes are needed.
        shown: valid signed votes.
        ranks_per_replica: S; ranks at the same position of their replicas hold the same average.

    >>> mean = {(0, 1): "mean"}
    >>> vote = SignedVote(1, (0, 1), True, "mean", "s")
    >>> sorted(unproven({0: mean}, {0: mean, 1: {}}, (), 1)), sorted(unproven({0: mean}, {0: mean, 1: {}}, [vote], 1))
    ([0], [])
    """
    votes: dict[tuple[int, tuple[int, int]], set[str]] = defaultdict(set)
    for vote in shown:
        if vote.ok:
            votes[vote.rank, vote.round].add(vote.digest)
    claimants: dict[tuple[int, tuple[int, int], str], list[int]] = defaultdict(list)  # most ranks claim the same
    for rank, commits in claims.items():
        for key, digest in commits.items():
            claimants[rank % ranks_per_replica, key, digest].append(rank)
    found: set[int] = set()
    for (position, key, digest), claiming in claimants.items():
        for rank, own in held.items():
            digests = {own.get(key), *votes.get((rank, key), ())} - {None}
            if digest not in digests and (rank % ranks_per_replica == position or not digests):
                found.update(claiming)
                break
    return frozenset(found)


def votes_to_show(
    votes: Mapping[tuple[int, int], Mapping[int, SignedVote]],
    claims: Commits,
    held: Mapping[int, Commits],
    shown: Collection[SignedVote],
) -> frozenset[SignedVote]:
    """Return the votes known to this rank that others need to see by now.

    These are votes for a round that this rank has committed, if the voter does not report its vote, and votes that
    contradict one that has been shown.

    Args:
        votes: round -> rank -> its vote, as received here.
        claims: the rounds that this rank claims to have committed.
        held: as in `unproven`, for the ranks that have reported.
        shown: the votes that have been shown so far.
    """
    claimed = [(vote, held[rank].get(key)) for key in claims for rank in held if (vote := votes.get(key, {}).get(rank))]
    other = [(vote, each) for each in shown if (vote := votes.get(each.round, {}).get(each.rank))]
    denied = frozenset(vote for vote, digest in claimed if digest != vote.digest)
    return denied.union(vote for vote, each in other if (vote.ok, vote.digest) != (each.ok, each.digest))
