"""The settings of the protocol, and the words for replicas that are late, lost or left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from diloco.algorithm.averaging import RoundId
from diloco.errors import ReplicaLostError
from diloco.membership.quorum import Policy, names_of
from diloco.membership.reports import NextView
from diloco.protocol.conduct import Conduct

__all__ = [
    "Policies",
    "Rules",
    "disputed_reason",
    "exclusion_reason",
    "expired_reason",
    "late_reason",
    "missing_votes_reason",
    "spoilt_reason",
    "stop_error",
]


@dataclass(frozen=True)
class Rules:
    """How rounds go."""

    rank: int  # of this process
    replica: int
    ranks_per_replica: int  # S
    min_contributors: int | None  # a round with fewer is void; None: all that have the state
    # from this rank's contribution to its vote, over all views that the round takes; changes of the view come on top,
    # up to as much again
    round_timeout_s: float
    piece_bytes: int  # about how large a piece of a payload is
    secret: bytes = field(repr=False)  # 32 random bytes of this process alone: what it signs its votes with
    # a replica counts as late if it has not contributed to a round this long after this rank, or if its vote is due and
    # it has sent nothing for so long; None: never
    late_s: float | None = None
    # of a rank from which nothing has come for so long, though its connection stands, this one says so for a while
    unsteady_s: float = 3.0
    settle_s: float = 15.0  # where nothing new comes for so long, those who keep a change of views from its end go

    @property
    def position(self) -> int:
        """Of this rank in its replica."""
        return self.rank % self.ranks_per_replica

    def replica_of(self, rank: int) -> int:
        """The replica that a rank belongs to."""
        return rank // self.ranks_per_replica

    def ranks(self, replicas: Iterable[int]) -> tuple[int, ...]:
        """The ranks of these replicas, one replica after the other."""
        size = self.ranks_per_replica
        return tuple(rank for replica in replicas for rank in range(replica * size, (replica + 1) * size))


@dataclass(frozen=True)
class Policies:
    """What happens when replicas are lost, and how links are made."""

    quorum: Policy  # which replicas may go on
    go_on: bool  # whether survivors go on in a smaller view; else all later rounds are void, or raise
    # whether a round that can't take place raises `ReplicaLostError`; else it is void, and the owner checks
    # `ViewManager.failure`
    raise_on_loss: bool
    streams: int  # payload connections to each peer
    connect_timeout_s: float  # the longest that making one may take
    together: bool = True  # whether all ranks stop when one has to

    def raises(self, round_id: RoundId) -> bool:
        """Whether a round that can't take place raises this rank's failure, rather than being void.

        Rounds of gradients always do: without gradients no step can be finished.
        """
        return self.raise_on_loss or round_id.fragment < 0


def late_reason(round_id: RoundId, absent: frozenset[int], silent: frozenset[int], late_s: float) -> str:
    """Why replicas are given up as late.

    >>> late_reason(RoundId(0, 3), frozenset({1}), frozenset({2}), 5.0)
    'replica 1 is late: no contribution to fragment 0, outer step 3 came within 5 s; replica 2 is late: no vote on \
fragment 0, outer step 3 and nothing else came within 5 s'
    """
    waited_for = [(absent, f"no contribution to {round_id}"), (silent, f"no vote on {round_id} and nothing else")]
    return "; ".join(
        f"{names_of(late)} {'are' if len(late) > 1 else 'is'} late: {what} came within {late_s:g} s"
        for late, what in waited_for
        if late
    )


def missing_votes_reason(round_id: RoundId, owing: frozenset[int], timeout_s: float) -> str:
    """Why replicas are given up that answer, and do not vote.

    >>> missing_votes_reason(RoundId(0, 3), frozenset({1, 2}), 600.0)
    'replicas 1, 2 have not voted on fragment 0, outer step 3 within 600 s'
    """
    return f"{names_of(owing)} {'have' if len(owing) > 1 else 'has'} not voted on {round_id} within {timeout_s:g} s"


def spoilt_reason(spoilers: frozenset[int], reason: str) -> str:
    """Why replicas are given up that contribute what nobody can use; ``reason``: the last time.

    >>> spoilt_reason(frozenset({2}), "the contribution of replica 2 was refused: has the weight nan")
    'replica 2 has spoilt 3 rounds or more lately: the contribution of replica 2 was refused: has the weight nan'
    """
    has = "have" if len(spoilers) > 1 else "has"
    return f"{names_of(spoilers)} {has} spoilt {Conduct.MOST_SPOILT} rounds or more lately: {reason}"


def disputed_reason(round_id: RoundId, reason: str) -> str:
    """Why a view ends of which some may have committed a round, and some may not.

    >>> disputed_reason(RoundId(0, 3), "rank 2 holds a different average than rank 0")
    'fragment 0, outer step 3 is disputed: rank 2 holds a different average than rank 0'
    """
    return f"{round_id} is disputed: {reason}"


def expired_reason(missing: Sequence[int], rules: Rules) -> str:
    """Why a rank votes against a round that took too long; ``missing``: replicas whose contributions did not come.

    >>> expired_reason((1, 2), Rules(0, 0, 1, None, 5.0, 1 << 19, b"s"))
    'nothing was heard of replicas 1, 2 within 5 s (replica 0 waited)'
    """
    waited_for = names_of(missing) if missing else "the payloads"
    return f"nothing was heard of {waited_for} within {rules.round_timeout_s:g} s (replica {rules.replica} waited)"


def stop_error(following: NextView, lost: Sequence[int], why: str, policies: Policies) -> ReplicaLostError | None:
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


def exclusion_reason(replica: int, reason: str, policies: Policies) -> str:
    """What the others did without ``replica``, in words."""
    return f"the others {'went on' if policies.go_on else 'stopped'} without replica {replica}: {reason}."
