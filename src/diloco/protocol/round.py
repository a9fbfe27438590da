"""One round as one rank knows it: headers, the verdict on them, votes, and the outcome that follows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from diloco.algorithm import UNKNOWN_UPLINK, Contribution, RoundId, Uplink, Verdict, bounded_weights, judge
from diloco.errors import DivergedError, RoundVoidError, TransportError
from diloco.membership import View
from diloco.protocol.effects import Commit, GiveVerdict
from diloco.protocol.events import Submitted
from diloco.protocol.rules import Rules
from diloco.protocol.wire import Header, RoundVote


@dataclass(eq=False)
class Round:
    """What a rank knows of a round in one view; a round that continues in the next view starts anew there.

    Only its own methods change it.
    """

    id: RoundId
    view: View
    rules: Rules
    headers: dict[int, Header] = field(default_factory=dict)  # by rank
    votes: dict[int, RoundVote] = field(default_factory=dict)  # by rank
    heard_s: dict[int, float] = field(default_factory=dict)  # rank -> when its header came, by this rank's clock
    premature: dict[int, RoundVote] = field(default_factory=dict)  # votes that depend on headers not received yet
    fault: DivergedError | None = None  # set if this rank's state differs from the majority's; reported as the outcome
    begun: Submitted | None = None  # this rank's contribution; None before it contributes and after the round has ended
    # whether this rank has joined, and its first round of the fragment has not shown yet that it has the others' state
    taking_over: bool = False
    donor: int | None = None  # a replica with the state that the round applies to, if this rank has a different one
    verdict: Verdict | None = None  # whose contributions are summed; None until all headers have been received
    committed: bool | None = None  # True: applied by all; False: void for all; None: undecided
    # this rank has voted for the round and others against it; the view change decides it
    disputed: bool = False
    reason: str = ""  # why the round is void
    exchanging: bool = False  # whether the payload exchange is running
    concluded: bool = False  # whether the outcome was reported
    voted_s: float = math.inf  # when this rank has voted for it
    # replica -> how many looks after the first one its contribution is awaited; from ``voted_s`` on, its vote
    looks: dict[int, int] = field(default_factory=dict)

    @property
    def was_begun(self) -> bool:
        return self.begun is not None or self.concluded

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the view."""
        return self.rules.ranks(self.view.members)

    @property
    def missing(self) -> tuple[int, ...]:
        """The replicas with a rank whose header has not been received."""
        return tuple(sorted({self.rules.replica_of(rank) for rank in self.ranks if rank not in self.headers}))

    @property
    def awaited(self) -> frozenset[int]:
        """The other replicas of which a contribution is missing, or once this rank has voted, a vote."""
        known = self.headers if math.isinf(self.voted_s) else self.votes
        return frozenset(self.rules.replica_of(rank) for rank in self.ranks if rank not in known) - {self.rules.replica}

    def header_of(self, member: int) -> Header:
        """Return the header of the member's rank with which this one exchanges payloads."""
        return self.headers[self._rank_of(member)]

    def _rank_of(self, member: int) -> int:
        """Return a member's rank at this rank's position."""
        return member * self.rules.ranks_per_replica + self.rules.position

    # What happens to it.

    def begin(self, submitted: Submitted, *, taking_over: bool) -> None:
        """Note this rank's contribution."""
        self.begun, self.taking_over = submitted, taking_over

    def introduce(self) -> Header:
        """Return this rank's header, for the others."""
        assert self.begun is not None
        header = msgspec.structs.replace(self.begun.header, view=self.view.id, taking_over=self.taking_over)
        self.hear(self.rules.rank, header, self.begun.sent_s)
        return header

    def hear(self, sender: int, header: Header, now_s: float) -> None:
        self.headers[sender], self.heard_s[sender] = header, now_s

    def judge(self) -> Verdict:
        """Decide whose contributions are summed, as all headers have been received, and whose state they apply to."""
        self.verdict = verdict = judge_headers(self.headers, self.view.members, self.rules)
        if self.taking_over:
            holder = next((member for member in self.view.members if not self.header_of(member).taking_over), None)
            if holder is not None and self.header_of(holder).digest != self.headers[self.rules.rank].digest:
                self.donor = holder
        if self.rules.replica in verdict.diverged:
            self.fault = verdict.divergence(self.id, self.header_of(verdict.donor).digest)
        return verdict

    def give(self, verdict: Verdict) -> GiveVerdict | None:
        """Return what the exchange needs, if it runs: the verdict, the contributors' weights, the members' uplinks."""
        self.verdict = verdict
        if not self.exchanging:
            return None
        headers = {member: self.header_of(member) for member in verdict.contributors}
        weights = bounded_weights(
            {member: header.weight for member, header in headers.items()},
            {member: header.base_weight for member, header in headers.items()},
        )
        uplinks = () if verdict.void else tuple(self.header_of(member).uplink for member in self.view.members)
        return GiveVerdict(self.view.id, self.id, verdict, weights, uplinks)

    @property
    def due_s(self) -> float:
        """When this rank votes against the round, unless it has voted."""
        assert self.begun is not None
        limit_s = self.rules.round_timeout_s
        return self.begun.sent_s + min(self.begun.paused_s, limit_s) + limit_s

    @property
    def late_s(self) -> float:
        """How long a contribution, or a vote, may be awaited; infinite: none is ever late."""
        if self.voted_s < math.inf:
            return self.rules.round_timeout_s
        return math.inf if self.rules.late_s is None or self.id.fragment < 0 else self.rules.late_s

    def next_look_s(self, now_s: float) -> float:
        """Return the time until the next look, or until the round is due if that comes first."""
        left_s = self.due_s - now_s if math.isinf(self.voted_s) else math.inf
        return max(0.0, min(left_s, self.late_s / Rules.LOOKS))

    def late(self) -> frozenset[int]:
        """Look which other replicas are awaited, and return those that have been awaited for too long.

        The time is counted in looks, not in seconds: a process that was suspended for an hour has made no more looks
        than before, and reads what others sent meanwhile before it looks again.
        """
        if math.isinf(self.late_s):
            return frozenset()
        self.looks = {replica: self.looks.get(replica, -1) + 1 for replica in self.awaited}
        return frozenset(replica for replica, looks in self.looks.items() if looks >= Rules.LOOKS)

    @property
    def suspects(self) -> frozenset[int]:
        """The replicas that are awaited for half of the looks after which they are late."""
        if self.committed is not None:
            return frozenset()
        return frozenset(replica for replica in self.awaited if self.looks.get(replica, 0) >= Rules.LOOKS / 2)

    def renewed(self, begun: Submitted, now_s: float, frozen_s: float) -> Submitted:
        """Return a contribution for the next view. Its time restarts if this rank has voted within it."""
        if self.rules.rank in self.votes:
            return msgspec.structs.replace(begun, sent_s=now_s, paused_s=0.0)
        return msgspec.structs.replace(begun, paused_s=begun.paused_s + now_s - frozen_s)

    def count(self, sender: int, vote: RoundVote) -> tuple[bool | None, str]:
        """Note a vote, and return what all votes mean, as `tally` does."""
        if self.rules.replica in vote.diverged and self.begun is not None and self.verdict is None:
            self.premature.setdefault(sender, vote)  # the missing headers will show whether this rank has diverged
            return None, ""
        self.votes[sender] = vote
        mine, ranks = self.votes.get(self.rules.rank), self.ranks
        agrees = vote.ok and sender != self.rules.rank and (mine is None or mine.digest == vote.digest)
        if agrees and len(self.votes) < len(ranks):
            return None, ""  # nothing follows before all have voted
        return tally(ranks, self.votes, me=self.rules.rank, size=self.rules.ranks_per_replica)

    def await_votes(self, now_s: float) -> None:
        """Count the looks at the others anew, as this rank has voted."""
        self.voted_s, self.looks = now_s, {}

    def dispute(self) -> bool:
        """Note that the view change decides the round; return whether that is new."""
        is_new, self.disputed = not self.disputed, True
        return is_new

    def decide(self, reason: str, *, committed: bool) -> None:
        self.committed, self.reason = committed, reason

    def conclude(self, instead: TransportError | None) -> Commit | TransportError:
        """Return what to report of a round that is decided.

        ``instead`` replaces the outcome, unless this rank has diverged.
        """
        outcome = self._outcome() if instead is None or self.fault is not None else instead
        self.concluded = True
        self._free()
        return outcome

    def begin_exchange(self) -> None:
        self.exchanging = True

    def end_exchange(self) -> None:
        self.exchanging = False
        self._free()

    def _free(self) -> None:
        if self.concluded and not self.exchanging:
            self.begun = None

    def _outcome(self) -> Commit | TransportError:
        """Return how the round went, or why there is no average."""
        if self.fault is not None or not self.committed:
            return self.fault or RoundVoidError(self.reason, round=str(self.id))
        assert self.verdict is not None
        heard_s = [self.heard_s[self._rank_of(member)] for member in self.verdict.contributors]
        return Commit(
            round=self.id,
            view=self.view,
            contributors=self.verdict.contributors,
            note=self.verdict.reason,
            donor=self.donor,
            held="" if self.donor is None else self.header_of(self.donor).digest,
            late_s=tuple(round(time_s - min(self.heard_s.values()), 3) for time_s in heard_s),
        )


