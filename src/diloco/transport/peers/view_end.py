"""This rank's side of the end of the present view: what it knows of it, told to the survivors as it grows."""

from __future__ import annotations

from collections.abc import Callable

from diloco.membership.change import Change, NextView, Report
from diloco.membership.quorum import Policy, enough_without
from diloco.protocol.messages import ChangeReport, change_message
from diloco.protocol.rules import Rules
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.lineup import Lineup
from diloco.transport.peers.present import Present

__all__ = ["ViewEnd"]


class ViewEnd:
    """Nothing is known until something happens; from then on the rounds of the view are frozen.

    Args:
        present: the view.
        rules: who I am.
        quorum: who may go on.
        connections: control connections.
        lineup: the members' processes.
        step: tells the inner step that this rank has begun to synchronise.
        adopt: called with what follows, once all who stay are ready for it, or this rank can't be one of them.

    Attributes:
        change: what is known; None: the view does not end.
    """

    def __init__(
        self,
        present: Present,
        rules: Rules,
        quorum: Policy,
        connections: ConnectionManager,
        lineup: Lineup,
        step: Callable[[], int],
        adopt: Callable[[NextView], None],
    ) -> None:
        self.change: Change | None = None
        self._present = present
        self._rules = rules
        self._quorum = quorum
        self._connections = connections
        self._lineup = lineup
        self._step = step
        self._adopt = adopt

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
    ) -> None:
        """Something happened, ``why`` in words: the view ends if it did not before.

        Nothing does for who is no member, or takes part no more.
        """
        if self._present.failure is not None or self._present.book is None:
            return
        started, change = self._begin(why)
        assert self._present.book is not None
        grew = change.extend(
            unheard=unheard,
            lacking=unheard & self._present.book.lacking(),
            behind=behind,
            gone=gone,
            joining=joining,
            left=left,
            left_commits=left_commits,
        )
        if grew or started:
            self._announce(change)
        self.settle()

    def absorb(self, said: ChangeReport) -> Change:
        """Another rank says that the view ends; see `settle`."""
        started, change = self._begin(said.why)
        if change.absorb(said.report) or started:
            self._announce(change)
        return change

    def goes_on_without(self, behind: frozenset[int]) -> bool:
        """Whether those who are not ``behind`` are enough to go on without them."""
        return enough_without(self._present.view, behind, self._quorum)

    def is_joining(self, replica: int) -> bool:
        """Whether a replica becomes a member by this change."""
        return self.change is not None and replica in self.change.mine.joining

    def settle(self) -> None:
        """Let what follows be adopted, if all who stay are ready; or let this rank go, if none of them hears it."""
        change = self.change
        if change is None:
            return
        following = change.outcome()
        if change.is_left_out and not any(map(self._lineup.is_connected, self._lineup.ranks(change.staying))):
            following = change.alone()
        if following is not None:
            self._adopt(following)

    def take(self) -> Change:
        """The change that is over now; nothing is known of the end of the next view."""
        change, self.change = self.change, None
        assert change is not None
        return change

    def _begin(self, why: str) -> tuple[bool, Change]:
        if self.change is not None:
            return False, self.change
        view, book = self._present.view, self._present.book
        assert book is not None
        commits, void = book.freeze()
        mine = Report(self._rules.rank, view.id, step=self._step(), commits=commits, void=void)
        self.change = Change(mine, view, self._rules.ranks_per_replica, self._quorum, why)
        return True, self.change

    def _announce(self, change: Change) -> None:
        if change.mine.agreed is not None:
            self._present.agreed = change.mine.agreed.following.view
        message = change_message(change.mine, change.why)
        for rank in change.audience:
            self._connections.send(rank, message)
