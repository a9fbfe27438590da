"""The rounds of one view: headers, verdict, votes, and the decision that is the same for all.

Everything here runs in the control thread, but for `_exchange`, which has a thread of its own for each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from diloco.algorithm.averaging import Mean, RoundId, Verdict
from diloco.algorithm.exchange import plan_exchange
from diloco.errors import DiLoCoError, TransportError, ViewChangedError
from diloco.membership.ballot import Vote, tally
from diloco.membership.change import Commits, NextView, Rounds
from diloco.membership.lateness import Lateness
from diloco.membership.view import View
from diloco.protocol.headers import Header, donor_for, header_of, judge_headers
from diloco.protocol.messages import RoundVote
from diloco.protocol.rules import Rules, expired_words, late_words
from diloco.transport.base import Average
from diloco.transport.peers.data_link import DataLink
from diloco.transport.peers.decided import Decided
from diloco.transport.peers.payloads import PayloadExchange
from diloco.transport.peers.postman import Postman
from diloco.transport.peers.round_state import Begun, RoundState, Timer, digest_of
from diloco.transport.peers.threads import Threads

__all__ = ["RoundBook"]

_MOST_TOLD = 8
"""Refused headers that are told of with the next average."""

_AGAINST = "somebody voted against it before the view changed"


class RoundBook:
    """The rounds of ``view``.

    Args:
        view: who takes part.
        rules: how.
        links: replica -> payload connection, once they stand; a failure of theirs fails the rounds.
        postman: of this rank.
        threads: of this rank.
        tell: sends a message to all other ranks of the view.
        later: calls a function in the control thread after some seconds.
        post: calls a function in the control thread, from another one.
        broken: told, in words, of a payload connection that ended.
        confirmed: told that this rank's state of a fragment is the majority's.
        late: told of replicas that are late, of replicas that say nothing at all, and of what happened, in words.
        words: rank -> how many messages have come from it, of whatever kind.
        void: rounds of earlier views that are known to be void, though I have not begun them yet.
    """

    def __init__(
        self,
        view: View,
        rules: Rules,
        *,
        links: Future[Mapping[int, DataLink]],
        postman: Postman,
        threads: Threads,
        tell: Callable[[dict[str, Any]], None],
        later: Callable[[float, Callable[[], None]], Timer],
        post: Callable[..., None],
        broken: Callable[[str], None],
        confirmed: Callable[[int], None],
        late: Callable[[frozenset[int], frozenset[int], str], None],
        words: Callable[[int], int],
        void: Rounds = frozenset(),
    ) -> None:
        self.view = view
        self.rules = rules
        self.links = links
        self._postman = postman
        self._threads = threads
        self._tell = tell
        self._later = later
        self._post = post
        self._broken = broken
        self._confirmed = confirmed
        self._late = late
        self._words = words
        self._frozen = False
        self._decided = Decided(void)
        self._rounds: dict[RoundId, RoundState] = {}
        self._refused: list[str] = []
        size = rules.ranks_per_replica
        self.ranks = tuple(m * size + s for m in view.members for s in range(size))
        self._positions = {rank: rank % size for rank in self.ranks}

    def begin(self, begun: Begun, *, taking_over: bool) -> None:
        """My contribution to a round; also to one that I had begun in the view before."""
        contribution, pending = begun.contribution, begun.pending
        state = self._state(contribution.round)
        state.begun, state.taking_over = begun, taking_over
        if state.key in self._decided.void and state.committed is None:  # others had decided so before this view
            self._decide(state, False, _AGAINST)
            return
        header = header_of(contribution, taking_over=taking_over)
        state.plan = plan_exchange(
            contribution.codec,
            contribution.numel,
            len(self.view.members),
            contribution.extra_bytes,
            whole=contribution.clipping.active,
        )
        self._tell(header.to_message(self.view.id))
        state.headers[self.rules.rank] = header
        state.exchanging = True
        self._threads.start(self._exchange, state, name=f"diloco-{contribution.round.fragment}")
        if state.committed is None:
            left_s = max(0.0, self.rules.round_timeout_s - (time.monotonic() - pending.sent_s))
            state.expiring = self._later(left_s, lambda: self._expire(state))
            if self.rules.late_s is not None and contribution.round.fragment >= 0:
                self._look(state, self.rules.late_s)
        else:
            self._conclude(state)
        self._judge(state)

    def heard(self, sender: int, said: Header | RoundVote) -> None:
        """A header or a vote of this view came in; who is not in the view has no say."""
        if sender not in self._positions:
            return
        if isinstance(said, Header) and (refusal := self._refusal(sender, said.round)):
            self._refused = [*self._refused, refusal][-_MOST_TOLD:]
            return
        state = self._state(said.round)
        if isinstance(said, Header):
            state.headers[sender] = said
            self._judge(state)
        else:
            self._count(state, sender, said)

    def freeze(self) -> tuple[Commits, Rounds]:
        """From now on no vote is cast and nothing is decided; what was committed lately, and what is void."""
        self._frozen = True
        return self._decided.commits, self._decided.void

    def end(
        self,
        following: NextView | None,
        reason: str,
        failure: Callable[[RoundId], TransportError | None],
        *,
        goes_on: bool = False,
    ) -> Sequence[Begun]:
        """The view has ended: a round is committed if any survivor committed it, else it goes on if it can, or is void.

        Args:
            following: what the survivors adopted; None: nothing.
            reason: why the other rounds are void, where they can't go on.
            failure: what who waits for a void round gets; None: `RoundVoidError`.
            goes_on: whether I take part in the next view.

        Returns:
            My contributions to rounds that I have not decided, in the order sent, if they go on in the next view: to be
            begun there. Those that others have decided void are void there, see ``void`` above.
        """
        open_rounds = []
        carried = goes_on and following is not None and following.carries_over
        for state in list(self._rounds.values()):
            mine = state.votes.get(self.rules.rank)
            state.stop_timers()
            if state.committed is not None:
                pass
            elif following is not None and state.key in following.commits and mine is not None and mine.ok:
                self._decide(state, True, "")
            elif not carried:
                changed = ViewChangedError(f"{state.id} is void: {reason}.", round=str(state.id))
                self._decide(state, False, reason, failure(state.id) or changed)
            elif state.begun is not None:
                open_rounds.append(state.begun)
            if not state.judged.done():
                state.judged.set_result(Verdict((), reason))  # the thread that waits for it meets the end of the links
        return sorted(open_rounds, key=lambda begun: begun.pending.sent_s)

    def missing(self, round_id: RoundId) -> tuple[int, ...]:
        """Replicas of which no header of a round has come; readable from any thread."""
        state = self._rounds.get(round_id) or RoundState(round_id)  # nothing has been heard of it
        return state.missing(self.ranks, self.rules)

    def goes_on_without_me(self) -> bool:
        """Whether another rank has contributed to a round that this one has not begun."""
        return any(state.headers and not state.was_begun for state in self._rounds.values())

    def lacking(self) -> frozenset[int]:
        """Replicas that have not contributed to a round that I wait for."""
        waited_for = (state for state in self._rounds.values() if state.begun is not None and state.committed is None)
        return frozenset(replica for state in waited_for for replica in state.missing(self.ranks, self.rules))

    def _refusal(self, sender: int, round_id: RoundId) -> str:
        """Why a header is not taken, in words that name its sender, or ""."""
        name = f"a contribution of replica {sender // self.rules.ranks_per_replica} to {round_id} was refused"
        state = self._rounds.get(round_id)
        if state is not None:  # a header that is late is still waited for, by the thread that moves the payloads
            return f"{name}: it had contributed to it before" if sender in state.headers else ""
        mine = (each for each, s in self._rounds.items() if each.fragment == round_id.fragment and s.was_begun)
        last = max((each.outer_step for each in mine), default=0)
        return f"{name}: that round is long over" if round_id.outer_step + 1 < last else ""

    def _state(self, round_id: RoundId) -> RoundState:
        state = self._rounds.get(round_id)
        if state is None:
            state = self._rounds[round_id] = RoundState(round_id)
            for old in [
                each.id
                for each in self._rounds.values()
                if each.id.fragment == round_id.fragment
                and each.id.outer_step < round_id.outer_step - 1
                and each.concluded
                and not each.exchanging
            ]:
                del self._rounds[old]
        return state

    def _judge(self, state: RoundState) -> None:
        if self._frozen or state.begun is None or state.judged.done():
            return
        if any(rank not in state.headers for rank in self.ranks):
            return
        members, size = self.view.members, self.rules.ranks_per_replica
        verdict = judge_headers(
            state.headers,
            state.begun.contribution,
            members=members,
            ranks_per_replica=size,
            min_contributors=self.rules.min_contributors,
        )
        if state.taking_over:
            state.donor = donor_for(self.rules.rank, state.headers, members=members, ranks_per_replica=size)
            if state.donor is None:
                self._confirmed(state.id.fragment)
        state.judged.set_result(verdict)
        if verdict.void:
            vote = Vote(False, reason=verdict.reason)
            self._cast(RoundVote(state.id, vote, verdict.diverged, verdict.donor), state)

    def _exchange(self, state: RoundState) -> None:
        """In a thread of its own: move the payloads, and hand the mean to the control thread."""
        begun, plan = state.begun, state.plan
        assert begun is not None
        assert plan is not None
        try:
            links, members = self.links.result(), self.view.members
            exchange = PayloadExchange(begun.contribution, plan, members, links, self._postman, self.rules.piece_bytes)
            exchange.start()
            verdict = state.judged.result()
            if verdict.void:
                exchange.drain()
            else:
                mean = exchange.reduce(state.parts(members, self.rules), verdict.contributors)
                self._post(self._computed, state, mean, digest_of(mean))
            exchange.finish()
        except (DiLoCoError, RuntimeError) as error:
            self._post(self._failed, state, error)
        finally:
            self._post(self._exchanged, state)

    def _exchanged(self, state: RoundState) -> None:
        state.exchanging = False
        state.free()

    def _computed(self, state: RoundState, mean: Mean, digest: str) -> None:
        state.mean = mean
        self._cast(RoundVote(state.id, Vote(True, digest)), state)

    def _failed(self, state: RoundState, error: Exception) -> None:
        if self._frozen:
            return
        if isinstance(error, TransportError):
            self._broken(f"replica {self.rules.replica} says: {error}")
        elif state.committed is None:
            self._cast(RoundVote(state.id, Vote(False, reason=str(error).splitlines()[0])), state)

    def _expire(self, state: RoundState) -> None:
        if state.committed is not None or self._frozen or self.rules.rank in state.votes:
            return
        missing = state.missing(self.ranks, self.rules)
        reason = expired_words(missing, self.rules)
        self._cast(RoundVote(state.id, Vote(False, reason=reason)), state)
        if not missing and state.exchanging:  # TCP may wait for minutes before it tries again; a new one begins at once
            self._broken(f"a payload connection of replica {self.rules.replica} stands still: {reason}")

    def _look(self, state: RoundState, late_s: float) -> None:
        """Give up who is late, and look again until the round is decided."""
        if state.committed is not None or self._frozen:
            return
        absent, silent, unheard = state.look(self.ranks, self.rules, self._words)
        if absent or silent:
            self._late((absent | silent) - unheard, unheard, late_words(state.id, absent, silent, late_s))
        if not self._frozen:
            state.looking = self._later(late_s / Lateness.LOOKS, lambda: self._look(state, late_s))

    def _cast(self, vote: RoundVote, state: RoundState) -> None:
        if self._frozen or self.rules.rank in state.votes:
            return
        self._tell(vote.to_message(self.view.id))
        self._count(state, self.rules.rank, vote)

    def _count(self, state: RoundState, sender: int, said: RoundVote) -> None:
        if self._frozen or state.committed is not None or sender in state.votes:
            return
        state.count(sender, said, self.rules.replica)
        decision = tally(self.ranks, state.votes, groups=self._positions)
        if decision.committed is not None:
            self._decide(state, decision.committed, decision.reason)

    def _decide(self, state: RoundState, committed: bool, reason: str, failure: TransportError | None = None) -> None:
        state.committed, state.reason = committed, reason
        state.stop_timers()
        if committed:
            self._decided.commit(state.key, state.votes[self.rules.rank].digest)
        else:
            self._decided.call_off(state.key)
        if state.begun is not None:
            self._conclude(state, failure)

    def _conclude(self, state: RoundState, failure: TransportError | None = None) -> None:
        """Tell the training thread."""
        assert state.begun is not None
        outcome = state.outcome(self.view, self.rules.replica, failure)
        if isinstance(outcome, Average):
            words, self._refused = [*filter(None, [outcome.note]), *self._refused], []
            outcome = replace(outcome, note="; ".join(words))
        state.begun.pending.resolve(outcome)
        state.concluded = True
        state.free()
