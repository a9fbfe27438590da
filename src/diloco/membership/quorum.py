"""Who may go on when replicas are lost. Pure: every survivor computes the same from the same facts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from diloco.membership.view import View

__all__ = ["Decision", "Policy", "decide"]


@dataclass(frozen=True)
class Policy:
    """When survivors may form a smaller view.

    Attributes:
        min_replicas: fewer than this never go on.
    """

    min_replicas: int = 1


class Decision(NamedTuple):
    """The members of the next view, or None when this side may not go on; and why."""

    members: tuple[int, ...] | None
    reason: str


def decide(
    view: View, *, lost: Collection[int], gone: Collection[int], joining: Collection[int], policy: Policy
) -> Decision:
    """The next view's members.

    Where every lost replica is known to have ended (``gone``), the survivors are all there are, and go on. A side that
    merely lost sight of some may go on only with more than half of the view, or with half of it and the lowest-numbered
    member: so a network that falls apart never makes two histories. Replicas that have ended count for that as well, as
    they may have gone on with the silent ones before they did.

    Args:
        view: the present one.
        lost: members that can't be reached.
        gone: those of them that are known to have ended.
        joining: replicas that want to be members from the next view on.
        policy: of the run.

    >>> decide(View.of(3), lost={2}, gone=(), joining=(), policy=Policy())
    Decision(members=(0, 1), reason='replica 2 is lost; replicas 0, 1 go on')
    >>> decide(View.of(3), lost={0, 1}, gone=(), joining=(), policy=Policy()).members is None
    True
    >>> decide(View.of(3), lost={0, 1}, gone={0, 1}, joining=(), policy=Policy()).members
    (2,)
    """
    survivors = [member for member in view.members if member not in lost]
    silent = [member for member in view.members if member in lost and member not in gone]
    members = tuple(sorted({*survivors, *joining}))
    half = len(view.members) / 2
    if silent and (len(survivors) < half or (len(survivors) == half and view.members[0] in lost)):
        return Decision(
            None,
            f"{_named(silent)} can't be reached and may be going on without {_named(survivors)}, which "
            f"{'is' if len(survivors) == 1 else 'are'} the smaller side",
        )
    if len(members) < policy.min_replicas:
        return Decision(None, f"{len(members)} of at least {policy.min_replicas} replicas are left")
    words = [f"{_named(lost)} {'is' if len(lost) == 1 else 'are'} lost"] if lost else []
    words += [f"{_named(joining)} {'joins' if len(joining) == 1 else 'join'}"] if joining else []
    return Decision(members, "; ".join([*words, f"{_named(members)} go on"]))


def _named(replicas: Collection[int]) -> str:
    return f"replica{'s' if len(replicas) != 1 else ''} {', '.join(map(str, sorted(replicas)))}"
