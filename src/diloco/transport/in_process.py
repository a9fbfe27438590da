"""M replicas in one process: they take turns in one thread, or run in a thread each; deterministic either way.

In one thread, begin a step on every replica before finishing it on any (`DiLoCo.begin`, `DiLoCo.finish`), since the
round is decided when the last contribution is in. The average of a round is computed once and shared.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from diloco.algorithm.averaging import Contribution, Mean, RoundId, Verdict, judge, weighted_mean
from diloco.algorithm.exchange import Exchange, plan_round
from diloco.algorithm.mean_encoding import Residual, encode_all_means, lost_words
from diloco.algorithm.numbers import check_whole
from diloco.errors import (
    CodecError,
    ConfigurationError,
    DivergedError,
    RoundTimeoutError,
    RoundVoidError,
    TransportError,
)
from diloco.membership.view import View
from diloco.protocol.registry import Entry, difference
from diloco.transport.base import Average, Pending, SnapshotSource, Transport
from diloco.transport.faults import Fault, arrivals
from diloco.transport.links import Transfer, VirtualNetwork

__all__ = ["InProcessEndpoint", "InProcessTransport"]


@dataclass(eq=False)
class _Round:
    """A round that not everybody has taken the outcome of."""

    contributions: dict[int, Contribution] = field(default_factory=dict)
    sent_at_s: dict[int, float] = field(default_factory=dict)
    verdict: Verdict | None = None
    mean: Mean | None = None
    exchange: Exchange | None = None
    residuals: Sequence[Residual] = ()  # in the order of the members
    lost: str = ""
    commit_at_s: float = 0.0
    taken: set[int] = field(default_factory=set)


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
        self.min_contributors = num_replicas if min_contributors is None else min_contributors
        if not 1 <= self.min_contributors <= num_replicas:
            raise ConfigurationError(
                f"min_contributors={min_contributors} was given for {num_replicas} replicas. Use 1 to {num_replicas}."
            )
        self.round_timeout_s = round_timeout_s
        self.network = network
        self.faults = tuple(faults)
        self.changed = threading.Condition()
        self._rounds: dict[RoundId, _Round] = {}
        self._decided_before: dict[RoundId, float] = {}
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
            "network": self.network.state_dict() if self.network else None,
            "decided": [[r.fragment, r.outer_step, s.commit_at_s] for r, s in self._rounds.items() if s.verdict],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; the replicas then hand in again what they have in flight."""
        for endpoint, (sent_bytes, received_bytes) in zip(self._endpoints, state["traffic"], strict=True):
            endpoint.sent_bytes, endpoint.received_bytes = int(sent_bytes), int(received_bytes)
        if self.network is not None and state["network"] is not None:
            self.network.load_state_dict(state["network"])
            self._decided_before = {RoundId(int(p), int(k)): float(at_s) for p, k, at_s in state["decided"]}

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
        replica, round_id = contribution.replica, contribution.round
        state = self._rounds.setdefault(round_id, _Round())
        if replica in state.contributions:
            raise TransportError(
                f"replica {replica} has contributed to {round_id} already. The first contribution stands.",
                round=str(round_id),
                replicas=[replica],
            )
        state.contributions[replica] = contribution
        state.sent_at_s[replica] = self.network.now_s[replica] if self.network else 0.0
        if len(state.contributions) == len(self.view.members):
            self._decide(round_id, state)
            self.changed.notify_all()

    def take(self, replica: int, round_id: RoundId, timeout_s: float | None) -> Average:
        """The average of a round for ``replica``, waiting until it is decided."""
        state = self._rounds.get(round_id)
        if state is None or replica not in state.contributions or replica in state.taken:
            raise TransportError(
                f"replica {replica} waits for {round_id}, of which it has nothing in flight.", round=str(round_id)
            )
        verdict = self._verdict(replica, round_id, state, self.round_timeout_s if timeout_s is None else timeout_s)
        sent_bytes, received_bytes = self._bytes(state, replica)
        waited_s = self.network.wait_until(replica, state.commit_at_s) if self.network else 0.0
        endpoint = self._endpoints[replica]
        endpoint.sent_bytes += sent_bytes
        endpoint.received_bytes += received_bytes
        state.taken.add(replica)
        if len(state.taken) == len(self.view.members):
            del self._rounds[round_id]
        if replica in verdict.diverged:
            words = f"{round_id}: {verdict.reason}. The round is void for all."
            raise DivergedError(
                words,
                donor=verdict.donor,
                digest=state.contributions[verdict.donor].digest,
                round=str(round_id),
                replicas=verdict.diverged,
            )
        if state.mean is None:
            raise RoundVoidError(f"{round_id} is void: {verdict.reason}.", round=str(round_id))
        if any((f.kind, f.replica, f.round) == ("miss-commit", replica, round_id) for f in self.faults):
            raise RoundVoidError(f"{round_id}: no commit was heard of.", round=str(round_id), replicas=[replica])
        residual = state.residuals[self.view.members.index(replica)] if state.residuals else None
        return Average(
            **vars(replace(state.mean, residual=residual)),
            round=round_id,
            view=self.view,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            wait_s=waited_s,
            note="; ".join(filter(None, [verdict.reason, state.lost])),
        )

    def fetch(self, fragment: int, donors: Sequence[int]) -> Mapping[str, Any]:
        for donor in donors:
            if donor in self.sources:
                return self.sources[donor](fragment)
        asked = ", ".join(map(str, donors))
        raise TransportError(
            f"replica {asked} was asked for fragment {fragment}, but it has published nothing.", replicas=donors
        )

    def _decide(self, round_id: RoundId, state: _Round) -> None:
        arrived, absent, delay_s = arrivals(state.contributions, self.faults, self.round_timeout_s)
        sample = next(iter(state.contributions.values()))
        state.exchange = plan_round(sample, len(self.view.members))
        verdict = judge(arrived, members=self.view.members, min_contributors=self.min_contributors, absent=absent)
        state.commit_at_s = self._commit_time_s(round_id, state, delay_s)
        taken_s = state.commit_at_s - min(state.sent_at_s.values())
        if taken_s > self.round_timeout_s and not verdict.void:
            verdict = Verdict((), f"it would take {taken_s:.3g} s, {self.round_timeout_s:g} s are allowed")
        if not verdict.void:
            try:
                state.mean = weighted_mean([arrived[replica] for replica in verdict.contributors], sample.clipping)
            except CodecError as error:
                verdict = Verdict((), str(error))
        state.verdict = verdict
        if state.mean is not None and state.exchange.pattern == "reduce-scatter":
            held = [each.residual for each in state.contributions.values() if each.residual is not None]
            if state.exchange.keeps_residual:
                state.lost = lost_words((each.stretch for each in held), sample.numel)
            state.residuals = encode_all_means(state.mean.values, held, state.exchange.shards, state.exchange.mean)

    def _commit_time_s(self, round_id: RoundId, state: _Round, delay_s: float) -> float:
        if self.network is None:
            return 0.0
        if round_id in self._decided_before:  # its bytes had their place on the links before the checkpoint
            return self._decided_before.pop(round_id)
        transfers = {m: Transfer(sent_s, *self._bytes(state, m)) for m, sent_s in sorted(state.sent_at_s.items())}
        return self.network.commit_time_s(transfers) + delay_s

    def _bytes(self, state: _Round, replica: int) -> tuple[int, int]:
        """What ``replica`` sends and receives in a decided round."""
        assert state.exchange is not None
        position = self.view.members.index(replica)
        return state.exchange.sent_bytes(position), state.exchange.received_bytes(position)

    def _verdict(self, replica: int, round_id: RoundId, state: _Round, timeout_s: float) -> Verdict:
        """The decision about a round, once there is one."""
        missing = [member for member in self.view.members if member not in state.contributions]
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
        self.changed.wait_for(lambda: state.verdict is not None or self._refusal, limit_s)
        self._refuse()
        if state.verdict is None:
            missing = [member for member in self.view.members if member not in state.contributions]
            raise RoundTimeoutError(
                f"{round_id} was not decided within {timeout_s:g} s: nothing was heard of replica "
                f"{', '.join(map(str, missing))}. Nothing was applied.",
                round=str(round_id),
                replicas=missing,
            )
        return state.verdict


class InProcessEndpoint(Transport):
    """One replica's side of an `InProcessTransport`."""

    def __init__(self, hub: InProcessTransport, replica: int) -> None:
        self.hub = hub
        self.replica = replica
        self.view = hub.view

    def average(self, contribution: Contribution) -> Pending:
        if contribution.replica != self.replica:
            raise TransportError(
                f"replica {self.replica} handed in a contribution in the name of replica {contribution.replica}; "
                "each replica contributes for itself. It was not taken."
            )
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
            if self.hub.network is not None:
                self.hub.network.tick(self.replica)


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
