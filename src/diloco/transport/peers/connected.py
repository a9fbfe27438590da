"""How a transport is to be connected, a connected transport, and becoming a member of a run that is going on."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from diloco.algorithm.numbers import check_whole
from diloco.errors import ConfigurationError, RendezvousError
from diloco.membership.quorum import Policy
from diloco.protocol.registry import Entry
from diloco.protocol.rules import Policies, Rules
from diloco.protocol.signing import SECRET_BYTES
from diloco.transport.links import Link
from diloco.transport.peers.transport import PeerTransport

__all__ = ["Connected", "Table", "Wire", "join"]

_ANSWER_S = 30.0
_AGAIN_S = 0.3


@dataclass(frozen=True)
class Table:
    """Everybody's entries."""

    entries: dict[int, Entry]  # rank -> entry, my own included
    running: bool  # whether the run was going on already when I asked
    step: int = 0  # inner steps that were done then, where the network tells
    founded_step: int = 0  # that of the checkpoint which the run went on from, where the network tells


@dataclass(frozen=True)
class Connected:
    """A transport that is connected to the others."""

    transport: PeerTransport  # ready for rounds, or, for a joiner, for `fetch` and then `join`
    table: Table
    joining: bool  # whether the run was going on already
    swarm: str = ""  # name of the swarm, where it has one

    def refresh(self) -> None:
        """For a joiner: look who the members are by now, and connect to all of them."""

    def finish(self) -> None:
        """Tell those who come later, or are not members now, that the run is over."""

    def already_running(self) -> RendezvousError:
        """For a replica that came to begin a run, and found one that is going on."""
        return RendezvousError(
            f"replica {self.transport.replica} came to begin a run, and the others are in the middle of one. Choose "
            "another rendezvous, or join them."
        )


def join(connected: Connected, timeout_s: float) -> int:
    """Become a member of the run that is going on.

    Returns:
        The inner steps that are done: the joiner's own first step is the one after.

    Raises:
        RendezvousError: if the members refuse, or do not answer in time.
    """
    transport, entry = connected.transport, connected.table.entries[connected.transport.rules.rank]
    deadline_s = time.monotonic() + timeout_s
    why = f"no answer within {timeout_s:g} s"
    while True:
        answer = transport.ask_to_join(entry, min(_ANSWER_S, deadline_s - time.monotonic()))
        if answer is not None and answer[0]["kind"] == "welcome":
            break
        why = f"they refuse: {answer[0]['reason']}" if answer else why
        final = answer is not None and answer[0]["for_good"] and not connected.swarm  # another member may let it in
        if time.monotonic() > deadline_s or final:
            raise RendezvousError(f"replica {transport.replica} can't join the others: {why}. It stops here.")
        time.sleep(_AGAIN_S)  # they are not ready for it yet
        connected.refresh()
    transport.enter(answer)
    return transport.step


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How ranks exchange contributions, whatever carries them."""

    streams: int = 0  # payload connections to each peer; 0: as many as suit this machine's congestion control
    piece_bytes: int = 1 << 19  # about how large a piece of a payload is
    heartbeat_s: float = 2.0  # this and the next: see `Timing`
    silence_s: float = 15.0
    round_timeout_s: float = 600.0  # from a rank's contribution to its vote
    rendezvous_timeout_s: float = 300.0  # for all to find and connect each other
    min_contributors: int | None = None  # a round with fewer is void; None: all
    min_replicas: int = 1  # fewer never go on
    go_on: bool = False  # whether survivors form a smaller view
    # whether a replica that has lost its view looks for the others; else it stops, and all with it
    comes_back: bool = False
    # a replica whose contribution is so much later than this rank's own is left behind; None: never
    late_s: float | None = None
    split: Literal["stop", "go-on"] = "stop"  # whether the smaller side of a network that fell apart goes on
    raise_on_loss: bool = True  # see `Policies`
    link: Link | None = None  # emulated at this end, or None
    pace: bool = True  # whether payloads leave at no more than the rate that the way out has shown
    # what those who take over this rank's state get together; None: as much as the way carries
    state_bytes_per_s: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict)  # what must be the same on all ranks, name -> value in words

    def __post_init__(self) -> None:
        for name, least in (("streams", 0), ("piece_bytes", 1), ("min_replicas", 1), ("min_contributors", 1)):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least)
        for name in ("heartbeat_s", "silence_s", "round_timeout_s", "rendezvous_timeout_s", "late_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigurationError(f"{name}={value} was given. It must be more than 0 s.")
        if self.heartbeat_s > self.silence_s / 2:
            raise ConfigurationError(
                f"heartbeat_s={self.heartbeat_s} was given with silence_s={self.silence_s}. Two heartbeats must fit "
                "into a silence, or healthy replicas count as lost."
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
            secret=secrets.token_bytes(SECRET_BYTES),
            late_s=self.late_s,
            unsteady_s=1.5 * self.heartbeat_s,
            settle_s=self.silence_s,
        )
        policies = Policies(
            quorum=Policy(self.min_replicas, self.split),
            go_on=self.go_on,
            raise_on_loss=self.raise_on_loss,
            streams=self.streams,
            connect_timeout_s=min(self.rendezvous_timeout_s, max(10.0, 4 * self.silence_s)),
        )
        return rules, policies
