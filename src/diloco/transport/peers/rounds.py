"""The rounds of one view: headers, verdict, votes, and the decision that is the same for all.

Everything here runs in the control thread, but for `_exchange`, which has a thread of its own for each round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from diloco.algorithm.averaging import Contribution, Mean, RoundId, Verdict
from diloco.algorithm.digest import digest_tensors
from diloco.algorithm.exchange import Exchange, plan_exchange
from diloco.errors import DiLoCoError, DivergedError, RoundVoidError, TransportError, ViewChangedError
from diloco.membership.ballot import Vote, tally
from diloco.membership.view import View
from diloco.transport.base import Average
from diloco.transport.peers.data_link import DataLink
from diloco.transport.peers.header import Header, header_of, judge_headers
from diloco.transport.peers.payloads import Part, PayloadExchange, Postman
from diloco.transport.peers.pending import PeerPending

__all__ = ["RoundBook", "Rules"]


@dataclass(frozen=True)
class Rules:
    """How rounds go.

    Attributes:
        rank, replica: mine.
        ranks_per_replica: S.
        min_contributors: None: all that have the state.
        round_timeout_s: from my contribution to my vote.
        piece_bytes: about how large a piece of a payload is.
    """

    rank: int
    replica: int
    ranks_per_replica: int
    min_contributors: int | None
    round_timeout_s: float
    piece_bytes: int


@dataclass(eq=False)
class _Round:
    id: RoundId
    headers: dict[int, Header] = field(default_factory=dict)
    votes: dict[int, Vote] = field(default_factory=dict)
    fault: DivergedError | None = None
    contribution: Contribution | None = None
    pending: PeerPending | None = None
    plan: Exchange | None = None
    taking_over: bool = False
    judged: Future[Verdict] = field(default_factory=Future)
    mean: Mean | None = None
    committed: bool | None = None
    reason: str = ""
    exchanging: bool = False


class RoundBook:
    """The rounds of ``view``.

    Args:
        view: who takes part.
        rules: how.
        links: replica -> payload connection, once they stand; a failure of theirs fails the rounds.
        postman: of this rank.
        tell: sends a message to all other ranks of the view.
        later: calls a function in the control thread after some seconds.
        post: calls a function in the control thread, from another one.
        broken: told, in words, of a payload connection that ended.
        confirmed: told that this rank's state of a fragment is the majority's.
    """

    def __init__(
        self,
        view: View,
        rules: Rules,
        *,
        links: Future[Mapping[int, DataLink]],
        postman: Postman,
        tell: Callable[[dict[str, Any]], None],
        later: Callable[[float, Callable[[], None]], object],
        post: Callable[..., None],
        broken: Callable[[str], None],
        confirmed: Callable[[int], None],
    ) -> None:
        self.view = view
        self.rules = rules
        self.links = links
        self.commits: dict[tuple[int, int], str] = {}
        self._postman = postman
        self._tell = tell
        self._later = later
        self._post = post
        self._broken = broken
        self._confirmed = confirmed
        self._frozen = False
        self._rounds: dict[RoundId, _Round] = {}
        size = rules.ranks_per_replica
        self.ranks = tuple(m * size + s for m in view.members for s in range(size))
        self._positions = {rank: rank % size for rank in self.ranks}

    def begin(self, contribution: Contribution, pending: PeerPending, *, taking_over: bool) -> None:
        """My contribution to a round."""
        state = self._state(contribution.round)
        state.contribution, state.pending, state.taking_over = contribution, pending, taking_over
        header = header_of(contribution, taking_over=taking_over)
        state.plan = plan_exchange(
            contribution.codec, contribution.numel, len(self.view.members), _extra_bytes(contribution)
        )
        self._tell(header.to_message(self.view.id))
        state.headers[self.rules.rank] = header
        state.exchanging = True
        threading.Thread(
            target=self._exchange, args=(state,), name=f"diloco-{contribution.round.fragment}", daemon=True
        ).start()
        self._later(self.rules.round_timeout_s, lambda: self._expire(state))
        if state.committed is False:
            self._conclude(state)
        self._judge(state)

    def heard(self, sender: int, message: Mapping[str, Any]) -> None:
        """A header or a vote of this view came in."""
        if message["kind"] == "header":
            header = Header.from_message(message)
            state = self._state(header.round)
            state.headers[sender] = header
            self._judge(state)
            return
        fragment, outer_step = message["round"]
        state = self._state(RoundId(int(fragment), int(outer_step)))
        diverged = tuple(int(replica) for replica in message["diverged"])
        vote = Vote(bool(message["ok"]), str(message["digest"]), str(message["reason"]))
        self._count(state, sender, vote, diverged, int(message["donor"]))

    def freeze(self) -> Mapping[tuple[int, int], str]:
        """From now on no vote is cast and nothing is decided; what was committed lately."""
        self._frozen = True
        return dict(self.commits)

    def end(
        self, commits: Mapping[tuple[int, int], str], reason: str, failure: Callable[[RoundId], TransportError | None]
    ) -> None:
        """The view has ended: a round is committed if any survivor committed it, and void otherwise.

        Args:
            commits: what the survivors committed.
            reason: why the rest is void.
            failure: what who waits for a void round gets; None: `ViewChangedError`.
        """
        for state in list(self._rounds.values()):
            if state.committed is None:
                key = (state.id.fragment, state.id.outer_step)
                mine = state.votes.get(self.rules.rank)
                committed = key in commits and mine is not None and mine.ok
                self._decide(state, committed, reason, failure(state.id) or self._changed(state, reason))
            elif state.pending is not None:
                self._conclude(state)
            if not state.judged.done():
                state.judged.set_result(Verdict((), reason))

    def missing(self, round_id: RoundId) -> tuple[int, ...]:
        """Replicas of which no header of a round has come; readable from any thread."""
        state = self._rounds.get(round_id)
        size = self.rules.ranks_per_replica
        return tuple(sorted({rank // size for rank in self.ranks if state is None or rank not in state.headers}))

    def _state(self, round_id: RoundId) -> _Round:
        state = self._rounds.get(round_id)
        if state is None:
            state = self._rounds[round_id] = _Round(round_id)
            for old in [
                each.id
                for each in self._rounds.values()
                if each.id.fragment == round_id.fragment
                and each.id.outer_step < round_id.outer_step - 1
                and each.committed is not None
                and each.pending is not None
                and not each.exchanging
            ]:
                del self._rounds[old]
        return state

    def _judge(self, state: _Round) -> None:
        if self._frozen or state.contribution is None or state.judged.done():
            return
        if any(rank not in state.headers for rank in self.ranks):
            return
        size = self.rules.ranks_per_replica
        verdict = judge_headers(
            state.headers,
            state.contribution,
            members=self.view.members,
            ranks_per_replica=size,
            min_contributors=self.rules.min_contributors,
        )
        if state.taking_over:
            self._compare(state, verdict)
        state.judged.set_result(verdict)
        if verdict.void:
            self._cast(state, Vote(False, reason=verdict.reason), verdict.diverged, verdict.donor)

    def _compare(self, state: _Round, verdict: Verdict) -> None:
        """Whether I have the state of the others by now; if not, I take it over once this round is merged."""
        position, size = self.rules.rank % self.rules.ranks_per_replica, self.rules.ranks_per_replica
        donor = next((m for m in self.view.members if not state.headers[m * size + position].taking_over), None)
        mine = state.headers[self.rules.rank].digest
        if donor is None or state.headers[donor * size + position].digest == mine:
            self._confirmed(state.id.fragment)
        else:
            state.fault = DivergedError(
                f"{state.id}: replica {self.rules.replica} is still taking over the state.",
                donor=donor,
                round=str(state.id),
                replicas=[self.rules.replica],
            )

    def _exchange(self, state: _Round) -> None:
        """In a thread of its own: move the payloads, and hand the mean to the control thread."""
        contribution, plan = state.contribution, state.plan
        assert contribution is not None
        assert plan is not None
        try:
            links = self.links.result()
            exchange = PayloadExchange(
                contribution, plan, self.view.members, links, self._postman, self.rules.piece_bytes
            )
            exchange.start()
            verdict = state.judged.result()
            if verdict.void:
                exchange.drain()
            else:
                size, position = self.rules.ranks_per_replica, self.rules.rank % self.rules.ranks_per_replica
                headers = {m: state.headers[m * size + position] for m in self.view.members}
                parts = {m: Part(header.weight, header.buffers, header.integers) for m, header in headers.items()}
                mean = exchange.reduce(parts, verdict.contributors)
                self._post(self._computed, state, mean, _digest(mean))
            exchange.finish()
        except (DiLoCoError, RuntimeError) as error:
            self._post(self._failed, state, error)
        finally:
            self._post(self._exchanged, state)

    def _exchanged(self, state: _Round) -> None:
        state.exchanging = False

    def _computed(self, state: _Round, mean: Mean, digest: str) -> None:
        state.mean = mean
        self._cast(state, Vote(True, digest))

    def _failed(self, state: _Round, error: Exception) -> None:
        if self._frozen:
            return
        if isinstance(error, TransportError):
            self._broken(f"replica {self.rules.replica} says: {error}")
        elif state.committed is None:
            self._cast(state, Vote(False, reason=str(error).splitlines()[0]))

    def _expire(self, state: _Round) -> None:
        if state.committed is not None or self._frozen or self.rules.rank in state.votes:
            return
        missing = self.missing(state.id)
        waited_for = f"replica {', '.join(map(str, missing))}" if missing else "the payloads"
        self._cast(
            state,
            Vote(
                False,
                reason=f"nothing was heard of {waited_for} within {self.rules.round_timeout_s:g} s "
                f"(replica {self.rules.replica} waited)",
            ),
        )

    def _cast(self, state: _Round, vote: Vote, diverged: tuple[int, ...] = (), donor: int = -1) -> None:
        if self._frozen or self.rules.rank in state.votes:
            return
        message = {
            "kind": "vote",
            "view": self.view.id,
            "round": [state.id.fragment, state.id.outer_step],
            "ok": vote.ok,
            "digest": vote.digest,
            "reason": vote.reason,
            "diverged": list(diverged),
            "donor": donor,
        }
        self._tell(message)
        self._count(state, self.rules.rank, vote, diverged, donor)

    def _count(self, state: _Round, sender: int, vote: Vote, diverged: tuple[int, ...], donor: int) -> None:
        if self._frozen or state.committed is not None or sender in state.votes:
            return
        state.votes[sender] = vote
        if self.rules.replica in diverged and state.fault is None:
            state.fault = DivergedError(
                f"{state.id}: {vote.reason}. The round is void for all.",
                donor=donor,
                round=str(state.id),
                replicas=diverged,
            )
        decision = tally(self.ranks, state.votes, groups=self._positions)
        if decision.committed is not None:
            self._decide(state, decision.committed, decision.reason)

    def _changed(self, state: _Round, reason: str) -> TransportError:
        return ViewChangedError(f"{state.id} is void: {reason}.", round=str(state.id))

    def _decide(self, state: _Round, committed: bool, reason: str, failure: TransportError | None = None) -> None:
        state.committed, state.reason = committed, reason
        if committed:
            fragment, outer_step = state.id.fragment, state.id.outer_step
            self.commits = {k: d for k, d in self.commits.items() if k[0] != fragment or k[1] >= outer_step - 1}
            self.commits[fragment, outer_step] = state.votes[self.rules.rank].digest
        if state.pending is not None:
            self._conclude(state, failure)

    def _conclude(self, state: _Round, failure: TransportError | None = None) -> None:
        """Tell the training thread."""
        assert state.pending is not None
        if state.fault is not None:
            state.pending.resolve(state.fault)
        elif not state.committed:
            void = RoundVoidError(f"{state.id} is void: {state.reason}.", round=str(state.id))
            state.pending.resolve(failure or void)
        else:
            state.pending.resolve(self._average(state))

    def _average(self, state: _Round) -> Average:
        mean, plan = state.mean, state.plan
        assert mean is not None
        assert plan is not None
        me = self.view.members.index(self.rules.replica)
        return Average(
            round=state.id,
            values=mean.values,
            view=self.view,
            contributors=mean.contributors,
            weight=mean.weight,
            sent_bytes=plan.sent_bytes(me),
            received_bytes=plan.received_bytes(me),
            wait_s=0.0,
            buffers=mean.buffers,
            integers=mean.integers,
            note=state.judged.result().reason,
        )


def _digest(mean: Mean) -> str:
    """Of everything that the average would change."""
    parts = {f"{mean.contributors} {mean.weight!r}": mean.values}
    if mean.buffers is not None:
        parts["buffers"] = mean.buffers
    if mean.integers is not None:
        parts["integers"] = mean.integers
    return digest_tensors(parts)


def _extra_bytes(contribution: Contribution) -> int:
    extras = (contribution.buffers, contribution.integers)
    return sum(extra.numel() * extra.element_size() for extra in extras if extra is not None)
