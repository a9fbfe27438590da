"""How the members of a view agree on the next one, and on what became of the rounds in flight.

Each member freezes (it casts no vote and decides no round of the old view any more) and tells the others what it has
committed and what it has decided void. When it holds the reports of all survivors about the same loss, it knows what
they know: a round that any of them committed, or one who said that it leaves, is committed, and one that any of them
has decided void is void. Any other one goes on in the next view among those who are left; where replicas join it is
void, as these know nothing of it. Whoever finished first and is asked again answers with the `NextView` that it
adopted. Pure: messages in, messages out; nothing here sends, waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from diloco.membership.quorum import Decision, Policy, decide
from diloco.membership.view import View

__all__ = ["Change", "Commits", "NextView", "Report", "Rounds"]

Commits = Mapping[tuple[int, int], str]
"""(fragment, outer step) -> digest of the average that was committed."""

Rounds = frozenset[tuple[int, int]]
"""Rounds as (fragment, outer step)."""


@dataclass(frozen=True)
class Report:
    """What one rank says when a view is to end.

    Attributes:
        rank: who says it.
        view_id: of the view that ends.
        lost: replicas it can't reach or was told that others can't.
        gone: those of them whose process is known to have ended.
        joining: replicas that want to be members of the next view.
        step: inner steps it has begun to synchronise.
        commits: the rounds that it has committed lately.
        void: the rounds that it has decided void lately.
        left: replicas that have said that they leave, and after which inner step; they are lost and gone as well.
        left_commits: the rounds that those have committed lately, as (fragment, outer step, digest).
    """

    rank: int
    view_id: int
    lost: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    joining: frozenset[int] = frozenset()
    step: int = 0
    commits: Commits = field(default_factory=dict)
    void: Rounds = frozenset()
    left: frozenset[tuple[int, int]] = frozenset()
    left_commits: frozenset[tuple[int, int, str]] = frozenset()


@dataclass(frozen=True)
class NextView:
    """What all survivors adopt.

    Attributes:
        view: the next view; None when these survivors may not go on.
        previous: the one that ended.
        from_step: one more than any survivor has begun to synchronise. Where replicas joined, rounds sent at this inner
            step or later are the next view's, and earlier ones that were not decided are void.
        commits: rounds of the old view that are committed.
        void: rounds of the old view that are void. Every other one that was not decided goes on in the next view, if
            there is one and nobody joined.
        reason: in words.
        joined: replicas that were not members before.
        left: members of the old view that left of their own accord, and after which inner step; ascending.
    """

    view: View | None
    previous: View
    from_step: int
    commits: Commits
    reason: str
    joined: tuple[int, ...] = ()
    void: Rounds = frozenset()
    left: tuple[tuple[int, int], ...] = ()

    @property
    def carries_over(self) -> bool:
        """Whether rounds that are neither committed nor void go on in the next view."""
        return self.view is not None and not self.joined


class Change:
    """One rank's side of the end of a view.

    Args:
        mine: this rank's report, as of the moment it froze; what happened is told with `extend`.
        view: the view that ends.
        ranks_per_replica: S; rank r belongs to replica r // S.
        policy: who may go on.
        why: what happened, in words.
    """

    def __init__(self, mine: Report, view: View, ranks_per_replica: int, policy: Policy, why: str) -> None:
        self.mine = mine
        self.view = view
        self.why = why
        self._ranks_per_replica = ranks_per_replica
        self._policy = policy
        self._reports: dict[int, Report] = {mine.rank: mine}

    @property
    def survivors(self) -> tuple[int, ...]:
        """Ranks whose reports are needed."""
        size = self._ranks_per_replica
        return tuple(
            rank
            for member in self.view.members
            if member not in self.mine.lost
            for rank in range(member * size, (member + 1) * size)
        )

    def absorb(self, report: Report) -> bool:
        """Take in another rank's report; True if mine grew by it and must be told to all survivors again."""
        self._reports[report.rank] = report
        return self.extend(
            lost=report.lost,
            gone=report.gone,
            joining=report.joining,
            left=report.left,
            left_commits=report.left_commits,
        )

    def extend(
        self,
        *,
        lost: frozenset[int] = frozenset(),
        gone: frozenset[int] = frozenset(),
        joining: frozenset[int] = frozenset(),
        left: frozenset[tuple[int, int]] = frozenset(),
        left_commits: frozenset[tuple[int, int, str]] = frozenset(),
    ) -> bool:
        """More is known; True if my report grew by it and must be told to all survivors again.

        A replica that wanted to join and is lost again neither joins nor counts as a loss of the old view. One that has
        left is lost, and not because it can't be reached.
        """
        mine = self.mine
        members = frozenset(self.view.members)
        left = frozenset((replica, step) for replica, step in left if replica in members)
        departed = frozenset(replica for replica, _ in left)
        known = members | mine.joining | joining
        grown = replace(
            mine,
            lost=mine.lost | (lost & known) | departed,
            gone=mine.gone | (gone & known) | departed,
            joining=mine.joining | joining,
            left=mine.left | left,
            left_commits=mine.left_commits | left_commits,
        )
        self._reports[mine.rank] = self.mine = grown
        return grown != mine

    def outcome(self) -> NextView | None:
        """What to adopt, once all survivors have reported the same loss; None until then."""
        reports = [self._reports.get(rank) for rank in self.survivors]
        mine = self.mine
        told = [report for report in reports if report is not None and _same(report, mine)]
        if len(told) < len(reports) or mine.rank not in self.survivors:
            return None
        gone = frozenset().union(*(report.gone for report in told))
        commits = {(fragment, outer_step): digest for fragment, outer_step, digest in mine.left_commits}
        for report in told:
            commits.update(report.commits)
        wishing = mine.joining - mine.lost
        joining = frozenset({min(wishing)}) if wishing else frozenset()  # two may not have a way to each other yet
        lost = mine.lost & frozenset(self.view.members)
        left = {replica: step for replica, step in sorted(mine.left)}  # two ranks of it may have named two steps
        decision: Decision = decide(self.view, lost=lost, gone=gone, joining=joining, policy=self._policy, left=left)
        return NextView(
            view=None if decision.members is None else View(self.view.id + 1, decision.members),
            previous=self.view,
            from_step=max(report.step for report in told) + 1,
            commits=commits,
            reason=decision.reason,
            joined=tuple(sorted(joining - frozenset(self.view.members))),
            void=frozenset().union(*(report.void for report in told)) - commits.keys(),
            left=tuple(left.items()),
        )


def _same(report: Report, mine: Report) -> bool:
    names = ("lost", "joining", "gone", "left", "left_commits")
    return all(getattr(report, name) == getattr(mine, name) for name in names)
