"""M replicas in one process: they take turns in one thread, or run in a thread each; deterministic either way.

In one thread, begin a step on every replica before finishing it on any (`DiLoCo.begin`, `DiLoCo.finish`), since the
round is decided when the last contribution is in. The average of a round is computed once and shared.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.algorithm.numbers import check_whole
from diloco.errors import ConfigurationError, RoundTimeoutError, TransportError
from diloco.membership.view import View
from diloco.protocol.actions import Average
from diloco.protocol.registry import Entry, difference
from diloco.transport.base import Pending, SnapshotSource, Transport
from diloco.transport.emulated_rounds import EmulatedRounds
from diloco.transport.faults import Fault
from diloco.transport.links import VirtualNetwork

__all__ = ["InProcessEndpoint", "InProcessTransport"]


class InProcessTransport:
    """The meeting place of ``num_replicas`` replicas; each uses its `endpoint`.

    Args:
        num_replicas: M.
        min_contributors: a round with fewer usable contributions is void; default: all of them.
        round_timeout_s: a contribution that would be later than this, in virtual seconds, counts as not arrived; and
            the longest that `Pending.wait` waits in real seconds for replicas in other threads.
        network: emulated links on a virtual clock; None: payloads arrive at once.
        faults: what goes wrong, as data.

    >>> import torch
    >>> from diloco.algorithm.codec import make_codec
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
        if network is not None and len(network.links) != num_replicas:
            raise ConfigurationError(
                f"a network of {len(network.links)} links was given for {num_replicas} replicas. It needs one link for "
                "each."
            )
        num_replicas = check_whole("num_replicas", num_replicas, 1)
        if not round_timeout_s >= 0:
            raise ConfigurationError(f"round_timeout_s={round_timeout_s} was given. Use 0 or more.")
        self.view = View.of(num_replicas)
        enough = num_replicas if min_contributors is None else min_contributors
        if not 1 <= enough <= num_replicas:
            raise ConfigurationError(
                f"min_contributors={min_contributors} was given for {num_replicas} replicas. Use 1 to {num_replicas}."
            )
        self.rounds = EmulatedRounds(self.view, enough, round_timeout_s, network, faults)
        self.changed = threading.Condition()
        self._facts: dict[int, Mapping[str, str]] = {}
        self._refusal = ""
        self.sources: dict[int, SnapshotSource] = {}
        self.threads: dict[int, int] = {}
        self._endpoints = tuple(InProcessEndpoint(self, replica) for replica in self.view.members)

    def endpoint(self, replica: int) -> InProcessEndpoint:
        """The transport that replica number ``replica`` uses."""
        return self._endpoints[replica]

    def state_dict(self) -> dict[str, Any]:
        """Traffic, clocks, links, decided rounds; contributions in flight are kept by the replicas that sent them."""
        return {
            "traffic": [[endpoint.sent_bytes, endpoint.received_bytes] for endpoint in self._endpoints],
            **self.rounds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; the replicas then hand in again what they have in flight."""
        for endpoint, (sent_bytes, received_bytes) in zip(self._endpoints, state["traffic"], strict=True):
            endpoint.sent_bytes, endpoint.received_bytes = int(sent_bytes), int(received_bytes)
        self.rounds.load_state_dict(state)

    # What endpoints call, always under `changed`.

    def agree(self, replica: int, facts: Mapping[str, str]) -> None:
        """Compare with the replicas that have told theirs; those hear of a difference when they next exchange."""
        if self._facts.get(replica, facts) != facts:
            self._facts.clear()  # it begins anew, and so will the others
        self._facts[replica] = facts
        entries = [Entry(other, "", theirs) for other, theirs in sorted(self._facts.items())]
        words = next(filter(None, (difference(entries[0], entry) for entry in entries)), "")
        self._refusal = f"{words}. All replicas need the same arguments of DiLoCo." if words else ""
        self.changed.notify_all()
        self._refuse()

    def _refuse(self) -> None:
        if self._refusal:
            raise ConfigurationError(self._refusal)

    def accept(self, contribution: Contribution) -> None:
        """Take in a contribution; the last one decides the round."""
        self._refuse()
        if self.rounds.accept(contribution):
            self.changed.notify_all()

    def take(self, replica: int, round_id: RoundId, timeout_s: float | None) -> Average:
        """The average of a round for ``replica``, waiting until it is decided."""
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
        """Wait until a round is decided."""
        missing = self.rounds.missing(replica, round_id)
        mine = threading.get_ident()
        if missing and (threading.active_count() == 1 or any(self.threads.get(each) == mine for each in missing)):
            raise RoundTimeoutError(
                f"replica {replica} would wait for ever for {round_id}: replica {missing[0]} has not sent its part and "
                "runs in this same thread. Call begin() on every replica before finish() on any, or give each replica "
                "a thread.",
                round=str(round_id),
                replicas=missing,
            )
        limit_s = timeout_s if math.isfinite(timeout_s) else None
        self.changed.wait_for(lambda: self._refusal or not self.rounds.missing(replica, round_id), limit_s)
        self._refuse()
        if missing := self.rounds.missing(replica, round_id):
            raise RoundTimeoutError(
                f"{round_id} was not decided within {timeout_s:g} s: nothing was heard of replica "
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
