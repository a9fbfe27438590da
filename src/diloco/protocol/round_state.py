"""One round of one view as seen by a rank, and the outcomes of recent rounds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from diloco.algorithm import Exchange, Mean, RoundId, Verdict, bounded_weights
from diloco.errors import DivergedError, RoundVoidError, TransportError
from diloco.membership import Commits, Lateness, Rounds, Vote
from diloco.protocol.events import Submitted
from diloco.protocol.headers import Header, donor_for, judge_headers
from diloco.protocol.messages import RoundVote
from diloco.protocol.rules import MOST_SPOILT, Rules

__all__ = ["Decided", "RoundState", "Spoilers"]

_RECENT_ROUNDS = 32  # most recent rounds that are kept per member

_MOST_VOID = 8
"""The void rounds that are kept per fragment; a rank that is further behind runs into the round's timeout."""


@dataclass(eq=False)
class RoundState:
    """What a rank knows of a round in one view; a round that continues in the next view gets a new state there."""

    id: RoundId
    headers: dict[int, Header] = field(default_factory=dict)  # by rank
    votes: dict[int, Vote] = field(default_factory=dict)  # by rank
    # rank -> when its header was received, by this rank's clock
    heard_s: dict[int, float] = field(default_factory=dict)
    # votes of others that depend on headers not received yet
    premature: dict[int, RoundVote] = field(default_factory=dict)
    # set if this rank's state differs from the majority's; reported instead of an average
    fault: DivergedError | None = None
    begun: Submitted | None = None  # this rank's contribution; None before it contributes and after the round has ended
    plan: Exchange | None = None  # the plan of the payload exchange
    taking_over: bool = False  # whether this rank is still adopting the fragment's state
    donor: int | None = None  # a replica with the state that the round applies to, if this rank has a different one
    verdict: Verdict | None = None  # whose contributions are summed; None until all headers have been received
    mean: Mean | None = None  # the mean that this rank has computed
    committed: bool | None = None  # True: applied by all; False: void for all; None: undecided
    # this rank has voted for the round and others against it; the view change decides which it is
    disputed: bool = False
    reason: str = ""  # why the round is void
    exchanging: bool = False  # whether the payload exchange is running
    concluded: bool = False  # whether the outcome was reported
    lateness: Lateness = field(default_factory=Lateness)  # of replicas that the round waits for
    silence: Lateness = field(default_factory=Lateness)  # of replicas that send nothing at all
    # of replicas whose votes are missing since this rank voted for the round at ``voted_s``
    vote_lateness: Lateness = field(default_factory=Lateness)
    voted_s: float = math.inf

    @property
    def key(self) -> tuple[int, int]:
        """The fragment and the outer step."""
        return self.id.fragment, self.id.outer_step

    @property
    def was_begun(self) -> bool:
        """Whether this rank contributed to the round."""
        return self.begun is not None or self.concluded

    def sealed_digest(self, digest: str) -> str:
        """Return a digest of an average's digest and what the next round's plan takes from the headers: the uplinks.

        Since votes cover it, every rank that commits the round has the same uplinks.
        """
        taken = (str(self.headers[rank].uplink) for rank in sorted(self.headers))
        return blake2b("\0".join((digest, *taken)).encode(), digest_size=16).hexdigest()

    def late_s(self, contributors: Sequence[int], rules: Rules) -> tuple[float, ...]:
        """Return how long after the first contribution each one of ``contributors`` was received, in seconds."""
        heard_s = [self.heard_s[each * rules.ranks_per_replica + rules.position] for each in contributors]
        return tuple(round(each - min(self.heard_s.values()), 3) for each in heard_s)

    def free(self) -> None:
        """Release tensors that are no longer needed."""
        if self.concluded and not self.exchanging:
            self.begun = self.mean = None

    def missing(self, ranks: Sequence[int], rules: Rules) -> tuple[int, ...]:
        """Return the replicas with a rank in ``ranks``, those of the view, whose header has not been received."""
        return tuple(sorted({rules.replica_of(rank) for rank in ranks if rank not in self.headers}))

    def without_vote(self, ranks: Sequence[int], rules: Rules) -> frozenset[int]:
        """Return the other replicas with a rank in ``ranks``, those of the view, whose vote has not been received."""
        return frozenset(rules.replica_of(rank) for rank in ranks if rank not in self.votes) - {rules.replica}

    def renewed(self, rules: Rules, frozen_s: float, now_s: float) -> Submitted:
        """Return this rank's contribution for the next view. Its time restarts if this rank has voted within it.

        Args:
            rules: the settings of this rank.
            frozen_s: when the old view began to end.
            now_s: when the next view begins.
        """
        assert self.begun is not None
        if rules.rank in self.votes:
            return replace(self.begun, sent_s=now_s, paused_s=0.0)
        return replace(self.begun, paused_s=self.begun.paused_s + now_s - frozen_s)

    def look(
        self, ranks: Sequence[int], rules: Rules, message_counts: Mapping[int, int]
    ) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """Return the replicas that keep the round waiting for too long.

        Args:
            ranks: the ranks of the view.
            rules: the settings of this rank.
            message_counts: rank -> number of messages received from it.

        Returns:
            Replicas that have not contributed, replicas that neither vote nor send anything else, and those of both
            that send nothing at all. A replica that has not contributed and begins to be silent is not named before it
            is known which of the two it is: the link to it may be the cause, and not the replica.
        """
        absent = frozenset(self.missing(ranks, rules))
        seen: dict[int, object] = {}
        heard: dict[int, object] = {}
        for rank in ranks:
            replica, spoken = rules.replica_of(rank), message_counts.get(rank, 0)
            if replica in absent:
                seen[replica] = "no contribution"
            elif rank not in self.votes:
                seen[replica] = (seen.get(replica), rank, spoken)
            heard[replica] = (heard.get(replica), spoken)
        seen.pop(rules.replica, None)  # the other replicas judge the ranks of this one
        late, unheard = self.lateness.look(seen), self.silence.look(heard)
        late -= absent & self.silence.doubtful
        return late & absent, late - absent, late & (unheard | (late - absent))

    def judge(self, members: Sequence[int], rules: Rules) -> Verdict:
        """Return the verdict on the headers of all ranks of ``members``; set `donor` and `fault`, too."""
        assert self.begun is not None
        verdict = judge_headers(
            self.headers,
            self.begun.contribution,
            members=members,
            ranks_per_replica=rules.ranks_per_replica,
            min_contributors=rules.min_contributors,
        )
        if self.taking_over:
            self.donor = donor_for(rules.rank, self.headers, members=members, ranks_per_replica=rules.ranks_per_replica)
        if rules.replica in verdict.diverged:
            donor = self.headers[verdict.donor * rules.ranks_per_replica + rules.position]
            self.fault = verdict.divergence(self.id, donor.digest)
        return verdict

    def held(self, rules: Rules) -> str:
        """Return the digest of the state that `donor` holds, or "" if there is no donor."""
        return "" if self.donor is None else self.headers_here((self.donor,), rules)[self.donor].digest

    def weights(self, contributors: Sequence[int], rules: Rules) -> Mapping[int, float]:
        """Return contributor -> its bounded weight, from the header of its rank at this rank's position."""
        headers = self.headers_here(contributors, rules)
        return bounded_weights(
            {each: header.weight for each, header in headers.items()},
            {each: header.base_weight for each, header in headers.items()},
        )

    def headers_here(self, members: Sequence[int], rules: Rules) -> Mapping[int, Header]:
        """Return replica -> the header of its rank at this rank's position, with which payloads are exchanged."""
        size = rules.ranks_per_replica
        return {member: self.headers[member * size + rules.position] for member in members}

    def failure(self, instead: TransportError | None) -> TransportError | None:
        """Return why this rank gets no average, or None. ``instead`` replaces the error of a void round."""
        if self.fault is not None or self.committed:
            return self.fault
        return instead or RoundVoidError(f"{self.id} is void: {self.reason}.", round=str(self.id))


