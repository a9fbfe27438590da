"""The agreement of a view's members on the next view, and on the outcome of the rounds in flight.

Each member freezes: it casts no vote and decides no round of the old view any more. It reports to all others which
members it can't hear, and which rounds it has committed, voted for, or decided void. Members join the reports that they
receive, so those that hear each other end up knowing the same; who stays and what follows is a pure function of that
(`diloco.membership.next_view`). A member that holds the same report from every staying member is *ready*; once all are,
each adopts what follows. So every member of the next view hears every other one, in both directions.

A commit that a member claims, also a leaving one, counts if all staying members report that they voted for the round;
a round that one of them has decided void is void. (A member that votes one way and reports another can make two others
decide a round differently; the digests of the fragment's next round show that.) Any other round continues in the next
view, or is void if replicas join, as these know nothing of it.

A member may be lost after all were ready and before all have adopted. The others then adopt the agreed view as well,
and the view after it leaves out the lost member. For this, a ready member reports what it is ready for, and of several
such views the one that was agreed last stands. This is Paxos with the amount of knowledge as the ballot: any two sets
that may continue share a member, and its knowledge only grows.

Of n members, up to f may lie, with n > 2 f (`byzantine_quorum`). Members speak only for themselves (`believed`); an
earlier agreement stands if more than f members report it, or all that were to be ready for it and report now, and a
late member is excluded if more than f members report it as late. The module sends nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from diloco.membership.next_view import next_view, staying_members
from diloco.membership.quorum import Policy, names_of
from diloco.membership.values import MOST_MEMBERS, MOST_PAIRS, MOST_ROUNDS, Agreed, News, NextView, Report, View

__all__ = ["Change"]

T = TypeVar("T")


class Change:
    """One rank's part in the change from ``view`` to the next one.

    ``mine`` is its report when it froze; `extend` adds later events.
    """

    def __init__(self, mine: Report, view: View, ranks_per_replica: int, policy: Policy, why: str) -> None:
        self.mine = mine
        self.view = view
        self.why = why
        self._replica = mine.rank // ranks_per_replica
        self._ranks_per_replica = ranks_per_replica
        self._policy = policy
        self._members = frozenset(view.members)
        self._reports: dict[int, Report] = {mine.rank: mine}
        self._staying: tuple[int, ...] | None = None  # the cached `staying`; None: to be computed
        # ranks whose reports may differ from `mine`, and ranks that may not be ready. Each report is checked once when
        # it arrives, and not again with every other report.
        self._differing, self._unready = self._ranks(view.members), self._ranks(view.members)

    @property
    def staying(self) -> tuple[int, ...]:
        """The members of the old view that stay, as `staying_members` decides."""
        if self._staying is None:
            self._staying = staying_members(self.view, self.mine, self._replica, self._policy)
        return self._staying

    @property
    def is_left_out(self) -> bool:
        """Whether this rank's replica does not stay, as far as is known."""
        return self._replica not in self.staying

    @property
    def audience(self) -> tuple[int, ...]:
        """The ranks that should receive this rank's report: all others that may still be running."""
        there = (member for member in self.view.members if member not in self.mine.gone)
        return tuple(rank for rank in self._ranks(there) if rank != self.mine.rank)

    def absorb(self, *reports: Report, in_part: Collection[int] = ()) -> bool:
        """Merge what this rank believes of others' reports. Return True if `mine` changed and must be sent again.

        The ranks ``in_part`` are believed only partly. They know something else, so they can't be ready with this rank.
        """
        before, whole = self.mine, [report for report in reports if report.rank not in in_part]
        for report in reports:
            self._reports.pop(report.rank, None)
            self._differing.append(report.rank)
            self._unready.append(report.rank)
            self._merge(report)
        self._reports.update((report.rank, report) for report in whole)
        return self._advance(before)

    def extend(self, **news: Unpack[News]) -> bool:
        """Add what this rank has observed. Return True if `mine` changed and must be sent to all again."""
        before, more = self.mine, dict[str, Any](news)
        for name in ("unheard", "behind"):
            more[name] = frozenset((self._replica, other) for other in more.get(name, ()) if other not in before.gone)
        more["unheard"] |= more.pop("apart", frozenset())
        self._merge(replace(Report(before.rank, before.view_id), **more))
        return self._advance(before)

    def outcome(self) -> NextView | None:
        """Return what to adopt, or None while it is not decided.

        That the survivors may not continue is decided as soon as they all know the same.
        """
        if self.mine.ready and not self._all(self._unready, lambda report: report.ready):
            return None
        if (alike := self._alike()) is None:
            return None
        following = next_view(self.view, alike, self.staying, self._policy)
        if following.view is None:
            return following
        same = all(report.agreed is not None and report.agreed.following == following for report in alike)
        return following if self.mine.ready and same else None

    def alone(self) -> NextView:
        """Return what a left-out rank adopts if it hears no staying member: it takes part in no more rounds."""
        reason = f"{names_of(self.staying)} can't be reached and may be continuing without replica {self._replica}"
        return NextView(None, self.view, self.mine.step + 1, self.mine.commits, reason, void=self.mine.void)

    def _merge(self, other: Report) -> None:
        mine, members = self.mine, self._members
        if mine.covers(other):  # true of most reports once all have been received
            return
        left = _grown(mine.left, (each for each in other.left if each[0] in members), MOST_MEMBERS)
        joining = _grown(mine.joining, other.joining - members, MOST_MEMBERS)
        known = members | joining
        self.mine = replace(
            mine,
            unheard=_grown(mine.unheard, (each for each in other.unheard if known.issuperset(each)), MOST_PAIRS),
            behind=mine.behind | frozenset(pair for pair in other.behind if members.issuperset(pair)),
            unsteady=mine.unsteady | frozenset(pair for pair in other.unsteady if members.issuperset(pair)),
            gone=mine.gone | (other.gone & known) | frozenset(replica for replica, _ in left),
            joining=joining,
            left=left,
            left_commits=_grown(mine.left_commits, other.left_commits, MOST_ROUNDS),
        )

    def _advance(self, before: Report) -> bool:
        """Become ready if all staying members know what this rank knows."""
        if self.mine is not before and self.mine.known != before.known:
            self.mine = replace(self.mine, ready=False)
            if not self._still_stay(before):
                self._staying = None
            self._differing, self._unready = self._ranks(self.staying), self._ranks(self.staying)
        self._reports[self.mine.rank] = self.mine
        if not self.mine.ready and (alike := self._alike()) is not None:
            following = next_view(self.view, alike, self.staying, self._policy)
            if following.view is not None:
                earlier = self.mine.agreed
                quorums = earlier.quorums if earlier is not None and earlier.following == following else frozenset()
                agreed = Agreed(sum(map(len, self.mine.known)), following, quorums | {self.staying})
                self.mine = self._reports[self.mine.rank] = replace(self.mine, ready=True, agreed=agreed)
        return self.mine != before

    def _still_stay(self, before: Report) -> bool:
        """Return whether nothing new speaks against the members that stayed by the knowledge ``before``."""
        mine, stayed = self.mine, self._staying or ()
        same = (before.gone, before.unsteady) == (mine.gone, mine.unsteady) and not mine.behind
        apart = (pair for pair in mine.unheard - before.unheard if pair[0] in stayed and pair[1] in stayed)
        return same and self._replica in stayed and not any(apart)

    def _all(self, ranks: list[int], passes: Callable[[Report], bool]) -> bool:
        """Return whether each staying rank of ``ranks`` has a report that ``passes``; remove the ranks that pass."""
        staying = self.staying
        while ranks:
            report = self._reports.get(ranks[-1])
            if (report is None or not passes(report)) and ranks[-1] // self._ranks_per_replica in staying:
                return False
            ranks.pop()
        return True

    def _alike(self) -> list[Report] | None:
        """Return the reports of all staying ranks if all equal ``mine.known``, else None."""
        if self.is_left_out or not self._all(self._differing, lambda report: report.known == self.mine.known):
            return None
        return [self._reports[rank] for rank in self._ranks(self.staying)]

    def blame(self) -> frozenset[int]:
        """Return the other replicas that keep the change from ending, which has taken too long.

        They have not reported what this rank knows; if all have, they are ready for something else.
        """
        reports = {rank: self._reports.get(rank) for rank in self._ranks(self.staying)}
        blamed = {rank for rank, report in reports.items() if report is None or report.known != self.mine.known}
        if not blamed and self.mine.agreed is not None:
            following = self.mine.agreed.following
            others = {rank: report.agreed for rank, report in reports.items() if report is not None}
            blamed = {rank for rank, agreed in others.items() if agreed is None or agreed.following != following}
        return frozenset(rank // self._ranks_per_replica for rank in blamed) - {self._replica}

    def _ranks(self, members: Iterable[int]) -> list[int]:
        size = self._ranks_per_replica
        return [rank for member in members for rank in range(member * size, (member + 1) * size)]


def _grown(known: frozenset[T], more: Iterable[T], most: int) -> frozenset[T]:
    """Return both together, or ``known`` alone if that is more than a report may hold, as no honest members say."""
    both = known.union(more)
    return both if len(both) <= most else known
