"""What the owner of a transport chooses of views, and what a rank says when it stops by that choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.errors import ReplicaLostError
from diloco.membership.change import NextView
from diloco.membership.quorum import Policy

__all__ = ["Policies", "left_out", "stopped"]


@dataclass(frozen=True)
class Policies:
    """What happens when replicas are lost, and how links are made.

    Attributes:
        quorum: who may go on.
        go_on: whether survivors go on in a smaller view; else every round from then on is void, or raises.
        raise_on_loss: whether a round that can't take place raises `ReplicaLostError`; else it is void, and the owner
            looks at `ViewKeeper.failure` itself.
        streams: payload connections to each peer.
        connect_timeout_s: the longest that making one may take.
    """

    quorum: Policy
    go_on: bool
    raise_on_loss: bool
    streams: int
    connect_timeout_s: float


def stopped(following: NextView, lost: Sequence[int], why: str, policies: Policies) -> ReplicaLostError | None:
    """Why nobody of this side goes on after ``lost`` were lost, or None if they do.

    Args:
        following: what was adopted.
        lost: members of the view that ended.
        why: what happened, in words.
        policies: of the run.
    """
    if following.view is not None and (policies.go_on or not lost):
        return None
    side = f"{why}: {following.reason}" if following.view is None else f"{why}; all replicas stop when one is lost"
    return ReplicaLostError(f"{side}. What was committed stands.", replicas=lost)


def left_out(replica: int, reason: str, policies: Policies) -> str:
    """What the others did without ``replica``, in words."""
    return f"the others {'went on' if policies.go_on else 'stopped'} without replica {replica}: {reason}."
