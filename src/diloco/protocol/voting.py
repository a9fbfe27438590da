"""The decisions on rounds, from the headers of all ranks to a verdict, votes and an outcome that all members share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from diloco.algorithm import Verdict
from diloco.errors import TransportError
from diloco.membership import Lateness, Report, Rounds, View, Vote, tally
from diloco.protocol.actions import Average, CancelTimer, Commit, GiveVerdict, SetTimer, Timer, Void
from diloco.protocol.events import Outbox, RoundsSpoilt
from diloco.protocol.messages import RoundVote
from diloco.protocol.round_state import Decided, RoundState, Spoilers
from diloco.protocol.rules import Rules, disputed_reason, spoilt_reason

__all__ = ["Voting"]

_MOST_REPORTED = 8
"""Most refused headers that are reported with the next average."""


class Voting:
    """One rank's part in the decisions of a view.

    Args:
        view: the current view.
        rules: the settings of this rank.
        message_counts: rank -> number of messages received from it; the roster keeps it up to date.
        outbox: receives actions and events.
        void: rounds of earlier views that others have decided void.
        has_state_of: fragments whose state this rank shares with the majority; rounds add to it.
        spoilers: the members whose contributions could not be used; rounds add to it.
    """

    def __init__(
        self,
        view: View,
        rules: Rules,
        message_counts: Mapping[int, int],
        outbox: Outbox,
        void: Rounds,
        has_state_of: set[int],
        spoilers: Spoilers,
    ) -> None:
        self.frozen = False  # whether voting and deciding have stopped, because the view is ending
        self.ranks = rules.ranks(view.members)
        self.decided = Decided(void)  # the recently committed rounds, and the void ones
        self.has_state_of = has_state_of
        self.spoilers = spoilers
        self.view = view
        self._positions = {rank: rank % rules.ranks_per_replica for rank in self.ranks}
        self._rules = rules
        self._message_counts = message_counts
        self._outbox = outbox
        self._refused: list[str] = []

    def freeze(self, states: Collection[RoundState]) -> Report:
        """Stop voting and deciding. Return this rank's report on ``states``, the rounds that it knows."""
        self.frozen = True
        rank = self._rules.rank
        undecided = [state for state in states if state.committed is None and rank in state.votes]
        return Report(
            rank,
            self.view.id,
            commits=self.decided.commits,
            void=self.decided.void.union(state.key for state in undecided if state.disputed),
            voted={state.key: state.votes[rank].digest for state in undecided},
        )

    def note_refusal(self, refusal: str) -> None:
        """Record why a header was refused, to be reported with the next average."""
        self._refused = [*self._refused, refusal][-_MOST_REPORTED:]

    def judge(self, state: RoundState) -> None:
        """Decide whose contributions are summed, once all headers have been received."""
        if self.frozen or state.begun is None or state.verdict is not None:
            return
        if len(state.headers) < len(self.ranks):
            return
        verdict = state.judge(self.view.members, self._rules)
        if state.taking_over and state.donor is None:  # this rank's state is the majority's
            self.has_state_of.add(state.id.fragment)
        self.give_verdict(state, verdict)
        if verdict.void:
            vote = Vote(False, reason=verdict.reason)
            self.cast(RoundVote(state.id, vote, verdict.diverged, verdict.donor), state)
        premature, state.premature = state.premature, {}
        for sender, round_vote in premature.items():
            self.count(state, sender, round_vote)
        self.note_spoilers(verdict.refused, verdict.reason)

    def note_spoilers(self, spoilers: Collection[int], reason: str) -> None:
        """Record that replicas have spoilt a round for ``reason``, and have those excluded that did so too often."""
        too_often = self.spoilers.note(spoilers) - {self._rules.replica}
        if too_often:
            self._outbox.queue.append(RoundsSpoilt(self.view.id, too_often, spoilt_reason(too_often, reason)))

    def give_verdict(self, state: RoundState, verdict: Verdict) -> None:
        """Pass the verdict to the round's exchange, if that is still running."""
        state.verdict = verdict
        if state.exchanging:
            weights = state.weights(verdict.contributors, self._rules)
            self._outbox.actions.append(GiveVerdict(self.view.id, state.id, verdict, weights))

    def cast(self, vote: RoundVote, state: RoundState) -> None:
        """Send a vote, unless this rank has voted or may not; void rounds get votes, too, for the others."""
        if self.frozen or state.begun is None or self._rules.rank in state.votes:
            return
        self.broadcast(vote.to_message(self.view.id))
        if state.committed is not None:
            state.votes[self._rules.rank] = vote.vote
            return
        self.count(state, self._rules.rank, vote)
        if state.committed is None:
            state.voted_s = self._outbox.now_s
            self.await_votes(state)

    def count(self, state: RoundState, sender: int, round_vote: RoundVote) -> None:
        """Count a vote. The vote that decides the round ends it, and one that leaves it in doubt ends the view."""
        if self.frozen or state.committed is not None or sender in state.votes:
            return
        if self._rules.replica in round_vote.diverged and state.begun is not None and state.verdict is None:
            state.premature.setdefault(
                sender, round_vote
            )  # the missing headers will show whether this rank has diverged
            return
        state.votes[sender] = round_vote.vote
        mine = state.votes.get(self._rules.rank)
        agrees = (
            round_vote.vote.ok
            and sender != self._rules.rank
            and (mine is None or mine.digest == round_vote.vote.digest)
        )
        if agrees and len(state.votes) < len(self.ranks):
            return  # nothing follows before all have voted
        tallied = tally(self.ranks, state.votes, me=self._rules.rank, groups=self._positions)
        if tallied.committed is False and self._rules.rank not in state.votes:
            # a replica named as diverged must wait for the headers with this vote as well
            self.cast(replace(round_vote, vote=Vote(False, reason=tallied.reason)), state)
        if tallied.committed is not None and state.committed is None:
            self.decide(state, tallied.committed, tallied.reason)
        if tallied.disputed and not state.disputed:
            state.disputed = True
            words = disputed_reason(state.id, tallied.reason)
            self._outbox.queue.append(RoundsSpoilt(self.view.id, frozenset(), words))

    def decide(self, state: RoundState, committed: bool, reason: str, failure: TransportError | None = None) -> None:
        """Commit the round, or declare it void for ``reason``; ``failure`` is what this rank gets in that case."""
        state.committed, state.reason = committed, reason
        self.stop_timers(state)
        if committed:
            self.decided.commit(state.key, state.votes[self._rules.rank].digest)
        else:
            self.decided.call_off(state.key)
        if state.begun is not None:
            self.conclude(state, failure)

    def conclude(self, state: RoundState, instead: TransportError | None = None) -> None:
        """Report the outcome of a round."""
        failure = state.failure(instead)
        if failure is not None:
            self._outbox.actions.append(Void(state.id, failure))
        else:
            assert state.mean is not None
            assert state.plan is not None
            assert state.verdict is not None
            me = self.view.members.index(self._rules.replica)
            average = Average(
                **vars(state.mean),
                round=state.id,
                view=self.view,
                sent_bytes=state.plan.sent_bytes(me),
                received_bytes=state.plan.received_bytes(me),
                wait_s=0.0,
                note="; ".join(filter(None, [state.verdict.reason, *self._refused])),
                donor=state.donor,
                held=state.held(self._rules),
                late_s=state.late_s(state.mean.contributors, self._rules),
            )
            self._refused = []
            self._outbox.actions.append(Commit(average))
        state.concluded = True
        state.free()

    def timer(self, kind: Literal["expire", "look"], state: RoundState) -> Timer:
        """Return a timer of a round."""
        return Timer(kind, self.view.id, state.id)

    def stop_timers(self, state: RoundState) -> None:
        """Cancel the timers of a round that is decided or carried over."""
        if state.begun is not None:
            self._outbox.actions += [CancelTimer(self.timer("expire", state)), CancelTimer(self.timer("look", state))]

    def broadcast(self, message: Mapping[str, object]) -> None:
        """Send a message to all other ranks of the view."""
        self._outbox.send((rank for rank in self.ranks if rank != self._rules.rank), message)

    def look_at(self, state: RoundState, late_s: float) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """Call `RoundState.look`, and set the timer for the next look."""
        self._outbox.actions.append(SetTimer(self.timer("look", state), late_s / Lateness.LOOKS))
        return state.look(self.ranks, self._rules, self._message_counts)

    def await_votes(self, state: RoundState) -> frozenset[int]:
        """Look for missing votes on a round, and set the timer for the next look. Return the replicas that are late."""
        timer, delay_s = self.timer("expire", state), self._rules.round_timeout_s / Lateness.LOOKS
        self._outbox.actions += [CancelTimer(timer), SetTimer(timer, delay_s)]
        return state.vote_lateness.look(dict.fromkeys(state.without_vote(self.ranks, self._rules)))
