"""One round of one view, as a rank sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from diloco.algorithm.averaging import Contribution, Mean, RoundId, Verdict
from diloco.algorithm.digest import digest_tensors
from diloco.algorithm.exchange import Exchange
from diloco.errors import DivergedError, RoundVoidError, TransportError
from diloco.membership.ballot import Vote
from diloco.membership.lateness import Lateness
from diloco.membership.view import View
from diloco.protocol.headers import Header
from diloco.protocol.messages import RoundVote
from diloco.protocol.rules import Rules
from diloco.transport.base import Average
from diloco.transport.peers.payloads import Part
from diloco.transport.peers.pending import PeerPending

__all__ = ["Begun", "RoundState", "Timer", "digest_of"]


class Timer(Protocol):
    """Something that is to be called later."""

    def cancel(self) -> None:
        """Don't call it, and keep nothing of it."""


@dataclass(frozen=True, eq=False)
class Begun:
    """My contribution to a round, and who waits for the average."""

    contribution: Contribution
    pending: PeerPending


@dataclass(eq=False)
class RoundState:
    """What is known of a round in one view; a round that goes on in the next view has a new one there.

    Attributes:
        id: which round.
        headers, votes: rank -> what it said.
        fault: what I get instead of the average, whatever becomes of the round.
        begun: my contribution; None: I have not begun it, or it is over.
        plan: how the payloads travel.
        taking_over: whether I am still taking over the fragment's state.
        donor: a replica that holds the state which the round applies to, where I don't.
        judged: the verdict, for the thread that moves the payloads.
        mean: what I hold.
        committed: True: applied by all; False: void for all; None: not decided yet.
        reason: why it is void.
        exchanging: whether a thread still moves payloads.
        concluded: whether who waits for it has been told.
        lateness: who keeps it waiting.
        silence: of whom nothing is heard meanwhile.
        expiring, looking: until it is decided.
    """

    id: RoundId
    headers: dict[int, Header] = field(default_factory=dict)
    votes: dict[int, Vote] = field(default_factory=dict)
    fault: DivergedError | None = None
    begun: Begun | None = None
    plan: Exchange | None = None
    taking_over: bool = False
    donor: int | None = None
    judged: Future[Verdict] = field(default_factory=Future)
    mean: Mean | None = None
    committed: bool | None = None
    reason: str = ""
    exchanging: bool = False
    concluded: bool = False
    lateness: Lateness = field(default_factory=Lateness)
    silence: Lateness = field(default_factory=Lateness)
    expiring: Timer | None = None
    looking: Timer | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Fragment and outer step."""
        return self.id.fragment, self.id.outer_step

    @property
    def was_begun(self) -> bool:
        """Whether I contributed to it."""
        return self.begun is not None or self.concluded

    def stop_timers(self) -> None:
        """A timer that is not cancelled keeps the round's tensors for as long as it runs."""
        for timer in (self.expiring, self.looking):
            if timer is not None:
                timer.cancel()
        self.expiring = self.looking = None

    def free(self) -> None:
        """Keep no tensors once they are of no use."""
        if self.concluded and not self.exchanging:
            self.begun = self.mean = None

    def missing(self, ranks: Sequence[int], rules: Rules) -> tuple[int, ...]:
        """Replicas of which no header has come; readable from any thread. ``ranks``: of the view."""
        return tuple(sorted({rank // rules.ranks_per_replica for rank in ranks if rank not in self.headers}))

    def look(
        self, ranks: Sequence[int], rules: Rules, words: Callable[[int], int]
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
        size, absent = rules.ranks_per_replica, frozenset(self.missing(ranks, rules))
        seen: dict[int, object] = {}
        heard: dict[int, object] = {}
        for rank in ranks:
            if rank // size in absent:
                seen[rank // size] = "no contribution"
            elif rank not in self.votes:
                seen[rank // size] = (seen.get(rank // size), rank, words(rank))
            heard[rank // size] = (heard.get(rank // size), words(rank))
        seen.pop(rules.replica, None)  # another rank of my own replica that is late is the others' business
        late, unheard = self.lateness.look(seen), self.silence.look(heard)
        return late & absent, late - absent, late & (unheard | (late - absent))

    def parts(self, members: Sequence[int], rules: Rules) -> Mapping[int, Part]:
        """What the sum needs of the headers that all ``members`` have sent: replica -> part."""
        size, position = rules.ranks_per_replica, rules.rank % rules.ranks_per_replica
        headers = {member: self.headers[member * size + position] for member in members}
        return {member: Part(header.weight, header.buffers, header.integers) for member, header in headers.items()}

    def count(self, sender: int, said: RoundVote, replica: int) -> None:
        """A vote has come; it may say that the state of ``replica``, which is mine, is not the majority's."""
        self.votes[sender] = said.vote
        if replica in said.diverged and self.fault is None:
            self.fault = DivergedError(
                f"{self.id}: {said.vote.reason}. The round is void for all.",
                donor=said.donor,
                round=str(self.id),
                replicas=said.diverged,
            )

    def outcome(self, view: View, replica: int, failure: TransportError | None) -> Average | TransportError:
        """What ``replica`` of ``view`` gets, once the round is decided; ``failure``: instead of that it is void."""
        if self.fault is not None:
            return self.fault
        if not self.committed:
            return failure or RoundVoidError(f"{self.id} is void: {self.reason}.", round=str(self.id))
        return self._average(view, replica)

    def _average(self, view: View, replica: int) -> Average:
        mean, plan = self.mean, self.plan
        assert mean is not None
        assert plan is not None
        me = view.members.index(replica)
        return Average(
            round=self.id,
            values=mean.values,
            view=view,
            contributors=mean.contributors,
            weight=mean.weight,
            sent_bytes=plan.sent_bytes(me),
            received_bytes=plan.received_bytes(me),
            wait_s=0.0,
            buffers=mean.buffers,
            integers=mean.integers,
            note=self.judged.result().reason,
            clipped=mean.clipped,
            donor=self.donor,
        )


def digest_of(mean: Mean) -> str:
    """Of everything that the average would change."""
    parts = {f"{mean.contributors} {mean.weight!r}": mean.values}
    if mean.buffers is not None:
        parts["buffers"] = mean.buffers
    if mean.integers is not None:
        parts["integers"] = mean.integers
    return digest_tensors(parts)
