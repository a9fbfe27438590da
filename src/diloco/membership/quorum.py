"""Which survivors may continue when replicas are lost. Pure functions of known facts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from diloco.membership.values import View

_MOST_NAMED = 8  # members compare reasons, which are sent as strings of bounded length


@dataclass(frozen=True)
class Policy:
    """The conditions under which survivors may form a smaller view."""

    min_replicas: int = 1  # the fewest replicas that may continue after a loss; a growing view may have fewer
    # what a side of a partition does that can't reach members which may be continuing without it. ``stop``: only the
    # larger side continues, or of two halves the one with the lowest-numbered member. ``go-on``: any side continues
    # that has ``min_replicas`` of the old members. If that is more than half of all replicas, at most one side has
    # them.
    split: Literal["stop", "go-on"] = "stop"


class Decision(NamedTuple):
    """The members of the next view, or None if this side may not continue; and the reason."""

    members: tuple[int, ...] | None
    reason: str


def decide(
    view: View,
    *,
    lost: Collection[int],
    gone: Collection[int],
    joining: Collection[int],
    policy: Policy,
    left: Collection[int] = (),
) -> Decision:
    """Decide which members follow ``view``, of which some are ``lost``: they can't be reached, or have left.

    If all of these are known to have ended (``gone``), the survivors are all there are, and they continue. Under
    ``split="stop"``, a side that merely can't reach some members continues only with more than half of the view, or
    with half of it and the lowest-numbered member. So a network partition never makes two histories. Replicas that have
    ended stay in the count, as they may have continued with the silent ones before they ended. Those that ``left``
    announced it, and count as ended.

    >>> decide(View.of(3), lost={2}, gone=(), joining=(), policy=Policy())
    Decision(members=(0, 1), reason='replica 2 is lost; replicas 0, 1 continue')
    >>> decide(View.of(3), lost={0, 1}, gone=(), joining=(), policy=Policy()).members is None
    True
    >>> decide(View.of(3), lost={0, 1}, gone={0, 1}, joining=(), policy=Policy()).members
    (2,)
    >>> decide(View.of(3), lost={0, 1}, gone=(), joining=(), policy=Policy(split="go-on")).members
    (2,)
    """
    survivors = [member for member in view.members if member not in lost]
    silent = [member for member in view.members if member in lost and member not in gone and member not in left]
    members = tuple(sorted({*survivors, *joining}))
    half = len(view.members) / 2
    smaller = len(survivors) < half or (len(survivors) == half and view.members[0] in lost)
    if silent and policy.split == "stop" and smaller:
        return Decision(
            None,
            f"{names_of(silent)} can't be reached and may be continuing without {names_of(survivors)}, which "
            f"{'is' if len(survivors) == 1 else 'are'} the smaller side",
        )
    # Joiners may be on only one side of a partition, so they don't make up for lost members there.
    counted = survivors if silent and policy.split == "go-on" else members
    if lost and len(counted) < policy.min_replicas:
        return Decision(None, f"{len(counted)} of at least {policy.min_replicas} replicas are left")
    missed = [member for member in lost if member not in left]
    words = [f"{names_of(missed)} {'is' if len(missed) == 1 else 'are'} lost"] if missed else []
    words += [f"{names_of(left)} {'has' if len(left) == 1 else 'have'} left"] if left else []
    words += [f"{names_of(joining)} {'joins' if len(joining) == 1 else 'join'}"] if joining else []
    return Decision(
        members, "; ".join([*words, f"{names_of(members)} {'continues' if len(members) == 1 else 'continue'}"])
    )


def names_of(replicas: Collection[int]) -> str:
    """Name replicas for a message, at most eight of them."""
    names, more = ", ".join(map(str, sorted(replicas)[:_MOST_NAMED])), len(replicas) - _MOST_NAMED
    return f"replica{'s' if len(replicas) != 1 else ''} {names}{f' and {more} more' if more > 0 else ''}"


def byzantine_quorum(members: int) -> int:
    """Return how many of ``members`` must report the same of another one before it counts: f + 1, with n > 2 f.

    >>> [byzantine_quorum(members) for members in (1, 2, 3, 4, 5)]
    [1, 1, 2, 2, 3]
    """
    return (members - 1) // 2 + 1


def makes_one_history(policy: Policy, members: int) -> bool:
    """Return whether any two sets of ``members`` that may both continue under ``policy`` share a member.

    >>> makes_one_history(Policy(), 5), makes_one_history(Policy(2, "go-on"), 4)
    (True, False)
    """
    return policy.split == "stop" or 2 * policy.min_replicas > members


def enough_without(view: View, lost: Collection[int], policy: Policy) -> bool:
    """Return whether the other members of ``view`` may continue without the ``lost`` ones, which may still be running.

    >>> enough_without(View.of(3), {2}, Policy()), enough_without(View.of(3), {1, 2}, Policy())
    (True, False)
    """
    return decide(view, lost=lost, gone=(), joining=(), policy=policy).members is not None
