"""How ranks exchange contributions: what can be chosen, whatever carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from diloco.algorithm.numbers import check_whole
from diloco.errors import ConfigurationError
from diloco.membership.quorum import Policy
from diloco.protocol.rules import Policies, Rules
from diloco.transport.links import Link
from diloco.transport.shaping import congestion_control, streams_to_each

__all__ = ["Wire"]


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How ranks exchange contributions, whatever carries them.

    Attributes:
        streams: payload connections to each peer; 0: as many as suit this machine's congestion control.
        piece_bytes: about how large a piece of a payload is.
        heartbeat_s, silence_s: see `Timing`.
        round_timeout_s: from a rank's contribution to its vote.
        rendezvous_timeout_s: for all to find and connect each other.
        min_contributors: a round with fewer is void; None: all.
        min_replicas: fewer never go on.
        go_on: whether survivors form a smaller view.
        comes_back: whether a replica that has lost its view looks for the others; else it stops, and all with it.
        late_s: a replica whose contribution is so much later than this rank's own is left behind; None: never.
        split: whether the smaller side of a network that fell apart goes on.
        raise_on_loss: see `Policies`.
        link: emulated at this end, or None.
        state_bytes_per_s: what those who take over this rank's state get together; None: as much as the way carries.
        facts: what must be the same on all ranks, name -> value in words.
    """

    streams: int = 0
    piece_bytes: int = 1 << 19
    heartbeat_s: float = 2.0
    silence_s: float = 15.0
    round_timeout_s: float = 600.0
    rendezvous_timeout_s: float = 300.0
    min_contributors: int | None = None
    min_replicas: int = 1
    go_on: bool = False
    comes_back: bool = False
    late_s: float | None = None
    split: Literal["stop", "go-on"] = "stop"
    raise_on_loss: bool = True
    link: Link | None = None
    state_bytes_per_s: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("streams", 0), ("piece_bytes", 1), ("min_replicas", 1), ("min_contributors", 1)):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least)
        for name in ("heartbeat_s", "silence_s", "round_timeout_s", "rendezvous_timeout_s", "late_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigurationError(f"{name}={value} was given; more than 0 s would work. Nothing was started.")
        if self.heartbeat_s > self.silence_s / 2:
            raise ConfigurationError(
                f"heartbeat_s={self.heartbeat_s} was given with silence_s={self.silence_s}; two heartbeats must fit "
                "into a silence, or replicas that are well count as lost. Nothing was started."
            )

    def rules_and_policies(
        self, replica: int, position: int, ranks_per_replica: int, others: int
    ) -> tuple[Rules, Policies]:
        """What rounds and views need to know, for one rank of ``others + 1`` replicas."""
        rules = Rules(
            rank=replica * ranks_per_replica + position,
            replica=replica,
            ranks_per_replica=ranks_per_replica,
            min_contributors=self.min_contributors,
            round_timeout_s=self.round_timeout_s,
            piece_bytes=self.piece_bytes,
            late_s=self.late_s,
        )
        policies = Policies(
            quorum=Policy(self.min_replicas, self.split),
            go_on=self.go_on,
            raise_on_loss=self.raise_on_loss,
            streams=self.streams or streams_to_each(others, congestion_control()),
            connect_timeout_s=min(self.rendezvous_timeout_s, max(10.0, 4 * self.silence_s)),
        )
        return rules, policies