class Decided:
    """The recently committed rounds with the digests of their averages, and the void rounds.

    Args:
        void: rounds that are void when the view begins.

    >>> decided = Decided(frozenset({(0, 1)}))
    >>> decided.call_off((0, 2))
    >>> sorted(decided.void)
    [(0, 1), (0, 2)]
    >>> decided.commit((0, 3), "digest")
    >>> decided.commits, decided.void
    ({(0, 3): 'digest'}, frozenset())
    """

    def __init__(self, void: Rounds = frozenset()) -> None:
        self.commits: Commits = {}
        self.void = void

    def commit(self, key: tuple[int, int], digest: str) -> None:
        """Record that the round (fragment, outer step) is committed."""
        fragment, outer_step = key
        recent = {k: d for k, d in self.commits.items() if k[0] != fragment or k[1] >= outer_step - 1}
        self.commits = {**recent, key: digest}
        # all members have contributed to this round, so none asks about earlier ones
        self.void = frozenset(k for k in self.void if k[0] != fragment or k[1] > outer_step)

    def call_off(self, key: tuple[int, int]) -> None:
        """Record that the round (fragment, outer step) is void."""
        newest = sorted(k for k in self.void | {key} if k[0] == key[0])[-_MOST_VOID:]
        self.void = frozenset(k for k in self.void if k[0] != key[0]).union(newest)


class Spoilers:
    """The members whose contributions no honest member sends, and how many recent rounds each has spoilt.

    >>> spoilers = Spoilers()
    >>> spoilers.begin_view((0, 1, 2))
    >>> [sorted(spoilers.note(refused)) for refused in ((2,), (), (2,), (2,))]
    [[], [], [], [2]]
    >>> spoilers.may_be(2), spoilers.may_be(1)
    (True, False)
    """

    def __init__(self) -> None:
        self._rounds: dict[int, deque[bool]] = {}

    def begin_view(self, members: Collection[int]) -> None:
        """Start a view of ``members``; those that have gone start anew when they return."""
        self._rounds = {each: self._rounds.get(each, deque(maxlen=_RECENT_ROUNDS)) for each in members}

    def note(self, spoilers: Collection[int]) -> frozenset[int]:
        """Record that a round, or its payloads, were judged, and which members have spoilt it.

        Returns:
            The members whose number of recent spoilt rounds has just reached a multiple of `MOST_SPOILT`.
        """
        for member, rounds in self._rounds.items():
            rounds.append(member in spoilers)
        return frozenset(each for each in spoilers if self._spoilt(each) and self._spoilt(each) % MOST_SPOILT == 0)

    def may_be(self, member: int) -> bool:
        """Return whether a member may have spoilt `MOST_SPOILT` rounds, as others report that may be a round ahead."""
        return self._spoilt(member) >= MOST_SPOILT - 1

    def _spoilt(self, member: int) -> int:
        return sum(self._rounds.get(member, ()))
