"""A transport for M replicas in one process, which take turns in one thread or run in one thread each.

Both are deterministic. With one thread, begin a step on every replica before finishing it on any (`DiLoCo.begin`,
`DiLoCo.finish`), because the last contribution decides the round. The average of a round is computed once and shared.

No payload is transferred. An emulated network, if there is one, determines when a round is committed and how long each
replica stalls for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from diloco.algorithm import (
    Contribution,
    Exchange,
    Mean,
    RoundId,
    Verdict,
    check_replica,
    check_whole,
    encode_mean,
    judge,
    plan_round,
    weighted_mean,
)
from diloco.errors import ConfigurationError, RoundTimeoutError, RoundVoidError, TransportError
from diloco.membership import View
from diloco.protocol import Average
from diloco.transport.base import Pending, SnapshotSource, Transport
from diloco.transport.virtual_network import VirtualNetwork
from diloco.units import diff
from diloco.waiting import at_once


@dataclass(eq=False)
class _Round:
    contributions: dict[int, Contribution] = field(default_factory=dict)
    sent_at_s: dict[int, float] = field(default_factory=dict)
    verdict: Verdict | None = None
    mean: Mean | None = None
    exchange: Exchange | None = None
    commit_at_s: float = 0.0
    taken: set[int] = field(default_factory=set)


class InProcessTransport:
    """The hub that connects ``num_replicas`` replicas; each replica uses its own `endpoint`.

    Args:
        num_replicas: M.
        min_contributors: a round with fewer usable contributions is void; the default is all M.
        round_timeout_s: a round that would take longer than this, in virtual seconds, is void. It is also the longest
            time, in real seconds, that `Pending.wait` waits for replicas in other threads.
        network: emulated links on a virtual clock; None means that payloads arrive at once.

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
    ) -> None:
        num_replicas = check_whole("num_replicas", num_replicas, 1)
        if network is not None and len(network.links) != num_replicas:
            raise ConfigurationError(
                f"The network must have one link per replica, got {len(network.links)} links for {num_replicas} "
                "replicas."
            )
        if not round_timeout_s >= 0:
            raise ConfigurationError(f"round_timeout_s must be at least 0, got {round_timeout_s}.")
        self.view = View.of(num_replicas)
        enough = num_replicas if min_contributors is None else min_contributors
        self.min_contributors = check_whole("min_contributors", enough, 1, num_replicas)
        self.round_timeout_s = round_timeout_s
        self.network = network
        self.changed = threading.Condition()
        self.sources: dict[int, SnapshotSource] = {}
        self.threads: dict[int, int] = {}
        self._facts: dict[int, Mapping[str, str]] = {}
        self._refusal = ""
        self.rounds: dict[RoundId, _Round] = {}
        self._decided_before: dict[RoundId, float] = {}
        self.endpoints = tuple(InProcessEndpoint(self, replica) for replica in self.view.members)

    def endpoint(self, replica: int) -> InProcessEndpoint:
        """Return the transport that replica number ``replica`` uses."""
        return self.endpoints[check_replica(replica, len(self.endpoints))]

    def state_dict(self) -> dict[str, Any]:
        """Return traffic counters, clocks, links and decided rounds.

        The replicas that sent contributions in flight save them.
        """
        return {
            "traffic": [[endpoint.sent_bytes, endpoint.received_bytes] for endpoint in self.endpoints],
            "network": self.network.state_dict() if self.network else None,
            "decided": [[r.fragment, r.outer_step, s.commit_at_s] for r, s in self.rounds.items() if s.verdict],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. The replicas then resubmit their contributions in flight."""
        for endpoint, (sent_bytes, received_bytes) in zip(self.endpoints, state["traffic"], strict=True):
            endpoint.sent_bytes, endpoint.received_bytes = int(sent_bytes), int(received_bytes)
        if self.network is not None and state["network"] is not None:
            self.network.load_state_dict(state["network"])
            self._decided_before = {RoundId(int(p), int(k)): float(at_s) for p, k, at_s in state["decided"]}

    # Endpoints call the methods below, always holding `changed`.

    def agree(self, replica: int, facts: Mapping[str, str]) -> None:
        """Compare facts with replicas that have sent theirs, which raise for a difference at their next exchange."""
        if self._facts.get(replica, facts) != facts:
            self._facts.clear()  # this replica restarts with other facts, and so will the others
        self._facts[replica] = facts
        (first, mine), *others = sorted(self._facts.items())
        reasons = (diff(mine, theirs, f"replica {first}", f"replica {other}") for other, theirs in others)
        reason = next(filter(None, reasons), "")
        self._refusal = f"{reason}. All replicas must pass the same arguments to DiLoCo." if reason else ""
        self.changed.notify_all()
        self._refuse()

    def _refuse(self) -> None:
        if self._refusal:
            raise ConfigurationError(self._refusal)

    def accept(self, contribution: Contribution) -> None:
        """Record a contribution; the last one decides the round."""
        self._refuse()
        replica, round_id = contribution.replica, contribution.round
        state = self.rounds.setdefault(round_id, _Round())
        state.contributions[replica] = contribution
        state.sent_at_s[replica] = self.network.now_s[replica] if self.network else 0.0
        if len(state.contributions) == len(self.view.members):
            self._decide(round_id, state)
            self.changed.notify_all()

    def judge(self, contributions: Mapping[int, Contribution]) -> Verdict:
        """Return which of the contributions to a round count."""
        checked = {replica: each.checked() for replica, each in contributions.items()}
        return judge(checked, members=self.view.members, min_contributors=self.min_contributors, absent={})

    def _decide(self, round_id: RoundId, state: _Round) -> None:
        sample = next(iter(state.contributions.values()))
        network = self.network
        uplinks = [network.uplink(member, sample.transfer_steps) for member in self.view.members] if network else ()
        state.exchange = plan_round(sample, len(self.view.members), uplinks)
        verdict = self.judge(state.contributions)
        state.commit_at_s = self._commit_time_s(round_id, state)
        taken_s = state.commit_at_s - min(state.sent_at_s.values())
        if taken_s > self.round_timeout_s and not verdict.void:
            verdict = Verdict((), f"it would take {taken_s:.3g} s, but the limit is {self.round_timeout_s:g} s")
        if not verdict.void:
            try:
                state.mean = weighted_mean([state.contributions[replica] for replica in verdict.contributors])
            except Exception as error:  # of any kind: the other replicas must not wait for it
                verdict = Verdict((), (str(error) or type(error).__name__).splitlines()[0])
        state.verdict = verdict
        if state.mean is not None and state.exchange.pattern == "reduce-scatter":
            encode_mean(state.mean.values, state.exchange.mean)  # ranges consist of whole blocks

    def _commit_time_s(self, round_id: RoundId, state: _Round) -> float:
        if self.network is None:
            return 0.0
        if round_id in self._decided_before:  # the restored links already include its transfers
            return self._decided_before.pop(round_id)
        assert state.exchange is not None, "it is planned"
        sent_at_s = [state.sent_at_s[member] for member in self.view.members]
        return self.network.commit_time_s(sent_at_s, state.exchange.sent, state.exchange.received)

    def take(self, replica: int, round_id: RoundId) -> Average:
        """Wait until a round is decided and return its average for ``replica``, whose clock advances to the commit.

        Raises:
            RoundVoidError: if the round is void.
            DivergedError: if the round is void because this replica's global parameters or outer state differ from the
                majority's.
            TransportError: if ``replica`` has not contributed to the round, or has already collected its outcome.
        """
        state = self._decided(replica, round_id)
        verdict, exchange = state.verdict, state.exchange
        assert verdict is not None, "it is decided"
        assert exchange is not None, "it is planned"
        position, endpoint = self.view.members.index(replica), self.endpoints[replica]
        sent_bytes, received_bytes = exchange.sent[position], exchange.received[position]
        endpoint.sent_bytes += sent_bytes
        endpoint.received_bytes += received_bytes
        waited_s = self.network.wait_until(replica, state.commit_at_s) if self.network else 0.0
        state.taken.add(replica)
        if len(state.taken) == len(self.view.members):
            del self.rounds[round_id]
        if replica in verdict.diverged:
            raise verdict.divergence(round_id, state.contributions[verdict.donor].digest)
        if state.mean is None:
            raise RoundVoidError(verdict.reason, round=str(round_id))
        more = {"round": round_id, "wait_s": waited_s, "note": verdict.reason}
        return Average.of(exchange, replica, view=self.view, **vars(state.mean), **more)

    def _decided(self, replica: int, round_id: RoundId) -> _Round:
        state = self.rounds.get(round_id)
        if state is None or replica not in state.contributions or replica in state.taken:
            raise TransportError(
                f"Replica {replica} waits for {round_id} but has no contribution to it in flight.", round=str(round_id)
            )

        def missing() -> list[int]:
            return [member for member in self.view.members if member not in state.contributions]

        thread = threading.get_ident()
        if missing() and (threading.active_count() == 1 or any(self.threads.get(m) == thread for m in missing())):
            raise RoundTimeoutError(
                f"Replica {replica} would wait forever for {round_id}: replica {missing()[0]} has not sent its "
                "contribution and runs in the same thread. Call begin() on every replica before finish() on any, or "
                "run each replica in its own thread.",
                round=str(round_id),
                replicas=missing(),
            )
        limit_s = self.round_timeout_s if math.isfinite(self.round_timeout_s) else None
        self.changed.wait_for(lambda: self._refusal or not missing(), limit_s)
        self._refuse()
        if missing():
            raise RoundTimeoutError(
                f"{round_id} was not decided within {limit_s:g} s: no contribution arrived from replica "
                f"{', '.join(map(str, missing()))}. Nothing was applied.",
                round=str(round_id),
                replicas=missing(),
            )
        return state


class InProcessEndpoint(Transport):
    """One replica's side of an `InProcessTransport`."""

    def __init__(self, hub: InProcessTransport, replica: int) -> None:
        self.hub = hub
        self.replica = replica
        self.view, self.network = hub.view, hub.network

    def average(self, contribution: Contribution) -> Pending:
        with self.hub.changed:
            before = self.hub.rounds.get(contribution.round)
            self.check(contribution, again=before is not None and self.replica in before.contributions)
            self.hub.threads[self.replica] = threading.get_ident()
            self.hub.accept(contribution)
        round_id = contribution.round

        def wait() -> Average:
            with self.hub.changed:
                return self.hub.take(self.replica, round_id)

        return Pending(wait)

    def agree(self, facts: Mapping[str, str]) -> None:
        with self.hub.changed:
            self.hub.agree(self.replica, facts)

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        with self.hub.changed:
            self.hub.sources[self.replica] = source

    def fetch(
        self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None
    ) -> Future[Mapping[str, Any]]:
        with self.hub.changed:
            return at_once(self._copy, fragment, donors)

    def _copy(self, fragment: int, donors: Sequence[int]) -> Mapping[str, Any]:
        for donor in donors:
            if donor in self.hub.sources:
                return _copied(self.hub.sources[donor](fragment))
        asked = ", ".join(map(str, donors))
        words = f"replica {asked} was asked for fragment {fragment}, but it has published nothing."
        raise TransportError(words, replicas=donors)

    def tick(self) -> None:
        with self.hub.changed:
            self.hub.threads[self.replica] = threading.get_ident()
            if self.network is not None:
                self.network.tick(self.replica)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all replicas in this process."""
        return self.hub.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.hub.load_state_dict(state)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    return {**state, **tensors, **{name: _copied(value) for name, value in state.items() if isinstance(value, Mapping)}}
