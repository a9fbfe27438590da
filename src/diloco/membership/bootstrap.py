"""Who founds a run that begins, or begins again: a cold start, in which nobody is a member."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from diloco.membership.values import GREATEST, Rank


@dataclass(frozen=True)
class Candidate:
    """The announcement of a replica that searches for the others."""

    number: Rank  # the replica's number
    held_step: Annotated[int, Meta(ge=-1, le=GREATEST)] = -1  # the newest step that it could resume from; -1 for none
    founds: bool = True  # whether it may found a view


def choose_founder(looking: Iterable[Candidate]) -> int | None:
    """Return the number of the replica that founds the first view, of those that look for one; None: none may.

    It is the one with the newest step; of several, the one with the lowest number.

    >>> choose_founder([Candidate(2, 150), Candidate(1, 100), Candidate(0, 150), Candidate(3, 200, founds=False)])
    0
    """
    may = [(-each.held_step, each.number) for each in looking if each.founds]
    return min(may)[1] if may else None