# The verdict, which every rank derives alike from the headers of all ranks.


def header_of(contribution: Contribution, uplink: Uplink = UNKNOWN_UPLINK) -> Header:
    """Return the header of a `Contribution.checked`, in view 0."""
    buffers, integers = contribution.buffers, contribution.integers
    return Header(
        0,
        contribution.round,
        contribution.numel,
        contribution.weight,
        contribution.base_weight,
        contribution.digest,
        None if buffers is None else buffers.numel(),
        None if integers is None else integers.numel(),
        contribution.withdrawn,
        uplink=uplink,
    )


def judge_headers(headers: Mapping[int, Header], members: Sequence[int], rules: Rules) -> Verdict:
    """Return the verdict on a round, which is the same on every rank.

    The ranks at position s of their replicas, which hold the same shard, are judged together. A replica is in the mean
    if all its positions are. All members that have the state are needed.
    """
    size = rules.ranks_per_replica
    absent = {
        member: "is taking over the state"
        for member in members
        if any(headers[member * size + position].taking_over for position in range(size))
    }
    holders = [member for member in members if member not in absent]  # of the state
    verdicts = [
        judge(
            {member: headers[member * size + position] for member in holders},
            members=members,
            min_contributors=max(1, len(holders)),
            absent=absent,
        )
        for position in range(size)
    ]
    diverged = tuple(sorted({replica for verdict in verdicts for replica in verdict.diverged}))
    if diverged:
        disagreeing = [verdict for verdict in verdicts if verdict.diverged]
        donors = [verdict.donor for verdict in disagreeing if verdict.donor not in diverged]
        return replace(disagreeing[0], diverged=diverged, donor=donors[0] if donors else disagreeing[0].donor)
    fewest = min(verdicts, key=lambda verdict: len(verdict.contributors))  # one that is void, if any is
    return replace(fewest, refused=tuple(sorted({replica for verdict in verdicts for replica in verdict.refused})))


