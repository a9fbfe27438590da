"""A transport for M replicas in one process, which take turns in one thread or run in one thread each.

Both are deterministic. With one thread, begin a step on every replica before finishing it on any (`DiLoCo.begin`,
`DiLoCo.finish`), because the last contribution decides the round. The average of a round is computed once and shared.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from diloco.algorithm import Contribution, RoundId, check_replica, check_type, check_whole
from diloco.errors import ConfigurationError, RoundTimeoutError, TransportError
from diloco.membership import View
from diloco.protocol import Average, Entry, difference
from diloco.transport.base import Pending, SnapshotSource, Transport
from diloco.transport.emulated_rounds import EmulatedRounds
from diloco.transport.injected_faults import Fault
from diloco.transport.links import VirtualNetwork

__all__ = ["InProcessEndpoint", "InProcessTransport"]


class InProcessTransport:
    """The hub that connects ``num_replicas`` replicas; each replica uses its own `endpoint`.

    Args:
        num_replicas: M.
        min_contributors: a round with fewer usable contributions is void; the default is all M.
        round_timeout_s: a contribution that would be later than this, in virtual seconds, counts as missing. It is also
            the longest time, in real seconds, that `Pending.wait` waits for replicas in other threads.
        network: emulated links on a virtual clock; None means that payloads arrive at once.
        faults: the faults to inject.

    >>> import torch
    >>> from diloco.algorithm import make_codec
    >>> transport, codec = InProcessTransport(2), make_codec("float32")
    >>> def contribution(replica: int, value: float) -> Contribution:
    ...     payload = codec.encode(torch.tensor([value]))
    ...     return Contribution(round=RoundId(0, 0), replica=replica, codec=codec, numel=1, payload=payload)
    >>> pending = [transport.endpoint(m).average(contribution(m, float(m))) for m in (0, 1)]
    >>> [p.wait().values.item() for p in pending]
    [0.5, 0.5]
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        min_contributors: int | None = None,
        round_timeout_s: float = 600.0,
        network: VirtualNetwork | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        num_replicas = check_whole("num_replicas", num_replicas, 1)
        check_type("network", network, VirtualNetwork | None, "a VirtualNetwork")
        for fault in faults:
            check_type("each of faults", fault, Fault, "a Fault(...)")
        if network is not None and len(network.links) != num_replicas:
            raise ConfigurationError(
                f"The network must have one link per replica, got {len(network.links)} links for {num_replicas} "
                "replicas."
            )
        check_type("round_timeout_s", round_timeout_s, Real, "a number of seconds")
        if not round_timeout_s >= 0:
            raise ConfigurationError(f"round_timeout_s must be at least 0, got {round_timeout_s}.")
        self.view = View.of(num_replicas)
        enough = num_replicas if min_contributors is None else check_whole("min_contributors", min_contributors)
        if not 1 <= enough <= num_replicas:
            raise ConfigurationError(
                f"min_contributors must be between 1 and {num_replicas}, the number of replicas, got "
                f"{min_contributors}."
            )
        self.rounds = EmulatedRounds(self.view, enough, round_timeout_s, network, faults)
        self.changed = threading.Condition()
        self._facts: dict[int, Mapping[str, str]] = {}
        self._refusal = ""
        self.sources: dict[int, SnapshotSource] = {}
        self.threads: dict[int, int] = {}
        self._endpoints = tuple(InProcessEndpoint(self, replica) for replica in self.view.members)

    def endpoint(self, replica: int) -> InProcessEndpoint:
        """Return the transport that replica number ``replica`` uses."""
        return self._endpoints[check_replica(replica, len(self._endpoints))]

    def state_dict(self) -> dict[str, Any]:
        """Return traffic counters, clocks, links and decided rounds.

        The replicas that sent contributions in flight save them.
        """
        return {
            "traffic": [[endpoint.sent_bytes, endpoint.received_bytes] for endpoint in self._endpoints],
            **self.rounds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. The replicas then resubmit their contributions in flight."""
        for endpoint, (sent_bytes, received_bytes) in zip(self._endpoints, state["traffic"], strict=True):
            endpoint.sent_bytes, endpoint.received_bytes = int(sent_bytes), int(received_bytes)
        self.rounds.load_state_dict(state)

    # Endpoints call the methods below, always holding `changed`.

    def agree(self, replica: int, facts: Mapping[str, str]) -> None:
        """Compare facts with replicas that have sent theirs, which raise for a difference at their next exchange."""
        if self._facts.get(replica, facts) != facts:
            self._facts.clear()  # this replica restarts with other facts, and so will the others
        self._facts[replica] = facts
        entries = [Entry(other, "", theirs) for other, theirs in sorted(self._facts.items())]
        reason = next(filter(None, (difference(entries[0], entry) for entry in entries)), "")
        self._refusal = f"{reason}. All replicas must pass the same arguments to DiLoCo." if reason else ""
        self.changed.notify_all()
        self._refuse()

    def _refuse(self) -> None:
        if self._refusal:
            raise ConfigurationError(self._refusal)

    def accept(self, contribution: Contribution) -> None:
        """Record a contribution; the last one decides the round."""
        self._refuse()
        if self.rounds.accept(contribution):
            self.changed.notify_all()

    def take(self, replica: int, round_id: RoundId, timeout_s: float | None) -> Average:
        """Wait until a round is decided and return its average for ``replica``."""
        self._wait(replica, round_id, self.rounds.timeout_s if timeout_s is None else timeout_s)
        sent_bytes, received_bytes = self.rounds.bytes_of(replica, round_id)
        endpoint = self._endpoints[replica]
        endpoint.sent_bytes += sent_bytes
        endpoint.received_bytes += received_bytes
        return self.rounds.take(replica, round_id)

    def fetch(self, fragment: int, donors: Sequence[int]) -> Mapping[str, Any]:
        for donor in donors:
            if donor in self.sources:
                return self.sources[donor](fragment)
        asked = ", ".join(map(str, donors))
        raise TransportError(
            f"replica {asked} was asked for fragment {fragment}, but it has published nothing.", replicas=donors
        )

    def _wait(self, replica: int, round_id: RoundId, timeout_s: float) -> None:
        missing = self.rounds.missing(replica, round_id)
        thread = threading.get_ident()
        if missing and (threading.active_count() == 1 or any(self.threads.get(each) == thread for each in missing)):
            raise RoundTimeoutError(
                f"Replica {replica} would wait forever for {round_id}: replica {missing[0]} has not sent its "
                "contribution and runs in the same thread. Call begin() on every replica before finish() on any, or "
                "run each replica in its own thread.",
                round=str(round_id),
                replicas=missing,
            )
        limit_s = timeout_s if math.isfinite(timeout_s) else None
        self.changed.wait_for(lambda: self._refusal or not self.rounds.missing(replica, round_id), limit_s)
        self._refuse()
        if missing := self.rounds.missing(replica, round_id):
            raise RoundTimeoutError(
                f"{round_id} was not decided within {timeout_s:g} s: no contribution arrived from replica "
                f"{', '.join(map(str, missing))}. Nothing was applied.",
                round=str(round_id),
                replicas=missing,
            )


class InProcessEndpoint(Transport):
    """One replica's side of an `InProcessTransport`."""

    def __init__(self, hub: InProcessTransport, replica: int) -> None:
        self.hub = hub
        self.replica = replica
        self.view = hub.view

    def average(self, contribution: Contribution) -> Pending:
        self.check_name(contribution)
        with self.hub.changed:
            self.hub.threads[self.replica] = threading.get_ident()
            self.hub.accept(contribution)
        return _InProcessPending(self, contribution.round)

    def agree(self, facts: Mapping[str, str]) -> None:
        with self.hub.changed:
            self.hub.agree(self.replica, facts)

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        with self.hub.changed:
            self.hub.sources[self.replica] = source

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Mapping[str, Any]:
        with self.hub.changed:
            return _copied(self.hub.fetch(fragment, donors))

    def tick(self) -> None:
        with self.hub.changed:
            self.hub.threads[self.replica] = threading.get_ident()
            self.hub.rounds.tick(self.replica)


@dataclass(frozen=True)
class _InProcessPending:
    endpoint: InProcessEndpoint
    round: RoundId

    def wait(self, timeout_s: float | None = None) -> Average:
        with self.endpoint.hub.changed:
            return self.endpoint.hub.take(self.endpoint.replica, self.round, timeout_s)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    return {**state, **tensors, **{name: _copied(value) for name, value in state.items() if isinstance(value, Mapping)}}
