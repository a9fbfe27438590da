"""Signed votes that members show to each other when a view ends, and what they prove. Pure.

A member says in its report which rounds it has committed, and nobody need believe it: that all have voted for a round
is what those say who have, or what their signed votes show. A committed round is thus one that all honest members have
voted for, and of which each can be convinced; and two different signed votes of one rank on one round are a proof
against it.
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
    """What a rank has said on a round, and signed."""

    rank: int
    round: tuple[int, int]  # fragment and outer step
    ok: bool  # whether it is for the round
    digest: str  # of the average that it is for
    signature: str  # with the key that the rank has told for this round


def minimal_votes(votes: Iterable[SignedVote]) -> frozenset[SignedVote]:
    """Those of ``votes`` that are enough: at most two of each rank on each round, whatever else it has signed."""
    said: dict[tuple[object, ...], dict[tuple[bool, str], SignedVote]] = defaultdict(dict)
    for vote in sorted(votes):
        said[vote.rank, vote.round].setdefault((vote.ok, vote.digest), vote)
    return frozenset(vote for different in said.values() for vote in [*different.values()][:2])


def equivocators(votes: Collection[SignedVote], ranks_per_replica: int) -> frozenset[int]:
    """Replicas with a rank that has signed two different votes on one round; ``votes`` as `minimal_votes` gives them.

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
    """Ranks that say they have committed a round, of which it is not known that all have voted for it.

    Args:
        claims: rank -> what it says it has committed.
        held: rank -> what it says it has committed or voted for; of all whose votes are needed.
        shown: signed votes, as far as they are valid.
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
    claimants: dict[tuple[int, tuple[int, int], str], list[int]] = defaultdict(list)  # most claim the same
    for rank, commits in claims.items():
        for key, digest in commits.items():
            claimants[rank % ranks_per_replica, key, digest].append(rank)
    found: set[int] = set()
    for (position, key, digest), claiming in claimants.items():
        for rank, theirs in held.items():
            said = {theirs.get(key), *votes.get((rank, key), ())} - {None}
            if digest not in said and (rank % ranks_per_replica == position or not said):
                found.update(claiming)
                break
    return frozenset(found)


def votes_to_show(
    votes: Mapping[tuple[int, int], Mapping[int, SignedVote]],
    claims: Commits,
    held: Mapping[int, Commits],
    shown: Collection[SignedVote],
) -> frozenset[SignedVote]:
    """Of the votes that a rank holds, those that others need to see by now: for what it has committed, where the voter
    does not say so; and those of which another one has been shown.

    Args:
        votes: round -> rank -> its vote, as it came here.
        claims: what this rank says it has committed.
        held: as in `unproven`, of those that have reported.
        shown: what has been shown by now.
    """
    claimed = [(vote, held[rank].get(key)) for key in claims for rank in held if (vote := votes.get(key, {}).get(rank))]
    other = [(vote, each) for each in shown if (vote := votes.get(each.round, {}).get(each.rank))]
    denied = frozenset(vote for vote, digest in claimed if digest != vote.digest)
    return denied.union(vote for vote, each in other if (vote.ok, vote.digest) != (each.ok, each.digest))
