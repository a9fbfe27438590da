"""The settings of the protocol."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diloco.algorithm import RoundId
from diloco.membership import Policy

__all__ = ["Policies", "Rules"]


@dataclass(frozen=True)
class Rules:
    """The settings of one rank for its rounds."""

    rank: int  # the rank of this process
    replica: int
    ranks_per_replica: int  # S
    # a round with fewer contributions is void; None: all members that have the state are needed
    min_contributors: int | None
    # longest time from this rank's contribution to its vote, over all views that the round takes; time spent in view
    # changes is added, up to as much again
    round_timeout_s: float
    piece_bytes: int  # approximate size of a piece of a payload
    # a replica counts as late if it has not contributed to a round this long after this rank, or if its vote is due and
    # it has sent nothing for this long; None: never
    late_s: float | None = None
    # a connected rank from which nothing is received for this long is reported as unsteady for a while
    unsteady_s: float = 3.0
    # if a view change makes no progress for this long, the replicas that hold it up are excluded
    settle_s: float = 15.0

    @property
    def position(self) -> int:
        """The position of this rank in its replica."""
        return self.rank % self.ranks_per_replica

    def replica_of(self, rank: int) -> int:
        """Return the replica to which a rank belongs."""
        return rank // self.ranks_per_replica

    def ranks(self, replicas: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of these replicas, one replica after the other."""
        size = self.ranks_per_replica
        return tuple(rank for replica in replicas for rank in range(replica * size, (replica + 1) * size))


@dataclass(frozen=True)
class Policies:
    """What happens when replicas are lost, and how links are opened."""

    quorum: Policy  # which replicas may continue
    # whether survivors continue in a smaller view; otherwise all later rounds are void, or raise
    continue_without_lost: bool
    # whether a round that can't take place raises `ReplicaLostError`; otherwise it is void, and the owner checks
    # `Machine.views.failure`
    raise_on_loss: bool
    connect_timeout_s: float  # longest time to open one
    together: bool = True  # whether all ranks stop when one has to

    def raises(self, round_id: RoundId) -> bool:
        """Return whether a round that can't take place raises this rank's failure, rather than being void.

        Rounds of gradients always do: no step can be completed without gradients.
        """
        return self.raise_on_loss or round_id.fragment < 0
