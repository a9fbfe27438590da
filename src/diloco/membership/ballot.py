"""Votes: a round is applied by every replica of its view or by none.

A member commits once all have voted for the average that it holds itself. Whoever has not voted for it knows thus that
nobody commits, and may call it void. Whoever has, and hears a vote against it, does not know what that voter has told
others: that is found out by the change to the next view, whose reports say who has committed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["Tally", "Vote", "tally"]


@dataclass(frozen=True)
class Vote:
    """What one member says about a round, once and for good."""

    ok: bool  # whether it holds the average and is ready to apply it
    digest: str = ""  # of the average it holds; "" when not ok
    reason: str = ""  # why not; "" when ok
    signature: str = ""  # by which others can be shown what it said; "" where there is none


@dataclass(frozen=True)
class Tally:
    """Where a round stands."""

    committed: bool | None  # True: applied by all; False: void for all; None: not decided yet
    reason: str = ""
    # this member has voted for it, others have voted against it, and again others may have committed it
    disputed: bool = False


def tally(
    voters: Collection[int], votes: Mapping[int, Vote], *, me: int, groups: Mapping[int, int] | None = None
) -> Tally:
    """What the votes that have come mean for one of ``voters``.

    Args:
        voters: everybody whose vote counts.
        votes: those that have come.
        me: who asks.
        groups: voter -> the group within which digests must be equal (ranks at the same position of their replicas
            hold the same shard); None: all are one group.

    >>> tally([0, 1, 2], {0: Vote(True, "a"), 1: Vote(True, "a")}, me=0)
    Tally(committed=None, reason='', disputed=False)
    >>> tally([0, 1, 2], {0: Vote(True, "a"), 1: Vote(True, "b")}, me=0)
    Tally(committed=None, reason='1 holds another average than 0', disputed=True)
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
                against[voter] = f"{voter} holds another average than {first}"
    if not against:
        return Tally(True if all(voter in votes for voter in others) else None)
    reason = against[min(against)]
    return Tally(False, reason) if len(against) == len(others) else Tally(None, reason, disputed=True)
