"""How the members of a view agree on the next one, and on what became of the rounds in flight.

Each member freezes (it casts no vote and decides no round of the old view any more) and tells the others what it has
committed. When it holds the reports of all survivors about the same loss, it knows what they know: a round that any of
them committed is committed, and every other one is void. Whoever finished first and is asked again answers with the
`NextView` that it adopted. Pure: messages in, messages out; nothing here sends, waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from diloco.membership.quorum import Decision, Policy, decide
from diloco.membership.view import View

__all__ = ["Change", "Commits", "NextView", "Report"]

Commits = Mapping[tuple[int, int], str]
"""(fragment, outer step) -> digest of the average that was committed."""


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
    """

    rank: int
    view_id: int
    lost: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    joining: frozenset[int] = frozenset()
    step: int = 0
    commits: Commits = field(default_factory=dict)


@dataclass(frozen=True)
class NextView:
    """What all survivors adopt.

    Attributes:
        view: the next view; None when these survivors may not go on.
        previous: the one that ended.
        from_step: rounds sent at this inner step or later are the next view's.
        commits: rounds of the old view that are committed; every other one that was not decided is void.
        reason: in words.
        joined: replicas that were not members before.
    """

    view: View | None
    previous: View
    from_step: int
    commits: Commits
    reason: str
    joined: tuple[int, ...] = ()


class Change:
    """One rank's side of the end of a view.

    Args:
        mine: this rank's report, as of the moment it froze.
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
        return self.extend(lost=report.lost, gone=report.gone, joining=report.joining)

    def extend(
        self,
        *,
        lost: frozenset[int] = frozenset(),
        gone: frozenset[int] = frozenset(),
        joining: frozenset[int] = frozenset(),
    ) -> bool:
        """More is known; True if my report grew by it and must be told to all survivors again.

        A replica that wanted to join and is lost again neither joins nor counts as a loss of the old view.
        """
        mine = self.mine
        members = frozenset(self.view.members)
        grown = replace(
            mine,
            lost=mine.lost | (lost & members) | ((mine.joining | joining) & lost),
            gone=mine.gone | gone,
            joining=(mine.joining | joining),
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
        commits: dict[tuple[int, int], str] = {}
        for report in told:
            commits.update(report.commits)
        joining = mine.joining - mine.lost
        lost = mine.lost & frozenset(self.view.members)
        decision: Decision = decide(self.view, lost=lost, gone=gone, joining=joining, policy=self._policy)
        return NextView(
            view=None if decision.members is None else View(self.view.id + 1, decision.members),
            previous=self.view,
            from_step=max(report.step for report in told) + 1,
            commits=commits,
            reason=decision.reason,
            joined=tuple(sorted(joining - frozenset(self.view.members))),
        )


def _same(report: Report, mine: Report) -> bool:
    return (report.lost, report.joining, report.gone) == (mine.lost, mine.joining, mine.gone)