# Votes.


def tally(
    voters: Collection[int], votes: Mapping[int, RoundVote], *, me: int, size: int = 1
) -> tuple[bool | None, str]:
    """Return what the ``votes`` received so far, by voter, mean for the voter ``me``, and the reason.

    True: every member applies the round; False: it is void for every member; None: undecided. With a reason, that means
    in dispute: this member has voted for the round and others against it, while a third one may have committed it.

    A member commits a round once every member has voted for the average that the member itself holds. A member that has
    not voted for the round therefore knows that no other member can commit it, and may declare it void. A member that
    has voted for it and receives a vote against it can't know what that voter sent to the others, so the view change
    settles the outcome. Digests must be equal among ranks at the same position of their replicas, of ``size`` ranks
    each, as these hold the same shard.

    >>> a, b, no = (RoundVote(0, RoundId(0, 0), *each) for each in (("a",), ("b",), ("", "it is late")))
    >>> tally([0, 1, 2], {0: a, 1: a}, me=0), tally([0, 1, 2], {0: a, 1: a, 2: a}, me=0)
    ((None, ''), (True, ''))
    >>> tally([0, 1, 2], {0: a, 1: b}, me=0), tally([0, 1, 2], {1: no}, me=0)
    ((None, 'rank 1 holds a different average than rank 0'), (False, 'it is late'))
    """
    others = [voter for voter in sorted(voters) if voter != me]
    opponents = [voter for voter in others if voter in votes and not votes[voter].ok]
    against = {voter: votes[voter].reason or f"rank {voter} votes against it" for voter in opponents}
    mine = votes.get(me)
    if mine is not None and not mine.ok:
        return False, mine.reason
    if mine is None:
        return (False, next(iter(against.values()))) if against else (None, "")
    firsts: dict[int, int] = {}
    for voter in (me, *others):
        if voter in votes and votes[voter].ok:
            first = firsts.setdefault(voter % size, voter)
            if votes[first].digest != votes[voter].digest:
                against[voter] = f"rank {voter} holds a different average than rank {first}"
    if not against:
        return (True if all(voter in votes for voter in others) else None), ""
    return (False if len(against) == len(others) else None), against[min(against)]
