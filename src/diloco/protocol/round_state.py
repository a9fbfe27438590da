"""One round of one view, as a rank sees it; and what it remembers of the rounds that were decided lately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diloco.algorithm.averaging import Mean, RoundId, Verdict
from diloco.algorithm.exchange import Exchange
from diloco.errors import DivergedError, RoundVoidError, TransportError
from diloco.membership.ballot import Vote
from diloco.membership.change import Commits, Rounds
from diloco.membership.lateness import Lateness
from diloco.protocol.events import HandedIn
from diloco.protocol.headers import Header, donor_for, judge_headers
from diloco.protocol.messages import RoundVote
from diloco.protocol.rules import Rules

__all__ = ["Decided", "RoundState"]

_MOST_VOID = 8
"""Rounds of a fragment that are remembered as void; whoever falls behind by more runs into the round's timeout."""


@dataclass(eq=False)
class RoundState:
    """What is known of a round in one view; a round that goes on in the next view has a new one there.

    Attributes:
        id: which round.
        headers, votes: rank -> what it said.
        fault: what I get instead of the average, whatever becomes of the round.
        begun: my contribution; None: I have not begun the round, or it is over.
        plan: how the payloads travel.
        taking_over: whether I am still taking over the fragment's state.
        donor: a replica that holds the state which the round applies to, where I don't.
        verdict: whose contributions are summed; None: not all headers are there.
        mean: what I hold.
        committed: True: applied by all; False: void for all; None: not decided yet.
        reason: why it is void.
        exchanging: whether payloads still move.
        concluded: whether its owner has been told.
        lateness: who keeps it waiting.
        silence: of whom nothing is heard meanwhile.
    """

    id: RoundId
    headers: dict[int, Header] = field(default_factory=dict)
    votes: dict[int, Vote] = field(default_factory=dict)
    fault: DivergedError | None = None
    begun: HandedIn | None = None
    plan: Exchange | None = None
    taking_over: bool = False
    donor: int | None = None
    verdict: Verdict | None = None
    mean: Mean | None = None
    committed: bool | None = None
    reason: str = ""
    exchanging: bool = False
    concluded: bool = False
    lateness: Lateness = field(default_factory=Lateness)
    silence: Lateness = field(default_factory=Lateness)

    @property
    def key(self) -> tuple[int, int]:
        """Fragment and outer step."""
        return self.id.fragment, self.id.outer_step

    @property
    def was_begun(self) -> bool:
        """Whether I contributed to it."""
        return self.begun is not None or self.concluded

    def free(self) -> None:
        """Keep no tensors once they are of no use."""
        if self.concluded and not self.exchanging:
            self.begun = self.mean = None

    def missing(self, ranks: Sequence[int], rules: Rules) -> tuple[int, ...]:
        """Replicas of which no header has come; ``ranks``: of the view."""
        return tuple(sorted({rules.replica_of(rank) for rank in ranks if rank not in self.headers}))

    def look(
        self, ranks: Sequence[int], rules: Rules, words: Mapping[int, int]
    ) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """Who keeps the round waiting for too long.

        Args:
            ranks: of the view.
            rules: who I am.
            words: rank -> how many messages have come from it, of whatever kind.

        Returns:
            Replicas that have not contributed; those that don't vote and say nothing else; and, of both, those of which
            nothing at all is heard.
        """
        absent = frozenset(self.missing(ranks, rules))
        seen: dict[int, object] = {}
        heard: dict[int, object] = {}
        for rank in ranks:
            replica, spoken = rules.replica_of(rank), words.get(rank, 0)
            if replica in absent:
                seen[replica] = "no contribution"
            elif rank not in self.votes:
                seen[replica] = (seen.get(replica), rank, spoken)
            heard[replica] = (heard.get(replica), spoken)
        seen.pop(rules.replica, None)  # another rank of my own replica that is late is the others' business
        late, unheard = self.lateness.look(seen), self.silence.look(heard)
        return late & absent, late - absent, late & (unheard | (late - absent))

    def judge(self, members: Sequence[int], rules: Rules) -> Verdict:
        """The verdict, from the headers of all ranks of ``members``; and who has the state that I take over."""
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
        return verdict

    def weights(self, members: Sequence[int], rules: Rules) -> Mapping[int, float]:
        """Replica -> weight of its contribution, as its rank at my position says."""
        size = rules.ranks_per_replica
        return {member: self.headers[member * size + rules.position].weight for member in members}

    def count(self, sender: int, said: RoundVote, replica: int) -> None:
        """Take in a vote; it may say that the state of ``replica``, which is mine, is not the majority's."""
        self.votes[sender] = said.vote
        if replica in said.diverged and self.fault is None:
            self.fault = DivergedError(
                f"{self.id}: {said.vote.reason}. The round is void for all.",
                donor=said.donor,
                round=str(self.id),
                replicas=said.diverged,
            )

    def failure(self, instead: TransportError | None) -> TransportError | None:
        """Why I get no average, once the round is decided; ``instead``: for a void round, what to say instead."""
        if self.fault is not None or self.committed:
            return self.fault
        return instead or RoundVoidError(f"{self.id} is void: {self.reason}.", round=str(self.id))


class Decided:
    """Rounds that are committed, with digests of their averages, and rounds that are void.

    Args:
        void: those that are so when a view begins.

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
        """A round, as (fragment, outer step), is applied by all."""
        fragment, outer_step = key
        recent = {k: d for k, d in self.commits.items() if k[0] != fragment or k[1] >= outer_step - 1}
        self.commits = {**recent, key: digest}
        # everybody has contributed to this one, so nobody needs those before it any more
        self.void = frozenset(k for k in self.void if k[0] != fragment or k[1] > outer_step)

    def call_off(self, key: tuple[int, int]) -> None:
        """A round, as (fragment, outer step), is void for all."""
        newest = sorted(k for k in self.void | {key} if k[0] == key[0])[-_MOST_VOID:]
        self.void = frozenset(k for k in self.void if k[0] != key[0]).union(newest)
