"""This rank's side of the end of the present view: what it knows of it, told to the survivors as it grows."""

from __future__ import annotations

from diloco.membership.change import Change, NextView, Report
from diloco.membership.view import View
from diloco.protocol.contributions import Contributions
from diloco.protocol.events import Outbox
from diloco.protocol.messages import ChangeReport, change_message
from diloco.protocol.roster import Roster
from diloco.protocol.rules import Policies, Rules

__all__ = ["ViewChange"]


class ViewChange:
    """Nothing is known until something happens; from then on the rounds of the view are frozen.

    Args:
        rules: who I am.
        policies: who may go on.
        roster: who is connected.
        contributions: whose rounds are frozen.
        outbox: gets what is to be done.

    Attributes:
        known: of the end of the view; None: it does not end.
        agreed: the last view that this rank was ready for, which others may have adopted; None: there was none.
    """

    def __init__(
        self, rules: Rules, policies: Policies, roster: Roster, contributions: Contributions, outbox: Outbox
    ) -> None:
        self.known: Change | None = None
        self.agreed: View | None = None
        self._rules = rules
        self._policies = policies
        self._roster = roster
        self._contributions = contributions
        self._outbox = outbox

    def extend(
        self,
        why: str,
        *,
        unheard: frozenset[int] = frozenset(),
        behind: frozenset[int] = frozenset(),
        gone: frozenset[int] = frozenset(),
        joining: frozenset[int] = frozenset(),
        left: frozenset[tuple[int, int]] = frozenset(),
        left_commits: frozenset[tuple[int, int, str]] = frozenset(),
    ) -> NextView | None:
        """Something happened, ``why`` in words: the view ends, unless this rank is no member or takes part no more.

        Returns:
            What is to be adopted now, if anything. The facts are those of `Change.extend`.
        """
        rounds = self._contributions.rounds
        if self._contributions.failure is not None or rounds is None:
            return None
        started, change = self._begin(why)
        grew = change.extend(
            unheard=unheard,
            lacking=unheard & rounds.lacking(),
            behind=behind,
            gone=gone,
            joining=joining,
            left=left,
            left_commits=left_commits,
        )
        return self._settle(change, announce=grew or started)

    def absorb(self, said: ChangeReport) -> NextView | None:
        """Another rank says that the view ends; what is to be adopted now, if anything."""
        if self._contributions.failure is not None or self._contributions.rounds is None:
            return None
        started, change = self._begin(said.why)
        grew = change.absorb(said.report)
        return self._settle(change, announce=grew or started)

    def is_joining(self, replica: int) -> bool:
        """Whether a replica becomes a member by this change."""
        return self.known is not None and replica in self.known.mine.joining

    def _begin(self, why: str) -> tuple[bool, Change]:
        if self.known is not None:
            return False, self.known
        rounds = self._contributions.rounds
        assert rounds is not None
        commits, void = rounds.freeze()
        mine = Report(self._rules.rank, rounds.view.id, step=self._contributions.step, commits=commits, void=void)
        self.known = Change(mine, rounds.view, self._rules.ranks_per_replica, self._policies.quorum, why)
        return True, self.known

    def _settle(self, change: Change, *, announce: bool) -> NextView | None:
        """What to adopt: what all who stay are ready for, or, where none of them hears this rank, that it goes."""
        if announce:
            if change.mine.agreed is not None:
                self.agreed = change.mine.agreed.following.view
            self._outbox.send(change.audience, change_message(change.mine, change.why))
        if change.is_left_out and not any(map(self._roster.is_connected, self._rules.ranks(change.staying))):
            return change.alone()
        return change.outcome()
