"""The rules by which the ranks of a run exchange contributions and judge losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta

from diloco.algorithm import RoundId, check_ranges
from diloco.errors import ConfigurationError, nearest
from diloco.membership import Policy
from diloco.protocol.wire import check_facts

_Count = Annotated[int, Meta(ge=1)]
_Time = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Rules(Policy):
    """The rules of a run, independent of the network that carries its messages, and who this rank is.

    The time-outs form one hierarchy: two heartbeats fit into a silence, a silence into a round, and two silences into
    the time after which a contribution is late.
    """

    LOOKS: ClassVar[int] = 4  # what is awaited at one look, and still at the last of this many after it, is late

    rank: int = 0  # of this process; -1 for one that isn't a replica, such as a launcher
    ranks_per_replica: _Count = 1  # S
    heartbeat_s: _Time = 2.0  # the interval between two heartbeats
    # a rank counts as lost if nothing is received from it for this long, or no answer in a view change for half of it;
    # a ballot takes at most twice as long, and longer only after every member has been the proposer
    silence_s: _Time = 15.0
    # a replica counts as late if it has not contributed to a round this long after this rank; None: never
    late_s: Annotated[float | None, Meta(gt=0)] = None
    # longest time from this rank's contribution to its vote, over all views that the round takes; time spent in view
    # changes is added, up to as much again
    round_timeout_s: _Time = 600.0
    rendezvous_timeout_s: _Time = 300.0  # for all ranks to find and connect to each other
    # whether the survivors of a loss form a smaller view; otherwise all later rounds are void, or raise
    continue_without_lost: bool = False
    together: bool = True  # whether all ranks stop when one has to; otherwise it may search for the others and rejoin
    # whether a round that can't take place raises `ReplicaLostError`; otherwise it is void
    raise_on_loss: bool = True
    piece_bytes: _Count = 1 << 19  # approximate size of the pieces of a payload
    compress: bool = True  # whether payloads are compressed without loss on slow paths
    facts: Mapping[str, str] = field(default_factory=dict)  # what must be equal on all ranks: name -> displayed value

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self)
        if not 2 * self.heartbeat_s <= self.silence_s <= self.round_timeout_s:
            raise ConfigurationError(
                f"silence_s={self.silence_s} must be at least twice heartbeat_s={self.heartbeat_s}, or healthy "
                f"replicas would count as lost, and at most round_timeout_s={self.round_timeout_s}."
            )
        if self.late_s is not None and self.late_s < 2 * self.silence_s:
            raise ConfigurationError(
                f"late_s={self.late_s} must be at least twice silence_s={self.silence_s}, or a replica that is silent "
                "could count as late before it counts as lost."
            )
        if not isinstance(self.facts, Mapping) or not all(isinstance(text, str) for text in chain(*self.facts.items())):
            raise ConfigurationError(f"facts must be a mapping of names to texts, got {self.facts!r}.")
        check_facts(self.facts)

    @classmethod
    def of(cls, fields: Mapping[str, Any], **more: Any) -> Self:
        """Return the rules given by name; raise `ConfigurationError`, with the nearest name, for an unknown one."""
        known = [field.name for field in dataclasses.fields(cls) if field.name not in ("rank", "ranks_per_replica")]
        for name in fields:
            if name not in known:
                raise ConfigurationError(f"There is no argument {name!r}; {nearest(name, known)}")
        return cls(**{**more, **fields})

    @property
    def replica(self) -> int:
        return self.replica_of(self.rank)

    @property
    def position(self) -> int:
        return self.rank % self.ranks_per_replica

    def replica_of(self, rank: int) -> int:
        return rank // self.ranks_per_replica

    def ranks(self, replicas: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of these replicas, one replica after the other."""
        size = self.ranks_per_replica
        return tuple(rank for replica in replicas for rank in range(replica * size, (replica + 1) * size))

    @property
    def connect_timeout_s(self) -> float:
        """Longest time to open the first payload connection to a peer."""
        return min(self.rendezvous_timeout_s, max(10.0, 4 * self.silence_s))

    @property
    def guard_s(self) -> float:
        """Longer than any round takes unless there is an unforeseen fault."""
        return 3 * (self.round_timeout_s + self.silence_s)

    def raises(self, round_id: RoundId) -> bool:
        """Return whether a round that can't take place raises this rank's failure, rather than being void.

        Rounds of gradients always do: no step can be completed without gradients.
        """
        return self.raise_on_loss or round_id.fragment < 0
