"""How the members of a view agree on the next one, and on what became of the rounds in flight.

Each member freezes (it casts no vote and decides no round of the old view any more) and tells all others whom it can't
hear, what it has committed and what it has decided void. Reports are joined, so that all who hear each other come to
know the same, and who stays and what they adopt follow from that alone (`diloco.membership.following`). A member that
holds the same report of everybody who is to stay says that it is *ready* for what follows; when all of them are, each
adopts it. So nobody is a member of the next view who does not hear every other member of it, in both directions.

The last round of a fragment that any of them committed is committed, and one that any of them has decided void is
void. Nobody commits a round that not all have voted for, so it counts once all say that they have, or it is shown that
they have (`diloco.membership.proofs`); until then nobody is ready. What one who leaves says it has committed counts if
all who stay have voted for it. Any other round goes on in the next view among those who are left; where replicas join
it is void, as these know nothing of it.

Somebody may be lost after all were ready and before all have adopted. Some may have adopted what was agreed by then, so
the others adopt it as well, and the view after it leaves out who was lost. For that a ready member tells what it is
ready for, and of several such views the one that was agreed last stands. (As in Paxos, with what is known as the
ballot: any two sets that can go on have a member in common, and what that one knows only grows.) Whoever finished first
and is asked again answers with the `NextView` that it adopted.

Of n members f may lie, where n > 2 f (`more_than_could_lie`). A view is adopted when all who stay are ready for the
very same one; what was agreed before stands only where more than could lie say so, as all who stay would if somebody
had adopted it; who is behind goes where more than could lie say that it is. `diloco.protocol.hearsay` sees to it that
members speak for themselves alone.

Pure: messages in, messages out; nothing here sends, waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack

from diloco.membership import proofs
from diloco.membership.following import next_view, staying_members
from diloco.membership.proofs import Commits, SignedVote
from diloco.membership.quorum import Policy, names_of
from diloco.membership.reports import Agreed, News, NextView, Report
from diloco.membership.view import View

__all__ = ["Change"]


class Change:
    """One rank's side of the end of a view.

    Args:
        mine: this rank's report, as of the moment it froze; what happened is told with `extend`.
        view: the view that ends.
        ranks_per_replica: S; rank r belongs to replica r // S.
        policy: who may go on.
        why: what happened, in words.
        votes: round -> rank -> its signed vote, of rounds that are not long over.
    """

    def __init__(
        self,
        mine: Report,
        view: View,
        ranks_per_replica: int,
        policy: Policy,
        why: str,
        votes: Mapping[tuple[int, int], Mapping[int, SignedVote]] | None = None,
    ) -> None:
        self.mine = mine
        self.view = view
        self.why = why
        self._replica = mine.rank // ranks_per_replica
        self._ranks_per_replica = ranks_per_replica
        self._policy = policy
        self._votes = votes or {}
        self._members = frozenset(view.members)
        self._claims = mine.claims
        self._reports: dict[int, Report] = {mine.rank: mine}
        self._shown_before: frozenset[SignedVote] | None = None  # the shown votes at the last call of `_show`
        self._staying: tuple[int, ...] | None = None  # who stays, by what is known now
        # ranks that may not say what mine says, and that may not be ready: a report is looked at when it comes, and not
        # again with each other one
        self._differing, self._unready = self._ranks(view.members), self._ranks(view.members)

    @property
    def staying(self) -> tuple[int, ...]:
        """Members of the old view that are to be members of the next one, as `staying_members` says."""
        if self._staying is None:
            self._staying = staying_members(self.view, self.mine, self._replica, self._policy)
        return self._staying

    @property
    def is_left_out(self) -> bool:
        """Whether this rank's replica is not to stay, as far as is known."""
        return self._replica not in self.staying

    @property
    def audience(self) -> tuple[int, ...]:
        """Ranks that are to hear this one's report: all others that may be there."""
        there = (member for member in self.view.members if member not in self.mine.gone)
        return tuple(rank for rank in self._ranks(there) if rank != self.mine.rank)

    def absorb(self, *told: Report, in_part: Collection[int] = ()) -> bool:
        """Take in other ranks' reports; True if mine changed by them and must be told to all again.

        Args:
            told: as far as they are believed.
            in_part: ranks of which not all is believed: they know something else than I do, and can't be ready with me.
        """
        before, whole = self.mine, [report for report in told if report.rank not in in_part]
        for report in told:
            self._reports.pop(report.rank, None)
            self._differing.append(report.rank)
            self._unready.append(report.rank)
            self._merge(report)
        self._reports.update((report.rank, report) for report in whole)
        return self._advance(before, whole)

    def extend(self, **news: Unpack[News]) -> bool:
        """More happened; True if my report changed by it and must be told to all again.

        A replica that wanted to join and is lost again neither joins nor counts as a loss of the old view. One that has
        left is gone, and that one who is gone can't be heard is no news.
        """
        before, more = self.mine, dict[str, Any](news)
        for name in ("unheard", "behind"):
            more[name] = frozenset((self._replica, other) for other in more.get(name, ()) if other not in before.gone)
        more["unheard"] |= more.pop("apart", frozenset())
        self._merge(replace(Report(before.rank, before.view_id), **more))
        return self._advance(before, ())

    def outcome(self) -> NextView | None:
        """What to adopt, once all who stay are ready for it, or know that they may not go on; None until then."""
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
        """What a rank that is left out, and can't hear of those who stay, goes by: it takes part in nothing more."""
        reason = f"{names_of(self.staying)} can't be reached and may be going on without replica {self._replica}"
        return NextView(None, self.view, self.mine.step + 1, self.mine.commits, reason, void=self.mine.void)

    def _merge(self, told: Report) -> None:
        mine, members = self.mine, self._members
        if mine.covers(told) and told.shown <= mine.shown:  # as of most reports, once all have been heard
            return
        left = mine.left | frozenset(each for each in told.left if each[0] in members)
        joining = mine.joining | (told.joining - members)
        known = members | joining
        self.mine = replace(
            mine,
            unheard=mine.unheard | frozenset(pair for pair in told.unheard if known.issuperset(pair)),
            behind=mine.behind | frozenset(pair for pair in told.behind if members.issuperset(pair)),
            unsteady=mine.unsteady | frozenset(pair for pair in told.unsteady if members.issuperset(pair)),
            gone=mine.gone | (told.gone & known) | frozenset(replica for replica, _ in left),
            joining=joining,
            left=left,
            left_commits=mine.left_commits | told.left_commits,
            shown=proofs.minimal_votes(mine.shown | told.shown),
        )

    def _advance(self, before: Report, whole: Collection[Report]) -> bool:
        """Show what is asked for, and be ready, if all who stay say the same as I do."""
        self._show({report.rank: report.held for report in whole})
        if self.mine is not before and self.mine.known != before.known:
            self.mine = replace(self.mine, ready=False)
            if not self._still_stay(before):
                self._staying = None
            self._differing, self._unready = self._ranks(self.staying), self._ranks(self.staying)
        self._reports[self.mine.rank] = self.mine
        if not self.mine.ready and (alike := self._alike()) is not None:
            following = next_view(self.view, alike, self.staying, self._policy)
            if following.view is not None:
                agreed = Agreed(sum(map(len, self.mine.known)), following)
                self.mine = self._reports[self.mine.rank] = replace(self.mine, ready=True, agreed=agreed)
        return self.mine != before

    def _show(self, held: Mapping[int, Commits]) -> None:
        """Show what is asked for by now, and accuse who is shown to have voted one way and another.

        Args:
            held: as of `proofs.votes_to_show`, of ranks that have just reported.
        """
        mine = self.mine
        news = frozenset() if mine.shown is self._shown_before else mine.shown
        more = proofs.votes_to_show(self._votes, self._claims, held, news)
        if not news and more <= mine.shown:
            return
        self._shown_before = shown = proofs.minimal_votes(mine.shown | more)
        behind = mine.behind
        for equivocator in sorted(proofs.equivocators(shown, self._ranks_per_replica) - {self._replica}):
            if (self._replica, equivocator) not in behind:
                behind |= {(self._replica, equivocator)}
                self.why += f"; replica {equivocator} voted one way and another on a round"
        self.mine = replace(mine, shown=shown, behind=behind)

    def _still_stay(self, before: Report) -> bool:
        """Whether who stayed by what was known before does so still: nothing new speaks against any of them."""
        mine, stayed = self.mine, self._staying or ()
        same = (before.gone, before.unsteady) == (mine.gone, mine.unsteady) and not mine.behind
        apart = (pair for pair in mine.unheard - before.unheard if pair[0] in stayed and pair[1] in stayed)
        return same and self._replica in stayed and not any(apart)

    def _all(self, ranks: list[int], says: Callable[[Report], bool]) -> bool:
        """Whether the report of each of ``ranks`` that stays ``says`` so; those of which it does are taken out."""
        staying = self.staying
        while ranks:
            report = self._reports.get(ranks[-1])
            if (report is None or not says(report)) and ranks[-1] // self._ranks_per_replica in staying:
                return False
            ranks.pop()
        return True

    def _alike(self) -> list[Report] | None:
        """The reports of all who stay, if I do, all are there, each says what mine says, and nothing is unproven."""
        if self.is_left_out or not self._all(self._differing, lambda report: report.known == self.mine.known):
            return None
        alike = [self._reports[rank] for rank in self._ranks(self.staying)]
        return None if self._unproven(alike) else alike

    @property
    def unproven(self) -> frozenset[int]:
        """Replicas that are to stay, and say that they have committed what others who stay have not voted for."""
        told = [report for _, report in self.reports_of_staying() if report is not None]
        return frozenset(rank // self._ranks_per_replica for rank in self._unproven(told))

    def _unproven(self, told: Collection[Report]) -> frozenset[int]:
        claims, held = {each.rank: each.claims for each in told}, {each.rank: each.held for each in told}
        return proofs.unproven(claims, held, self.mine.shown, self._ranks_per_replica)

    def reports_of_staying(self) -> list[tuple[int, Report | None]]:
        """Replica and report, if one has come that is believed, of each rank that is to stay."""
        return [(rank // self._ranks_per_replica, self._reports.get(rank)) for rank in self._ranks(self.staying)]

    def _ranks(self, members: Iterable[int]) -> list[int]:
        size = self._ranks_per_replica
        return [rank for member in members for rank in range(member * size, (member + 1) * size)]
