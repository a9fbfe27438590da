"""Votes that make every replica of a view apply a round, or none.

A member commits a round once every member has voted for the average that the member itself holds. A member that has not
voted for the round therefore knows that no other member can commit it, and may declare it void. A member that has voted
for it and receives a vote against it can't know what that voter sent to the others. The view change settles the
outcome: its reports say which members have committed the round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["Tally", "Vote", "tally"]


@dataclass(frozen=True)
class Vote:
    """One member's final vote on a round."""

    ok: bool  # whether the voter holds the average and is ready to apply it
    digest: str = ""  # of the average that the voter holds; "" if not ok
    reason: str = ""  # why the voter is against the round; "" if ok


@dataclass(frozen=True)
class Tally:
    """The state of a round, as far as one member can tell from the votes."""

    committed: bool | None  # True: every member applies it; False: void for every member; None: undecided
    reason: str = ""
    # this member has voted for the round and others against it, while a third member may have committed it
    disputed: bool = False


def tally(
    voters: Collection[int], votes: Mapping[int, Vote], *, me: int, groups: Mapping[int, int] | None = None
) -> Tally:
    """Return what the votes received so far mean for the member ``me``.

    Args:
        voters: the ranks whose votes count.
        votes: the votes received so far, by voter.
        me: the voter for which the votes are counted.
        groups: voter -> the group within which digests must be equal (ranks at the same position of their replicas hold
            the same shard). None: all voters form one group.

    >>> tally([0, 1, 2], {0: Vote(True, "a"), 1: Vote(True, "a")}, me=0)
    Tally(committed=None, reason='', disputed=False)
    >>> tally([0, 1, 2], {0: Vote(True, "a"), 1: Vote(True, "b")}, me=0)
    Tally(committed=None, reason='rank 1 holds a different average than rank 0', disputed=True)
    >>> tally([0, 1, 2], {1: Vote(False, reason="it is late")}, me=0)
    Tally(committed=False, reason='it is late', disputed=False)
    """
    others = [voter for voter in sorted(voters) if voter != me]
    against = {voter: votes[voter].reason for voter in others if voter in votes and not votes[voter].ok}
    mine = votes.get(me)
    if mine is None or not mine.ok:
        against = against if mine is None else {me: mine.reason}
        return Tally(False, next(iter(against.values()))) if against else Tally(None)
    firsts: dict[int, int] = {}
    for voter in (me, *others):
        if voter in votes and votes[voter].ok:
            first = firsts.setdefault(groups[voter] if groups else 0, voter)
            if votes[first].digest != votes[voter].digest:
                against[voter] = f"rank {voter} holds a different average than rank {first}"
    if not against:
        return Tally(True if all(voter in votes for voter in others) else None)
    reason = against[min(against)]
    return Tally(False, reason) if len(against) == len(others) else Tally(None, reason, disputed=True)
