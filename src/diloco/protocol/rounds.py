"""The rounds of one rank: its contributions, the messages and timers that bring each to an outcome for all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Container, Sequence

import msgspec

from diloco.algorithm import RoundId, Verdict
from diloco.errors import RoundVoidError, TransportError, ViewChangedError
from diloco.membership import Cause, Report, RoundIds, View, Votes, names_of, refusal
from diloco.protocol.effects import Outbox, RoundFailed
from diloco.protocol.events import Computed, Exchanged, Submitted
from diloco.protocol.round import Round
from diloco.protocol.rules import Rules
from diloco.protocol.wire import Header, RoundVote, WireMessage

_LEAST_LEAD_STEPS, _LEAD_WINDOWS = 1000, 4
"""How far ahead other members can be: one window and a part of another, and some more for void rounds."""
_UNKNOWN_LEAD_STEPS = 1 << 32  # the same before this rank has contributed
MOST_SPOILT = 3  # a member that has spoilt this many recent rounds is to be excluded
_RECENT_ROUNDS = 32  # most recent rounds of a member that count for that
_MOST_VOID = 8  # void rounds kept per fragment; a rank that is further behind runs into the round's timeout

# only if one of them is damaged: who commits has this rank's vote
_NOT_VOTED = "others report that they have committed it, but this rank has not voted for it"
_VOTED_AGAINST = "a replica voted against it before the view changed"


class Rounds:
    """The rounds of the current view, and this rank's contributions, which wait until a view is active."""

    MOST_EARLY = 4096  # that one rank may contribute to before this one has begun them: more than a view can have

    def __init__(self, rules: Rules, outbox: Outbox) -> None:
        self.view: View | None = None  # the view of the rounds; None until this rank is a member
        self.failure: TransportError | None = None  # why this rank takes part in no more rounds, or None
        self.reason = ""  # the reason for the last view change, as this rank learned it
        self.step = 0  # the number of inner steps that this rank has begun to synchronise
        self.from_step = 0  # contributions sent before this inner step are too old for the current view
        self.joined = False  # whether this rank joined a run in progress, so that it has to adopt the run's state
        self.frozen = False  # whether voting and deciding have stopped, because the view is ending
        self._rules = rules
        self._outbox = outbox
        self._ranks: tuple[int, ...] = ()
        self._rounds: dict[RoundId, Round] = {}
        self._commits: Votes = {}  # the recently committed rounds of this view
        self._void: RoundIds = frozenset()  # the void ones, also of earlier views
        self._frozen_s = math.inf
        self._spoilt: dict[int, deque[bool]] = {}  # member -> of which recent rounds its contribution was unusable
        self._last: dict[int, int] = {}  # by fragment: the outer step of the last round begun in this view
        self._waiting: list[Submitted] = []
        self._has_state_of: set[int] = set()  # fragments whose state this rank shares with the majority
        self._sent_at: dict[int, int] = {}  # fragment -> inner step of the last contribution to it
        self._longest_window_steps = 0
        self._newest = 0  # the greatest outer step of a round that this rank has begun

    @property
    def greatest_step(self) -> int:
        """The greatest inner step that another member can have begun, as it waits for this rank's contributions."""
        widest = self._longest_window_steps
        return self.step + (max(_LEAST_LEAD_STEPS, _LEAD_WINDOWS * widest) if widest else _UNKNOWN_LEAD_STEPS)

    # The contributions of this rank.

    def open(self, view: View, carried: Sequence[Submitted], void: RoundIds) -> None:
        """Begin the rounds of ``view``, unless this rank takes part no more, and release the waiting contributions.

        ``carried`` are those to undecided rounds of the previous view; others have decided earlier rounds ``void``.
        """
        if self.failure is None:
            self._spoilt = {member: self._spoilt.get(member, deque(maxlen=_RECENT_ROUNDS)) for member in view.members}
            self.view, self._ranks, self.frozen, self._frozen_s = view, self._rules.ranks(view.members), False, math.inf
            self._rounds, self._last = {}, {}
            self._commits, self._void = {}, void
            for submitted in carried:
                self._begin(submitted)
        self._begin_waiting()

    def close(self, failure: TransportError, commits: Container[RoundId] = ()) -> None:
        """Take part in no more rounds. Those in flight that nobody has committed end with the first failure."""
        self.failure = self.failure or failure
        if self.view is not None:
            self.freeze()
            self.end(commits, str(failure), self.failure)
        self._begin_waiting()

    def submit(self, submitted: Submitted) -> None:
        """Begin the round of a contribution, hold the contribution, or report its round as void."""
        round_id = submitted.header.round
        window_steps = submitted.step - self._sent_at.get(round_id.fragment, 0)
        self._longest_window_steps = max(self._longest_window_steps, window_steps)
        self._sent_at[round_id.fragment] = submitted.step
        if self.failure is not None:
            void = RoundVoidError(str(self.failure), round=str(round_id))
            self._outbox.effects.outcomes.append((round_id, self.failure if self._rules.raises(round_id) else void))
        elif self.view is None or self.frozen:
            self._waiting.append(submitted)
        elif submitted.step < self.from_step and round_id.fragment >= 0:
            why = f"{round_id} is void: the view changed before it was sent ({self.reason})."
            self._outbox.effects.outcomes.append((round_id, ViewChangedError(why, round=str(round_id))))
        else:
            self._begin(submitted)

    def _begin_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for submitted in waiting:
            self.submit(msgspec.structs.replace(submitted, paused_s=self._outbox.now_s - submitted.sent_s))

    def _begin(self, submitted: Submitted) -> None:
        assert self.view is not None
        fragment, outer_step = submitted.header.round
        round_ = self._round(submitted.header.round)
        self._forget_before(fragment, outer_step)
        self._last[fragment] = max(self._last.get(fragment, 0), outer_step)
        self._newest = max(self._newest, outer_step)
        taking_over = self.joined and fragment >= 0 and fragment not in self._has_state_of
        round_.begin(submitted, taking_over=taking_over)
        if round_.id in self._void and round_.committed is None:  # others decided so before this view began
            self._decide(round_, False, _VOTED_AGAINST)
            return
        self._broadcast(round_.introduce())
        if round_.committed is not None:  # void, by the votes of others
            self._cast(round_, reason=round_.reason)
            self._judge(round_)
            self._conclude(round_)
            return
        round_.begin_exchange()
        self._outbox.effects.exchanges.append((self.view, round_.id))
        self._look_at(round_)
        self._judge(round_)

    # The end of a view.

    def freeze(self) -> Report:
        """Stop voting and deciding. Return this rank's report on its rounds."""
        assert self.view is not None
        self._frozen_s = min(self._frozen_s, self._outbox.now_s)
        self.frozen = True
        rank = self._rules.rank
        undecided = [round_ for round_ in self._rounds.values() if round_.committed is None and rank in round_.votes]
        return Report(
            rank,
            self.view.id,
            commits=self._commits,
            void=self._void.union(round_.id for round_ in undecided if round_.disputed),
            voted={round_.id: round_.votes[rank].digest for round_ in undecided},
        )

    def end(
        self, commits: Container[RoundId], reason: str, failure: TransportError | None = None, *, carried: bool = False
    ) -> Sequence[Submitted]:
        """End the view. A round that any survivor committed is committed; the others are carried over or void.

        Args:
            commits: the rounds that are committed, if this rank has voted for them.
            failure: why this rank takes part in no more rounds; None if it continues.
            carried: whether undecided rounds continue in the next view.

        Returns:
            This rank's contributions to these, in the order sent.
        """
        undecided: list[tuple[float, Submitted]] = []
        for round_ in list(self._rounds.values()):
            mine = round_.votes.get(self._rules.rank)
            if round_.committed is not None:
                pass
            elif round_.id in commits and mine is not None and mine.ok:
                self._decide(round_, True, "")
            elif round_.id in commits and round_.begun is not None:
                self._decide(round_, False, _NOT_VOTED)
            elif failure is not None or not carried:
                changed = ViewChangedError(reason, round=str(round_.id))
                raised = failure if self._rules.raises(round_.id) else None
                self._decide(round_, False, reason, raised or changed)
            elif round_.begun is not None:
                undecided.append(
                    (round_.begun.sent_s, round_.renewed(round_.begun, self._outbox.now_s, self._frozen_s))
                )
            if round_.verdict is None:  # so that the exchange does not wait for the verdict
                self._give_verdict(round_, Verdict((), reason))
        return [submitted for _, submitted in sorted(undecided, key=lambda pair: pair[0])]

    # Messages of members.

    def refuses(self, sender: int, message: Header | RoundVote) -> str:
        """Return why a member can't refer to a round, or "": it is too far ahead, or one of too many."""
        if message.round.outer_step > max(self.greatest_step, self._newest + _LEAST_LEAD_STEPS):
            return f"{message.round}, which no member can have begun"
        if isinstance(message, Header) and self._are_too_many_early(sender):
            return "too many rounds that this rank has not begun"
        return ""

    def _are_too_many_early(self, sender: int) -> bool:
        most = self.MOST_EARLY  # counted only when there can be so many, since each header comes by here
        early = (sender in round_.headers and not round_.was_begun for round_ in self._rounds.values())
        return len(self._rounds) >= most and sum(early) >= most

    def receive_header(self, sender: int, header: Header) -> None:
        known = self._rounds.get(header.round)
        is_old = known is None and header.round.outer_step + 1 < self._last.get(header.round.fragment, 0)
        # the first header of a sender stands; the exchange may still be waiting for this one
        if sender in self._ranks and not is_old and (known is None or sender not in known.headers):
            round_ = self._round(header.round)
            round_.hear(sender, header, self._outbox.now_s)
            self._judge(round_)

    def receive_vote(self, sender: int, vote: RoundVote) -> None:
        """Process a member's vote on a round to which it has contributed."""
        round_ = self._rounds.get(vote.round)
        if round_ is not None and sender in round_.headers and round_.committed is None:
            self._count(round_, sender, vote)

    # What others ask about rounds.

    def others_have_contributed(self) -> bool:
        """Return whether another rank has contributed to a round to which this one has not."""
        return any(round_.headers and not round_.was_begun for round_ in self._rounds.values())

    def suspects(self) -> frozenset[int]:
        """Return the replicas that others may accuse of being late, or of spoiling rounds.

        This rank has awaited a contribution, or a vote, for half of the looks after which it is late; or so many rounds
        are spoilt that others, which may be a round ahead, know of `MOST_SPOILT`.
        """
        spoilers = {member for member, rounds in self._spoilt.items() if sum(rounds) >= MOST_SPOILT - 1}
        return frozenset(spoilers).union(*(round_.suspects for round_ in self._rounds.values()))

    # Payloads and timers.

    def compute(self, computed: Computed) -> None:
        """Vote for a round, as this rank holds its mean."""
        if round_ := self._find(computed.view_id, computed.round):
            self._cast(round_, computed.digest)

    def end_exchange(self, ended: Exchanged) -> None:
        """Record the end of the exchange of a round's payloads."""
        if (round_ := self._find(ended.view_id, ended.round)) is None:
            return
        if ended.failure and not ended.peer_lost and round_.committed is None:
            self._cast(round_, reason=ended.failure)
        if ended.spoiler is not None:
            self._note_spoilers({ended.spoiler}, ended.failure)
        round_.end_exchange()

    def look(self, round_id: RoundId) -> None:
        """Vote against a round that takes too long, and exclude the replicas that have kept it waiting for too long.

        A replica's vote is late if it has not arrived a round timeout after this rank's own vote. All have contributed
        by then, and a rank that has no mean within that time of its contribution votes against the round. Such replicas
        are excluded even if the others can't continue without them.
        """
        round_, limit_s = self._rounds[round_id], self._rules.round_timeout_s
        if self.frozen:
            return
        has_voted = self._rules.rank in round_.votes
        if not has_voted and self._outbox.now_s >= round_.due_s:
            what = f"no contribution from {names_of(round_.missing)}" if round_.missing else "not all payloads"
            self._cast(round_, reason=f"replica {self._rules.replica} received {what} within {limit_s:g} s")
            return
        late = self._look_at(round_)
        if has_voted:
            assert self.view is not None
            # if the others can't continue without them, the view change shows whether they have committed the round
            if refusal(self.view, late, self._rules):
                round_.dispute()
            why = f"{'have' if len(late) > 1 else 'has'} not voted on {round_.id}"
        else:
            why = f"{'are' if len(late) > 1 else 'is'} late: no contribution to {round_.id} arrived"
        if late:
            self._fail(f"{names_of(late)} {why} within {round_.late_s:g} s", "late", late, anyway=has_voted)

    def _look_at(self, round_: Round) -> frozenset[int]:
        """Look at a round, now and when it is due or the next look is; return the replicas that are late."""
        self._outbox.effects.timers[round_.id] = round_.next_look_s(self._outbox.now_s)
        return round_.late()

    # From headers to an outcome.

    def _judge(self, round_: Round) -> None:
        """Decide whose contributions are summed, once all headers have been received."""
        if self.frozen or round_.begun is None or round_.verdict is not None or len(round_.headers) < len(self._ranks):
            return
        verdict = round_.judge()
        if round_.taking_over and round_.donor is None:  # this rank's state is the majority's
            self._has_state_of.add(round_.id.fragment)
        self._give_verdict(round_, verdict)
        if verdict.void:
            self._cast(round_, reason=verdict.reason, diverged=verdict.diverged)
        for sender, vote in round_.premature.items():
            self._count(round_, sender, vote)
        self._note_spoilers(verdict.refused, verdict.reason)

    def _note_spoilers(self, spoilers: Collection[int], reason: str) -> None:
        """Record that replicas have spoilt a round for ``reason``, and have those excluded that did so too often."""
        for member, rounds in self._spoilt.items():
            rounds.append(member in spoilers)
        counts = {member: sum(self._spoilt.get(member, ())) for member in {*spoilers} - {self._rules.replica}}
        if too_often := frozenset(member for member, count in counts.items() if count and count % MOST_SPOILT == 0):
            has = "have" if len(too_often) > 1 else "has"
            why = f"{names_of(too_often)} {has} spoilt at least {MOST_SPOILT} recent rounds: {reason}"
            self._fail(why, "fault", too_often)

    def _give_verdict(self, round_: Round, verdict: Verdict) -> None:
        if (given := round_.give(verdict)) is not None:
            self._outbox.effects.verdicts.append(given)

    def _cast(self, round_: Round, digest: str = "", *, reason: str = "", diverged: tuple[int, ...] = ()) -> None:
        """Send a vote, unless this rank has voted or may not; void rounds get votes, too, for the others."""
        if self.frozen or round_.begun is None or self._rules.rank in round_.votes:
            return
        assert self.view is not None
        vote = RoundVote(self.view.id, round_.id, digest, reason, diverged)
        self._broadcast(vote)
        if round_.committed is not None:
            round_.count(self._rules.rank, vote)
            return
        self._count(round_, self._rules.rank, vote)
        if round_.committed is None:
            round_.await_votes(self._outbox.now_s)
            self._look_at(round_)

    def _count(self, round_: Round, sender: int, vote: RoundVote) -> None:
        """Count a vote. The vote that decides the round ends it, and one that leaves it in doubt ends the view."""
        if self.frozen or round_.committed is not None or sender in round_.votes:
            return
        committed, reason = round_.count(sender, vote)
        if committed is False and self._rules.rank not in round_.votes:
            # a replica named as diverged must wait for the headers with this vote as well
            self._cast(round_, reason=reason, diverged=vote.diverged)
        if committed is not None and round_.committed is None:
            self._decide(round_, committed, reason)
        if committed is None and reason and round_.dispute():
            self._fail(f"{round_.id} is disputed: {reason}", "other")

    def _decide(self, round_: Round, committed: bool, reason: str, failure: TransportError | None = None) -> None:
        """Commit a round, or declare it void for ``reason``; ``failure`` is what this rank gets in that case."""
        round_.decide(reason, committed=committed)
        if round_.begun is not None:
            self._outbox.effects.timers[round_.id] = None
        fragment, outer_step = round_.id
        if committed:
            recent = {
                known: digest
                for known, digest in self._commits.items()
                if known.fragment != fragment or known.outer_step >= outer_step - 1
            }
            self._commits = {**recent, round_.id: round_.votes[self._rules.rank].digest}
            # all members have contributed to this round, so none asks about earlier ones
            self._void = frozenset(
                void for void in self._void if void.fragment != fragment or void.outer_step > outer_step
            )
        else:
            newest = sorted(void for void in self._void | {round_.id} if void.fragment == fragment)[-_MOST_VOID:]
            self._void = frozenset(void for void in self._void if void.fragment != fragment).union(newest)
        if round_.begun is not None:
            self._conclude(round_, failure)

    def _conclude(self, round_: Round, instead: TransportError | None = None) -> None:
        self._outbox.effects.outcomes.append((round_.id, round_.conclude(instead)))

    # The table of rounds.

    def _find(self, view_id: int, round_id: RoundId) -> Round | None:
        return self._rounds.get(round_id) if self.view is not None and view_id == self.view.id else None

    def _round(self, round_id: RoundId) -> Round:
        assert self.view is not None
        return self._rounds.setdefault(round_id, Round(round_id, self.view, self._rules))

    def _forget_before(self, fragment: int, outer_step: int) -> None:
        """Discard earlier rounds of the fragment that have ended, as this rank begins a new one."""

        def is_needed(old: Round) -> bool:
            is_recent = old.id.fragment != fragment or old.id.outer_step >= outer_step - 1
            return is_recent or (old.was_begun and (not old.concluded or old.exchanging))

        self._rounds = {round_id: old for round_id, old in self._rounds.items() if is_needed(old)}

    def _fail(self, why: str, cause: Cause, late: frozenset[int] = frozenset(), *, anyway: bool = False) -> None:
        """Have the view end; see `RoundFailed`."""
        assert self.view is not None
        self._outbox.queue.append(RoundFailed(self.view.id, why, cause, late, anyway))

    def _broadcast(self, message: WireMessage) -> None:
        self._outbox.send((rank for rank in self._ranks if rank != self._rules.rank), message)
