"""Who comes and who goes, as this rank notices it: each is a reason for the present view to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diloco.membership.change import NextView, Report
from diloco.membership.view import View
from diloco.protocol.failure_detector import Loss
from diloco.protocol.messages import Leaving, adopted
from diloco.protocol.rules import Rules
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.lineup import Lineup
from diloco.transport.peers.present import Present
from diloco.transport.peers.view_end import ViewEnd
from diloco.transport.peers.waiting import Joiners

__all__ = ["Attendance"]

_AGAIN = {"kind": "refused", "reason": "the members are changing", "for_good": False}


class Attendance:
    """Those who are members, and those who would be. In the control thread.

    Args:
        present: the view.
        rules: who I am.
        connections: control connections.
        lineup: the members' processes.
        ending: of the view; told of all that happens.
        stop: called, with the reason in words, when this replica can't take part any more.

    Attributes:
        closed_to_joiners: why nobody can join for now; "" where all can.
    """

    def __init__(
        self,
        present: Present,
        rules: Rules,
        connections: ConnectionManager,
        lineup: Lineup,
        ending: ViewEnd,
        stop: Callable[[str], None],
    ) -> None:
        self.closed_to_joiners = ""
        self._present = present
        self._rules = rules
        self._connections = connections
        self._lineup = lineup
        self._ending = ending
        self._stop = stop
        self._joiners = Joiners(rules.ranks_per_replica)
        self._gone_before: set[int] = set()

    # Who comes.

    def join(self, rank: int, connected: frozenset[int]) -> None:
        """A rank asks to be a member; its replica joins when all its ranks have asked.

        Args:
            rank: that asks.
            connected: ranks that it is connected to; without all members it is told to look again.
        """
        replica, now = rank // self._rules.ranks_per_replica, self._present
        if self._lineup.is_connected(rank):
            return  # another member heard it first, and all have agreed since
        if self.closed_to_joiners or now.failure is not None or now.book is None:
            why = self.closed_to_joiners or str(now.failure or "this replica is joining itself")
            self._connections.send(rank, {"kind": "refused", "reason": why, "for_good": now.failure is not None})
            return
        others = set(self._lineup.ranks(tuple(m for m in now.view.members if m != replica)))
        if not connected.issuperset(others):
            self._connections.send(rank, _AGAIN)
            return
        self._gone_before.discard(replica)
        if self._joiners.ask(rank):
            if replica in now.view.members:  # back before anybody noticed that it was lost; it joins once that is done
                text = f"replica {replica} was started again"
                self._ending.extend(text, gone=frozenset({replica}))
            else:
                self._let_join(replica)

    def welcome(self, following: NextView, note: Mapping[str, Any] | None) -> None:
        """Tell those who join of the view that they are in, with a note from the owner."""
        for rank in self._lineup.ranks(following.joined) if following.view is not None else ():
            self._connections.send(rank, adopted(following) | {"kind": "welcome", "note": note})

    # Who goes.

    def lose(self, rank: int, loss: Loss) -> None:
        """A rank can't be reached any more."""
        replica = rank // self._rules.ranks_per_replica
        of_mine = f"rank {rank} of " if replica == self._rules.replica else ""
        self.give_up(rank, f"{of_mine}replica {replica} is lost: {loss.text}", gone=loss.kind == "gone")

    def give_up(self, rank: int, words: str, *, gone: bool = False) -> None:
        """A rank is no use any more, for the reason in ``words``; ``gone``: its process is known to have ended."""
        replica, now = rank // self._rules.ranks_per_replica, self._present
        self._joiners.forget(replica)
        if now.book is None and replica != self._rules.replica:  # no member yet, so it has no say
            if gone:
                self._gone_before.add(replica)
            return
        known = replica in now.view.members or self._ending.is_joining(replica)
        if not known or now.failure is not None:
            return
        if replica == self._rules.replica:
            self._stop(f"{words}.")
        else:
            lost = frozenset({replica})
            # all that are lost in this moment are told of at once: half of it may look like another one's fault
            unheard = lost | self._lineup.unreached(now.view)
            self._ending.extend(words, unheard=unheard, gone=lost if gone else frozenset())

    def leaves(self, replica: int, said: Leaving) -> None:
        """Another replica says that it goes of its own accord."""
        words, left = f"replica {replica} left after step {said.step}", frozenset({(replica, said.step)})
        self._ending.extend(words, left=left, left_commits=said.left_commits)

    def late(self, behind: frozenset[int], unheard: frozenset[int], words: str) -> None:
        """Replicas keep a round waiting for too long, and of others nothing is heard at all."""
        if unheard or self._ending.goes_on_without(behind):
            self._ending.extend(words, behind=behind, unheard=unheard)

    def unlinked(self, failed: Mapping[int, str]) -> None:
        """No payload connection came to be to replicas, in words by number."""
        peer, words = next(iter(failed.items()))
        me = self._rules.replica
        self._ending.extend(
            f"replica {peer} has no payload connection to replica {me}: {words}", unheard=frozenset(failed)
        )

    def broken(self, words: str) -> None:
        """A payload connection ended while the control connection stands: the same members connect anew."""
        if self._ending.change is None and self._present.failure is None:
            self._connections.loop.call_later(1.0, self._form_anew, self._present.view, words)

    # What a view begins with.

    def entered(self) -> None:
        """This rank is a member now: who was lost before that is lost in the view."""
        if lost := self._lineup.unreached(self._present.view):
            words = f"replica {self._rules.replica} can't reach all that it joins"
            self._ending.extend(words, unheard=lost, gone=lost & (self._gone_before | self._lineup.replaced(lost)))

    def begun(self, following: NextView, mine: Report) -> None:
        """The view that follows has begun, and maybe one after it: go on with what was known when ``mine`` was said."""
        if self._present.view is following.view:
            self._lose_again(mine)
        waiting = [*self._joiners.complete(), *mine.joining]
        for replica in dict.fromkeys(m for m in waiting if m not in self._present.view.members):
            if following.joined or replica in mine.joining:  # it may have no connection to who has just joined
                self._joiners.forget(replica)
                for rank in self._lineup.ranks((replica,)):
                    self._connections.send(rank, _AGAIN)
            else:
                self._let_join(replica)

    def _let_join(self, replica: int) -> None:
        self._joiners.forget(replica)
        self._ending.extend(f"replica {replica} wants to join", joining=frozenset({replica}))

    def _lose_again(self, mine: Report) -> None:
        """Those whom the others agreed on before they heard of it; no connection is left that would tell of it."""
        me, members = self._rules.replica, frozenset(self._present.view.members)
        left = frozenset(each for each in mine.left if each[0] in members)
        gone = mine.gone & members
        unheard = frozenset(other for one, other in mine.unheard if one == me) & members
        unheard |= self._lineup.unreached(self._present.view)
        if gone | unheard:
            words = f"replica {me} can't reach all of the next view"
            commits = mine.left_commits if left else frozenset()
            self._ending.extend(words, unheard=unheard, gone=gone, left=left, left_commits=commits)

    def _form_anew(self, view: View, words: str) -> None:
        if self._present.view is view and self._ending.change is None and self._present.failure is None:
            self._ending.extend(words)
