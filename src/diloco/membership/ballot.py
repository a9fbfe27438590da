"""Votes: a round is applied by every replica of its view or by none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["Tally", "Vote", "tally"]


@dataclass(frozen=True)
class Vote:
    """What one member says about a round, once and for good.

    Attributes:
        ok: whether it holds the average and is ready to apply it.
        digest: of the average it holds; "" when not ok.
        reason: why not; "" when ok.
    """

    ok: bool
    digest: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Tally:
    """Where a round stands.

    Attributes:
        committed: True: applied by all; False: void for all; None: not decided yet.
        reason: why it is void.
    """

    committed: bool | None
    reason: str = ""


def tally(voters: Collection[int], votes: Mapping[int, Vote], *, groups: Mapping[int, int] | None = None) -> Tally:
    """The decision of ``voters``; one vote against is enough, and all votes for the same average are needed.

    Args:
        voters: everybody whose vote counts.
        votes: those that have come.
        groups: voter -> the group within which digests must be equal (ranks at the same position of their replicas
            hold the same shard); None: all are one group.

    >>> tally([0, 1], {0: Vote(True, "a")})
    Tally(committed=None, reason='')
    >>> tally([0, 1], {0: Vote(True, "a"), 1: Vote(True, "b")}).reason
    '0 holds another average than 1'
    """
    for voter in sorted(votes):
        if voter in voters and not votes[voter].ok:
            return Tally(False, votes[voter].reason)
    if any(voter not in votes for voter in voters):
        return Tally(None)
    firsts: dict[int, int] = {}
    for voter in sorted(voters):
        first = firsts.setdefault(groups[voter] if groups else 0, voter)
        if votes[first].digest != votes[voter].digest:
            return Tally(False, f"{first} holds another average than {voter}")
    return Tally(True)
