"""The choice of the replica that founds a view if several search for one. Pure: takes announcements and times.

Each candidate votes for the first one that it hears, and announces the vote. It can vote for another one only if the
one that it voted for votes for that one, too, or has ended. So of all candidates one gets the votes of enough members
of the newest view, and none of these continues or founds with others. What a candidate had accepted before still binds
it, as a member that nobody hears may have adopted it. A process that was started again can't vouch for the one that it
replaces: others may have continued because that one had ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from diloco.membership.next_view import Policy, names_of, refusal
from diloco.membership.values import GREATEST, Rank, View

_MAX_VIEWS_AHEAD = 1000  # a view that a member names can't be later than another one's by more than this


@dataclass
class LastViews:
    """What a process that has lost its view has been and promised; it holds for all its searches."""

    last: View  # the newest view that the process was a member of
    agreed: View | None = None  # the view after it that the process had accepted; None: none
    vote: View | None = None  # the view of the founder that it votes for; None: it has not voted
    # rank -> the identity that it had as a member; others can't speak in its name
    identities: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """The announcement of a replica that searches for the others."""

    number: Rank  # the replica's number
    held_step: Annotated[int, Meta(ge=-1, le=GREATEST)] = -1  # the newest step that it could resume from; -1 for none
    last: View | None = None  # see `LastViews`, as for the next one; None: none since its process began
    agreed: View | None = None
    vote: View | None = None


@dataclass(frozen=True, kw_only=True)
class BootstrapElection:
    """The election of the founder, as one replica holds it: its own candidacy and the rules."""

    number: int  # its replica number
    held_step: int = -1  # the newest step that it could resume from; -1 for none
    views: LastViews | None = None  # None: it has been a member of none; its vote is recorded here
    alone: bool  # whether it knows no other replica to ask
    window_s: float  # how long it waits for others that are searching, too
    policy: Policy  # decides which survivors may continue

    @property
    def me(self) -> Candidate:
        """This replica's own announcement."""
        views = () if self.views is None else (self.views.last, self.views.agreed, self.views.vote)
        return Candidate(self.number, self.held_step, *views)

    def founds(self, others: Sequence[Candidate], waited_s: float, *, left: Collection[int] = ()) -> View | None:
        """Vote, and return the view of this replica alone that it founds for the others to join, or None.

        The founder is the replica with the newest step; of several, the one with the lowest number. If any of them was
        a member, it is one of the newest view, and founds only if enough members of that vote for it, so that no others
        can be continuing from it, nor from a view that one of them had agreed to.

        Args:
            others: the other replicas that are searching, each as it was heard after this replica's last vote.
            waited_s: from the moment at which others could see this replica's announcement to the moment at which they
                were asked. If this is shorter than another replica needs to announce itself, that one may be unknown
                here.
            left: replicas that have finished the run; of these, none can be continuing.

        >>> newest = BootstrapElection(number=2, held_step=150, alone=False, window_s=3.0, policy=Policy())
        >>> newest.founds([Candidate(1, 100)], 2.0), newest.founds([Candidate(1, 100)], 3.0)
        (None, View(id=0, members=(2,)))
        >>> from dataclasses import replace
        >>> lost = replace(newest, views=LastViews(View(7, (0, 1, 2))))
        >>> lost.founds([Candidate(1, 140, View(7, (0, 1, 2)))], 60.0), lost.me.vote
        (None, View(id=8, members=(2,)))
        >>> lost.founds([Candidate(1, 140, View(7, (0, 1, 2)), vote=lost.me.vote)], 60.0)
        View(id=8, members=(2,))
        """
        newest, others = self._credible(others)
        there = (self.me, *others)
        eligible = [each for each in there if newest is None or each.number in newest.members] or [self.me]
        first = min(eligible, key=lambda each: (-each.held_step, each.number)).number
        agreed = [each.agreed.id for each in there if each.agreed is not None]
        founded = View(max([-1 if newest is None else newest.id, *agreed]) + 1, (first,))  # later than all of them
        if self.alone and self.views is None:
            return View(founded.id, (self.number,))
        if waited_s < self.window_s:
            return None
        if self.views is not None and newest is not None and self._may_vote(newest, founded, others):
            if self._are_enough(newest, founded, there, left, [each.number for each in there if each.last is not None]):
                self.views.vote = founded
            there = (self.me, *others)
        voters = [each.number for each in there if each.last is not None and each.vote == founded]
        enough = newest is None or self._are_enough(newest, founded, there, left, voters)
        return founded if first == self.number and enough else None

    def missing(self, others: Sequence[Candidate]) -> str:
        """Return a sentence, for a message, on who of the newest view is not searching; "" if nobody is missing."""
        newest, others = self._credible(others)
        absent = {*(newest.members if newest else ())} - {self.number, *(each.number for each in others)}
        if not absent:
            return ""
        are, they_have = ("is", "it has") if len(absent) == 1 else ("are", "they have")
        return (
            f" Of the newest view, {names_of(absent)} {are} missing. If {they_have} ended for good, start the others "
            "again from their checkpoints."
        )

    def _credible(self, others: Sequence[Candidate]) -> tuple[View | None, list[Candidate]]:
        """Return the newest view that counts, and the other candidates that do.

        A view that some of a view's members continued in follows it soon, and has one of them among the searching: two
        sets that may continue share a member. So only members of a view that counts can name a later one, not much
        later, and a stranger can't keep others from founding by naming a view, or a step, that does not exist.
        """
        if self.views is None:
            newest = max(
                (each.last for each in others if each.last is not None), key=lambda view: view.id, default=None
            )
            return newest, [*others]
        newest, members = self.views.last, {*self.views.last.members}
        while True:
            latest = newest.id + _MAX_VIEWS_AHEAD
            there = [
                each
                for each in others
                if each.number in members
                and all(view is None or view.id <= latest for view in (each.last, each.agreed, each.vote))
            ]
            later = max([newest, *(each.last for each in there if each.last)], key=lambda view: view.id)
            if later is newest:
                return newest, there
            newest = later
            members.update(later.members)

    def _may_vote(self, newest: View, founded: View, others: Sequence[Candidate]) -> bool:
        """Return whether the founder that this replica voted for before, if it did, can't found a view any more."""
        before = self.me.vote
        if before is None or before.id <= newest.id or before.members == (self.number,):
            return True
        voted_for = (each for each in others if each.number in before.members)
        return all(each.last is None or each.vote == founded for each in voted_for)

    def _are_enough(
        self, newest: View, founded: View, there: Sequence[Candidate], left: Collection[int], counted: Collection[int]
    ) -> bool:
        """Return whether the members that are ``counted`` may continue from every view that others may be in."""
        promised = [view for each in there for view in (each.agreed, each.vote) if view and view.id > newest.id]
        ended = {*left, *(each.number for each in there if each.last is None)}
        joining = {each.number for each in there}.difference(counted)
        return not any(
            refusal(view, {*view.members}.difference(counted), self.policy, gone=ended, joining=joining)
            for view in (newest, *promised)
            if view != founded
        )
