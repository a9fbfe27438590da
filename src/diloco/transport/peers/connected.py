"""The settings of a connection between replicas, a connected transport, and joining a running run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Any, Literal, Self, get_args

from diloco.algorithm import check_choice, check_whole
from diloco.errors import ConfigurationError, RendezvousError, nearest
from diloco.membership import Policy
from diloco.protocol import Entry, Policies, Rules, Welcome
from diloco.transport.connections.limits import Backoff
from diloco.transport.peers.transport import PeerTransport

__all__ = ["Connected", "Table", "Wire", "join"]

Split = Literal["stop", "go-on"]

_ANSWER_S = 30.0
_AGAIN_S = 0.3, 2.0  # pauses between two requests to join


@dataclass(frozen=True)
class Table:
    """The entries of all ranks."""

    entries: dict[int, Entry]  # by rank, this rank's own included
    running: bool  # whether the run had already begun when this rank asked
    step: int = 0  # inner steps done by then, if the network reports them
    founded_step: int = 0  # step of the checkpoint from which the run was resumed, if the network reports it


@dataclass(frozen=True)
class Connected:
    """A transport that is connected to the other ranks."""

    transport: PeerTransport  # ready for rounds; for a joiner, ready for `fetch` and then `join`
    table: Table
    joining: bool  # whether the run had already begun
    swarm: str = ""  # name of the swarm, if there is one

    def refresh(self) -> None:
        """Look up the current members and connect to all of them. Only a joiner needs this."""

    def finish(self) -> None:
        """Announce to late joiners and replicas that are not members at present that the run has ended."""

    def already_running(self) -> RendezvousError:
        """Return the error for a replica that was to start a run and found it already running."""
        return RendezvousError(
            f"replica {self.transport.replica} was to start a run, but the other replicas are already running one. "
            "Choose another rendezvous, or join the run."
        )


def join(connected: Connected, timeout_s: float) -> int:
    """Become a member of the running run.

    Returns:
        The number of inner steps that are done. The joiner's first step is the next one.

    Raises:
        RendezvousError: The members refuse, or do not answer in time.
    """
    transport, entry = connected.transport, connected.table.entries[connected.transport.rules.rank]
    deadline_s = time.monotonic() + timeout_s
    why, backoff = f"no answer within {timeout_s:g} s", Backoff(*_AGAIN_S, seed=entry.address)
    while True:
        answer = transport.ask_to_join(entry, min(_ANSWER_S, deadline_s - time.monotonic()))
        final = False
        if answer is not None:
            said, _ = answer
            if isinstance(said, Welcome):
                break
            why = f"the members refuse: {said.reason}"
            final = said.for_good and not connected.swarm  # another member may let it in
        if time.monotonic() > deadline_s or final:
            raise RendezvousError(f"replica {transport.replica} can't join the run: {why}. It stops here.")
        time.sleep(backoff.next_s())  # the members are not ready for it yet
        connected.refresh()
    transport.enter(answer)
    return transport.step


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Settings for the exchange of contributions between ranks, independent of the network that carries them."""

    piece_bytes: int = 1 << 19  # approximate size of the pieces of a payload
    heartbeat_s: float = 2.0  # see `Timing`, as for the next one
    silence_s: float = 15.0
    round_timeout_s: float = 600.0  # from a rank's contribution to its vote
    rendezvous_timeout_s: float = 300.0  # for all ranks to find and connect to each other
    min_contributors: int | None = None  # a round with fewer is void; None: all are needed
    min_replicas: int = 1  # least number of replicas with which a run continues
    continue_without_lost: bool = False  # whether the survivors of a loss form a smaller view
    # whether a replica that has lost its view searches for the others; otherwise it stops, and with it all others
    comes_back: bool = False
    # a replica that contributes this much later than this rank is left behind; None: never
    late_s: float | None = None
    split: Split = "stop"  # what the smaller side of a partitioned network does
    raise_on_loss: bool = True  # see `Policies`
    compress: bool = True  # whether payloads are compressed without loss on slow paths
    facts: Mapping[str, str] = field(default_factory=dict)  # what must be equal on all ranks: name -> displayed value

    def __post_init__(self) -> None:
        for name, least in (("piece_bytes", 1), ("min_replicas", 1), ("min_contributors", 1)):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least)
        for name in ("heartbeat_s", "silence_s", "round_timeout_s", "rendezvous_timeout_s", "late_s"):
            value = getattr(self, name)
            if not (value is None and name == "late_s") and not (isinstance(value, Real) and float(value) > 0):
                raise ConfigurationError(f"{name} must be more than 0 s, got {value!r}.")
        check_choice("split", self.split, get_args(Split))
        if not isinstance(self.facts, Mapping) or not all(isinstance(each, str) for each in chain(*self.facts.items())):
            raise ConfigurationError(f"facts must be a mapping of names to texts, got {self.facts!r}.")
        if self.heartbeat_s > self.silence_s / 2:
            raise ConfigurationError(
                f"heartbeat_s={self.heartbeat_s} is too long for silence_s={self.silence_s}. It must be at most half "
                "of it, or healthy replicas would count as lost."
            )

    @classmethod
    def of(cls, fields: Mapping[str, Any], **more: Any) -> Self:
        """Return the settings given by name; raise `ConfigurationError`, with the nearest name, for an unknown one."""
        known = [each.name for each in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ConfigurationError(f"There is no argument {name!r}; {nearest(name, known)}")
        return cls(**{**more, **fields})

    def rules_and_policies(
        self, replica: int, position: int, ranks_per_replica: int, others: int
    ) -> tuple[Rules, Policies]:
        """Return the settings of rounds and of views for one rank of ``others + 1`` replicas."""
        rules = Rules(
            rank=replica * ranks_per_replica + position,
            replica=replica,
            ranks_per_replica=ranks_per_replica,
            min_contributors=self.min_contributors,
            round_timeout_s=self.round_timeout_s,
            piece_bytes=self.piece_bytes,
            late_s=self.late_s,
            unsteady_s=1.5 * self.heartbeat_s,
            settle_s=self.silence_s,
        )
        policies = Policies(
            quorum=Policy(self.min_replicas, self.split),
            continue_without_lost=self.continue_without_lost,
            raise_on_loss=self.raise_on_loss,
            connect_timeout_s=min(self.rendezvous_timeout_s, max(10.0, 4 * self.silence_s)),
        )
        return rules, policies
