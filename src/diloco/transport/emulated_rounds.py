"""The rounds of replicas in one process; each is decided when its last contribution arrives.

No payload is transferred. An emulated network, if there is one, determines when a round is committed and how long each
replica stalls for it, and injected faults determine what fails. Nothing in this module blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.algorithm import (
    Contribution,
    Exchange,
    Mean,
    RoundId,
    Verdict,
    encode_mean,
    judge,
    plan_round,
    weighted_mean,
)
from diloco.errors import CodecError, RoundVoidError, TransportError
from diloco.membership import View
from diloco.protocol import Average
from diloco.transport.injected_faults import Fault, arrivals
from diloco.transport.links import Transfer, VirtualNetwork

__all__ = ["EmulatedRounds"]


@dataclass(eq=False)
class _Round:
    """A round whose outcome at least one replica has not collected yet."""

    contributions: dict[int, Contribution] = field(default_factory=dict)
    sent_at_s: dict[int, float] = field(default_factory=dict)
    verdict: Verdict | None = None
    mean: Mean | None = None
    exchange: Exchange | None = None
    commit_at_s: float = 0.0
    taken: set[int] = field(default_factory=set)


class EmulatedRounds:
    """The rounds of one view whose outcome at least one replica has not collected yet.

    Args:
        view: the replicas that take part.
        min_contributors: a round with fewer usable contributions is void.
        timeout_s: a contribution that would be later than this, in virtual seconds, counts as missing.
        network: links on a virtual clock; None means that payloads arrive at once.
        faults: the faults to inject.
    """

    def __init__(
        self,
        view: View,
        min_contributors: int,
        timeout_s: float,
        network: VirtualNetwork | None,
        faults: Sequence[Fault],
    ) -> None:
        self.view = view
        self.min_contributors = min_contributors
        self.timeout_s = timeout_s
        self.network = network
        self.faults = tuple(faults)
        self._rounds: dict[RoundId, _Round] = {}
        self._decided_before: dict[RoundId, float] = {}

    def accept(self, contribution: Contribution) -> bool:
        """Record a contribution and return whether it was the last one, which decides the round.

        Raises:
            TransportError: if the replica has already contributed to the round.
        """
        replica, round_id = contribution.replica, contribution.round
        state = self._rounds.setdefault(round_id, _Round())
        if replica in state.contributions:
            raise TransportError(
                f"Replica {replica} has already contributed to {round_id}. Its first contribution stands.",
                round=str(round_id),
                replicas=[replica],
            )
        state.contributions[replica] = contribution
        state.sent_at_s[replica] = self.network.now_s[replica] if self.network else 0.0
        if len(state.contributions) == len(self.view.members):
            self._decide(round_id, state)
        return state.verdict is not None

    def missing(self, replica: int, round_id: RoundId) -> list[int]:
        """Return the replicas that have not contributed yet to a round that ``replica`` has in flight.

        The round is decided if there are none.

        Raises:
            TransportError: if ``replica`` has not contributed to the round, or has already collected its outcome.
        """
        state = self._rounds.get(round_id)
        if state is None or replica not in state.contributions or replica in state.taken:
            raise TransportError(
                f"Replica {replica} waits for {round_id} but has no contribution to it in flight.", round=str(round_id)
            )
        return [member for member in self.view.members if member not in state.contributions]

    def bytes_of(self, replica: int, round_id: RoundId) -> tuple[int, int]:
        """Return the bytes that ``replica`` sends and receives in a decided round, even if the round is void."""
        exchange, position = self._rounds[round_id].exchange, self.view.members.index(replica)
        assert exchange is not None, "it is decided"
        return exchange.sent_bytes(position), exchange.received_bytes(position)

    def take(self, replica: int, round_id: RoundId) -> Average:
        """Return the average of a decided round for ``replica``, whose clock advances to the commit.

        ``replica`` must have the round in flight.

        Raises:
            RoundVoidError: if the round is void, or a fault keeps its commit from this replica.
            DivergedError: if the round is void because this replica's global parameters or outer state differ from the
                majority's.
        """
        state = self._rounds[round_id]
        verdict = state.verdict
        assert verdict is not None, "it is decided"
        sent_bytes, received_bytes = self.bytes_of(replica, round_id)
        waited_s = self.network.wait_until(replica, state.commit_at_s) if self.network else 0.0
        state.taken.add(replica)
        if len(state.taken) == len(self.view.members):
            del self._rounds[round_id]
        if replica in verdict.diverged:
            raise verdict.divergence(round_id, state.contributions[verdict.donor].digest)
        if state.mean is None:
            raise RoundVoidError(f"{round_id} is void: {verdict.reason}.", round=str(round_id))
        if any((f.kind, f.replica, f.round) == ("miss-commit", replica, round_id) for f in self.faults):
            raise RoundVoidError(f"{round_id}: no commit was received.", round=str(round_id), replicas=[replica])
        return Average(
            **vars(state.mean),
            round=round_id,
            view=self.view,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            wait_s=waited_s,
            note=verdict.reason,
        )

    def tick(self, replica: int) -> None:
        """Record that ``replica`` has computed one inner step."""
        if self.network is not None:
            self.network.tick(replica)

    def state_dict(self) -> dict[str, Any]:
        """Return clocks, links and decided rounds; the replicas that sent contributions in flight save them."""
        return {
            "network": self.network.state_dict() if self.network else None,
            "decided": [[r.fragment, r.outer_step, s.commit_at_s] for r, s in self._rounds.items() if s.verdict],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. The replicas then resubmit their contributions in flight."""
        if self.network is not None and state["network"] is not None:
            self.network.load_state_dict(state["network"])
            self._decided_before = {RoundId(int(p), int(k)): float(at_s) for p, k, at_s in state["decided"]}

    def _decide(self, round_id: RoundId, state: _Round) -> None:
        arrived, absent, delay_s = arrivals(state.contributions, self.faults, self.timeout_s)
        sample = next(iter(state.contributions.values()))
        uplinks = [self.network.links[member].uplink for member in self.view.members] if self.network else ()
        state.exchange = plan_round(sample, len(self.view.members), uplinks)
        verdict = judge(arrived, members=self.view.members, min_contributors=self.min_contributors, absent=absent)
        state.commit_at_s = self._commit_time_s(round_id, state, delay_s)
        taken_s = state.commit_at_s - min(state.sent_at_s.values())
        if taken_s > self.timeout_s and not verdict.void:
            verdict = Verdict((), f"it would take {taken_s:.3g} s, but the limit is {self.timeout_s:g} s")
        if not verdict.void:
            try:
                state.mean = weighted_mean([arrived[replica] for replica in verdict.contributors])
            except CodecError as error:
                verdict = Verdict((), str(error))
        state.verdict = verdict
        if state.mean is not None and state.exchange.pattern == "reduce-scatter":
            encode_mean(state.mean.values, state.exchange.mean.codec)  # ranges consist of whole blocks

    def _commit_time_s(self, round_id: RoundId, state: _Round, delay_s: float) -> float:
        if self.network is None:
            return 0.0
        if round_id in self._decided_before:  # the restored links already include its transfers
            return self._decided_before.pop(round_id)
        transfers = {m: Transfer(sent_s, *self.bytes_of(m, round_id)) for m, sent_s in sorted(state.sent_at_s.items())}
        return self.network.commit_time_s(transfers) + delay_s
