"""The rounds of one view: which there are, which ranks have contributed, and how they end with the view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from diloco.algorithm import RoundId, Uplink, Verdict, plan_round
from diloco.errors import TransportError, ViewChangedError
from diloco.membership import NextView, Report, Vote, enough_without
from diloco.protocol.actions import SetTimer, StartExchange, Timer
from diloco.protocol.events import Computed, ExchangeEnded, Outbox, Submitted
from diloco.protocol.headers import Header, header_of
from diloco.protocol.messages import RoundVote
from diloco.protocol.round_state import RoundState
from diloco.protocol.rules import Policies, Rules, expired_reason, late_reason, missing_votes_reason
from diloco.protocol.voting import Voting

__all__ = ["RoundTable"]

_MOST_EARLY = 4096
"""The most rounds that one rank may refer to before this rank has begun them: more than a view can have."""

_NOT_VOTED = "others report that they have committed it, but this rank has not voted for it"
_VOTED_AGAINST = "a replica voted against it before the view changed"


class RoundTable:
    """The rounds of one view."""

    def __init__(self, voting: Voting, rules: Rules, policies: Policies, outbox: Outbox) -> None:
        self.view = voting.view
        self._voting = voting
        self._ranks = voting.ranks
        self._rules = rules
        self._policies = policies
        self._outbox = outbox
        self._rounds: dict[RoundId, RoundState] = {}
        self._frozen_s = math.inf  # when voting and deciding stopped
        self._early: dict[int, set[RoundId]] = {}  # by sender: the rounds that this rank has not begun
        self._last: dict[int, int] = {}  # by fragment: the outer step of the last round that this rank has begun

    @property
    def frozen(self) -> bool:
        """Whether voting and deciding have stopped, because the view is ending."""
        return self._voting.frozen

    def freeze(self) -> Report:
        """Stop voting and deciding. Return this rank's report on its rounds."""
        self._frozen_s = min(self._frozen_s, self._outbox.now_s)
        return self._voting.freeze(self._rounds.values())

    def end(self, following: NextView | None, reason: str, failure: TransportError | None) -> Sequence[Submitted]:
        """End the view. A round that any survivor committed is committed; the others are carried over or void.

        Args:
            following: what the survivors adopted; None if this rank stops by itself.
            reason: why rounds that are not carried over are void.
            failure: why this rank takes part in no more rounds; None if it continues.

        Returns:
            This rank's contributions to undecided rounds that are carried over, in the order sent.
        """
        undecided = []
        carried = failure is None and following is not None and following.carries_over
        for state in list(self._rounds.values()):
            mine = state.votes.get(self._rules.rank)
            if state.committed is not None:
                pass
            elif following is not None and state.key in following.commits and mine is not None and mine.ok:
                self._voting.decide(state, True, "")
            elif following is not None and state.key in following.commits and state.begun is not None:
                self._voting.decide(state, False, _NOT_VOTED)
            elif not carried:
                changed = ViewChangedError(f"{state.id} is void: {reason}.", round=str(state.id))
                raised = failure if self._policies.raises(state.id) else None
                self._voting.decide(state, False, reason, raised or changed)
            elif state.begun is not None:
                undecided.append((state.begun.sent_s, state.renewed(self._rules, self._frozen_s, self._outbox.now_s)))
                self._voting.stop_timers(state)
            if state.verdict is None:  # so that the exchange does not wait for the verdict
                self._voting.give_verdict(state, Verdict((), reason))
        return [submitted for _, submitted in sorted(undecided, key=lambda each: each[0])]

    def begin(self, submitted: Submitted, *, joined: bool) -> None:
        """Contribute to a round, which may be carried over from the previous view.

        Args:
            submitted: the contribution.
            joined: whether this rank joined a run in progress, so that it adopts the state of fragments.
        """
        contribution = submitted.contribution
        fragment = contribution.round.fragment
        state = self._state(contribution.round)
        self._forget_before(contribution.round)
        self._last[fragment] = max(self._last.get(fragment, 0), contribution.round.outer_step)
        state.begun = submitted
        state.taking_over = joined and fragment >= 0 and fragment not in self._voting.has_state_of
        # others decided so before this view began
        if state.key in self._voting.decided.void and state.committed is None:
            self._voting.decide(state, False, _VOTED_AGAINST)
            return
        state.plan = plan_round(contribution, len(self.view.members), self._uplinks_before(contribution.round))
        state.heard_s[self._rules.rank] = submitted.sent_s
        header = replace(
            header_of(contribution),
            taking_over=state.taking_over,
            uplink=submitted.uplink,
        )
        state.headers[self._rules.rank] = header
        self._voting.broadcast(header.to_message(self.view.id))
        state.exchanging = True
        self._outbox.actions.append(StartExchange(self.view, contribution, state.plan))
        if state.committed is None:
            limit_s = self._rules.round_timeout_s
            left_s = limit_s - (self._outbox.now_s - submitted.sent_s - min(submitted.paused_s, limit_s))
            self._outbox.actions.append(SetTimer(self._voting.timer("expire", state), max(0.0, left_s)))
            if self._rules.late_s is not None and fragment >= 0:
                self._voting.look_at(state, self._rules.late_s)
        else:
            self._voting.cast(RoundVote(state.id, Vote(False, reason=state.reason)), state)
            self._voting.conclude(state)
        self._voting.judge(state)

    # Messages of members.

    def exceeds_early_limit(self, sender: int, round_id: RoundId) -> bool:
        """Return whether a member has referred to more rounds that this rank has not begun than a view can have."""
        state = self._rounds.get(round_id)
        if state is not None and state.was_begun:
            return False
        early = self._early.setdefault(sender, set())
        if round_id not in early and len(early) >= _MOST_EARLY:
            return True
        early.add(round_id)
        return False

    def receive_header(self, sender: int, header: Header) -> None:
        """Process the header of a member's contribution to a round."""
        if sender not in self._ranks:
            return
        if refusal := self._refusal(sender, header.round):
            self._voting.note_refusal(refusal)
            return
        state = self._state(header.round)
        state.headers[sender], state.heard_s[sender] = header, self._outbox.now_s
        self._voting.judge(state)

    def receive_vote(self, sender: int, vote: RoundVote) -> None:
        """Process a member's vote on a round to which it has contributed."""
        state = self._rounds.get(vote.round)
        if state is None or sender not in state.headers or state.committed is not None:
            return
        self._voting.count(state, sender, vote)

    def missing(self, round_id: RoundId) -> tuple[int, ...]:
        """Return the replicas that have not announced a contribution to a round."""
        state = self._rounds.get(round_id) or RoundState(round_id)  # a round without any message yet
        return state.missing(self._ranks, self._rules)

    def others_have_contributed(self) -> bool:
        """Return whether another rank has contributed to a round to which this one has not."""
        return any(state.headers and not state.was_begun for state in self._rounds.values())

    def late_contributors(self) -> frozenset[int]:
        """Return the replicas whose contribution this rank has awaited, since its own, for at least ``late_s / 2``."""
        half_s = math.inf if self._rules.late_s is None else self._rules.late_s / 2
        waited_for = (
            state
            for state in self._rounds.values()
            if state.begun is not None and state.committed is None and self._outbox.now_s - state.begun.sent_s >= half_s
        )
        return frozenset(replica for state in waited_for for replica in state.missing(self._ranks, self._rules))

    def late_voters(self) -> frozenset[int]:
        """Return the replicas whose vote this rank has awaited, since its own, for at least ``round_timeout_s / 2``."""
        waited = (
            state
            for state in self._rounds.values()
            if state.committed is None and self._outbox.now_s - state.voted_s >= self._rules.round_timeout_s / 2
        )
        return frozenset(replica for state in waited for replica in state.without_vote(self._ranks, self._rules))

    # Payloads and timers.

    def compute(self, event: Computed) -> None:
        """Vote for a round of which this rank holds the mean."""
        if state := self._find(event.view_id, event.round):
            state.mean = event.mean
            self._voting.cast(RoundVote(state.id, Vote(True, state.sealed_digest(event.digest))), state)

    def end_exchange(self, event: ExchangeEnded) -> str:
        """Record the end of a round's exchange. Return which payload connection broke, as a message, or ""."""
        state, broken = self._find(event.view_id, event.round), ""
        if state is None:
            return ""
        if event.link_broken and not self.frozen:
            broken = f"replica {self._rules.replica} reports: {event.failure}"
        elif event.failure and state.committed is None:
            self._voting.cast(RoundVote(state.id, Vote(False, reason=event.failure)), state)
        if event.spoiler is not None:
            self._voting.note_spoilers({event.spoiler}, event.failure)
        state.exchanging = False
        state.free()
        return broken

    def expire(self, timer: Timer) -> str:
        """Vote against a round that takes too long. Return which payload connection is stalled, as a message, or ""."""
        state = self._find(timer.view_id, timer.round)
        if state is None or state.committed is not None or self.frozen or self._rules.rank in state.votes:
            return ""
        missing = state.missing(self._ranks, self._rules)
        reason = expired_reason(missing, self._rules)
        self._voting.cast(RoundVote(state.id, Vote(False, reason=reason)), state)
        # a new connection sends at once, while TCP may wait for minutes before it retries
        if not missing and state.exchanging:
            return f"a payload connection of replica {self._rules.replica} is stalled: {reason}"
        return ""

    def overdue(self, timer: Timer) -> tuple[frozenset[int], str] | None:
        """Return the replicas whose vote is overdue, and the reason to exclude them, or None if there are none.

        A replica's vote is overdue if it has not arrived a round timeout after this rank's own vote. All have
        contributed by then, and a rank that has no mean within that time of its contribution votes against the round.
        Such replicas are excluded even if the others can't continue without them.
        """
        state = self._find(timer.view_id, timer.round)
        if state is None or state.committed is not None or self.frozen or self._rules.rank not in state.votes:
            return None
        late = self._voting.await_votes(state)
        # if the others can't continue without them, the view change shows whether they have committed the round
        state.disputed = state.disputed or not enough_without(self.view, late, self._policies.quorum)
        return (late, missing_votes_reason(state.id, late, self._rules.round_timeout_s)) if late else None

    def look(self, timer: Timer) -> tuple[frozenset[int], frozenset[int], str] | None:
        """Return the late replicas that still send something, the silent ones, and the reason; None if none is late."""
        state, late_s = self._find(timer.view_id, timer.round), self._rules.late_s
        if state is None or late_s is None or state.committed is not None or self.frozen:
            return None
        absent, silent, unheard = self._voting.look_at(state, late_s)
        if not absent and not silent:
            return None
        return (absent | silent) - unheard, unheard, late_reason(state.id, absent, silent, late_s)

    # A round.

    def _find(self, view_id: int, round_id: RoundId | None) -> RoundState | None:
        """Return a round of this view, or None if it belongs to another view."""
        assert round_id is not None
        return self._rounds.get(round_id) if view_id == self.view.id else None

    def _state(self, round_id: RoundId) -> RoundState:
        return self._rounds.setdefault(round_id, RoundState(round_id))

    def _uplinks_before(self, round_id: RoundId) -> tuple[Uplink, ...]:
        """Return the members' uplinks according to the fragment's last round; () if this view has not committed it.

        A fragment's round is decided on every rank before the rank begins the next one. So all members of the view,
        which have the same votes, plan the next one alike.
        """
        last = self._rounds.get(RoundId(round_id.fragment, round_id.outer_step - 1))
        if last is None or not last.committed:
            return ()
        return tuple(header.uplink for header in last.headers_here(self.view.members, self._rules).values())

    def _forget_before(self, begun: RoundId) -> None:
        """Discard earlier rounds of the fragment that have ended, as this rank begins a new one."""
        fragment, outer_step = begun.fragment, begun.outer_step
        self._rounds = {
            each: old
            for each, old in self._rounds.items()
            if each.fragment != fragment
            or each.outer_step >= outer_step - 1
            or (old.was_begun and (not old.concluded or old.exchanging))
        }
        for sender, early in self._early.items():
            self._early[sender] = {e for e in early if e.fragment != fragment or e.outer_step > outer_step}

    def _refusal(self, sender: int, round_id: RoundId) -> str:
        """Return why a header is refused, as a message that names its sender, or ""."""
        name = f"a contribution of replica {self._rules.replica_of(sender)} to {round_id} was refused"
        state = self._rounds.get(round_id)
        if state is not None:  # the exchange may still be waiting for this header
            return f"{name}: it had contributed already" if sender in state.headers else ""
        over = round_id.outer_step + 1 < self._last.get(round_id.fragment, 0)
        return f"{name}: that round ended long ago" if over else ""
