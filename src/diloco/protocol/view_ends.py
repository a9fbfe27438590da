"""Why a view ends: members that are lost, late or leave, links that break, and replicas that join."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from diloco.membership.quorum import enough_without, names_of
from diloco.membership.reports import Report
from diloco.protocol.actions import SetTimer, Timer
from diloco.protocol.events import Outbox, ViewBegan
from diloco.protocol.failure_detector import Loss
from diloco.protocol.messages import ChangeReport, Leaving, adopted_message
from diloco.protocol.roster import Roster
from diloco.protocol.rules import Policies, Rules
from diloco.protocol.views import ViewManager

__all__ = ["ViewEnds"]

_RENEW_S = 1.0
_MOST_AT_ONCE = 32  # replicas that join by one change: what is to be known of them grows as the square of it
_TRY_AGAIN = {"kind": "refused", "reason": "the members are changing", "for_good": False}


class ViewEnds:
    """Tells the view manager why the present view ends."""

    def __init__(self, rules: Rules, policies: Policies, roster: Roster, views: ViewManager, outbox: Outbox) -> None:
        self.closed_to_joiners = ""  # why nobody can join at present; "" if anybody can
        self._rules = rules
        self._policies = policies
        self._roster = roster
        self._views = views
        self._outbox = outbox
        # replica -> each of its ranks that asked to join -> the ranks that it is connected to
        self._asked: dict[int, dict[int, frozenset[int]]] = {}
        self._admitted: dict[int, dict[int, frozenset[int]]] = {}  # as that, of those who join by the present change
        self._ended_early: set[int] = set()  # replicas that ended before this rank was a member
        self._broken_link = ""  # why the view is to be renewed

    def receive_change(self, sender: int, view_id: int, said: ChangeReport) -> None:
        """A member says that a view ends."""
        views, last, step = self._views, self._views.adopted_last, said.report.step
        if last is not None and view_id == last.previous.id:
            self._outbox.send([sender], adopted_message(last))  # it is still in the view that has ended here
        elif view_id == views.view.id and step > views.contributions.greatest_step:
            words = f"replica {self._rules.replica_of(sender)} says that it is at step {step}"
            self.drop(sender, f"{words}, while others can't be past {views.contributions.greatest_step}")
        elif view_id == views.view.id:
            views.receive_change(said)

    def receive_leaving(self, sender: int, said: Leaving) -> None:
        """A member leaves of its own accord."""
        replica = self._rules.replica_of(sender)
        if replica == self._rules.replica:
            self._views.leave(said.step)  # and say so, in case my connections end before its message arrives
        else:
            words, left = f"replica {replica} left after step {said.step}", frozenset({(replica, said.step)})
            self._views.end(words, left=left, left_commits=said.left_commits)

    def lose(self, rank: int, loss: Loss) -> None:
        """The connection to a rank was lost."""
        replica = self._rules.replica_of(rank)
        of_mine = f"rank {rank} of " if replica == self._rules.replica else ""
        self.drop(rank, f"{of_mine}replica {replica} is lost: {loss.text}", gone=loss.kind == "gone")

    def drop(self, rank: int, words: str, *, gone: bool = False) -> None:
        """Give up a rank for the reason in ``words``; ``gone``: its process is known to have ended."""
        replica = self._rules.replica_of(rank)
        self._asked.pop(replica, None)
        if not self._views.is_member and replica != self._rules.replica:
            if gone:
                self._ended_early.add(replica)
            return
        known = replica in self._joining.union(self._views.view.members)
        if not known or self._views.failure is not None:
            return
        if replica == self._rules.replica:
            self._views.stop(f"{words}.")
        else:
            lost = frozenset({replica})
            # report all that are lost at this moment together: one of them alone may look like another's fault
            unheard = lost | self._roster.unreached(self._views.view)
            self._views.end(words, unheard=unheard, gone=lost if gone else frozenset())

    def drop_late(self, behind: frozenset[int], unheard: frozenset[int], words: str) -> None:
        """Replicas keep a round waiting for too long; those ``behind`` still send something."""
        if unheard or enough_without(self._views.view, behind, self._policies.quorum):
            self._views.end(words, behind=behind, unheard=unheard)

    def drop_unlinked(self, replicas: Sequence[int], reason: str) -> None:
        """Payload connections to some replicas could not be made."""
        words = f"replica {replicas[0]} has no payload connection to replica {self._rules.replica}: {reason}"
        self._views.end(words, unheard=frozenset(replicas))

    def renew_soon(self, words: str) -> None:
        """A payload connection has broken, as ``words`` say: let the same members form a new view soon."""
        if words and not self._broken_link and self._views.change.known is None and self._views.failure is None:
            self._broken_link = words
            self._outbox.actions.append(SetTimer(Timer("renew", self._views.view.id), _RENEW_S))

    def renew(self, view_id: int) -> None:
        """Form a new view, unless the one with the broken payload connection is over."""
        if view_id == self._views.view.id and self._views.change.known is None:
            self._views.end(self._broken_link)

    def settle(self, view_id: int) -> None:
        """A change of views takes long: wait for no answers first, then give up those who keep it from its end."""
        change, timer = self._views.change, Timer("settle", view_id)
        if view_id != self._views.view.id:
            return
        if (wait_s := change.patience_s()) > 0:
            self._outbox.actions.append(SetTimer(timer, wait_s))
        elif change.stop_waiting():
            self._outbox.actions.append(SetTimer(timer, self._rules.settle_s / 2))
        elif blamed := change.blame():
            self._outbox.actions.append(SetTimer(timer, self._rules.settle_s))
            why = f"{names_of(blamed)} did not agree on the next view within {self._rules.settle_s:g} s"
            self._views.end(why, unheard=blamed)

    def receive_join(self, rank: int, connected: frozenset[int]) -> None:
        """A rank asks to join. Its replica joins once all of its ranks have asked.

        Args:
            rank: the one that asks.
            connected: ranks that it is connected to. If a member is missing, it is asked to try again.
        """
        replica = self._rules.replica_of(rank)
        if self._roster.is_connected(rank):
            if self._views.view is not self._views.first:
                return  # it has joined already: another member heard it first
            self._roster.mark_replaced(rank)  # started again before this view began
        if self.closed_to_joiners or self._views.failure is not None or not self._views.is_member:
            why = self.closed_to_joiners or str(self._views.failure or "this replica is joining itself")
            refused = {"kind": "refused", "reason": why, "for_good": self._views.failure is not None}
            self._outbox.send([rank], refused)
        elif out_s := self._views.contributions.conduct.banned_for_s(replica, self._outbox.now_s):
            why = f"replica {replica} has spoilt rounds, and may come back in {math.ceil(out_s)} s"
            self._outbox.send([rank], {"kind": "refused", "reason": why, "for_good": False})
        elif (
            (not self._views.change.accepts_joiners and replica not in self._joining.union(self._views.view.members))
            or len(self._joining - {replica}) >= _MOST_AT_ONCE
            or not connected.issuperset(self._rules.ranks(each for each in self._views.view.members if each != replica))
        ):
            self._outbox.send([rank], _TRY_AGAIN)
        else:
            self._ended_early.discard(replica)
            asked = self._asked.setdefault(replica, {})
            asked[rank] = connected
            if len(asked) == self._rules.ranks_per_replica:
                if replica in self._views.view.members:  # back before its loss was noticed: lose it first
                    self._views.end(f"replica {replica} was started again", gone=frozenset({replica}))
                else:
                    self._admit([replica])

    def on_view_began(self, began: ViewBegan) -> None:
        """A view has begun: deal with members that can't be reached, and with replicas that ask to join."""
        self._broken_link = ""
        self._admitted.clear()
        following, mine, view = began.following, began.mine, self._views.view
        unheard = self._roster.unreached(view)
        if following is None or mine is None:
            if unheard:
                gone = unheard & (self._ended_early | self._roster.replaced(unheard))
                how = "joins" if following else "begins with"
                words = f"replica {self._rules.replica} can't reach all that it {how}: {names_of(unheard)}"
                self._views.end(words, unheard=unheard, gone=gone)
            return
        if view is following.view:
            self._lose_unreachable(mine, unheard)
        complete = [replica for replica, asked in self._asked.items() if len(asked) == self._rules.ranks_per_replica]
        waiting = [each for each in dict.fromkeys((*complete, *mine.joining)) if each not in self._views.view.members]
        # they may not be connected to those that have just joined
        again = [each for each in waiting if following.joined or each in mine.joining]
        for replica in again:
            self._asked.pop(replica, None)
            self._outbox.send(self._rules.ranks((replica,)), _TRY_AGAIN)
        self._admit([each for each in waiting if each not in again][:_MOST_AT_ONCE])

    def _admit(self, replicas: Collection[int]) -> None:
        """Let replicas join that have asked, and that have a way to each other and to those who join already."""
        if not replicas:
            return
        self._admitted.update((each, self._asked.pop(each)) for each in replicas)
        wishing = self._joining.union(replicas)
        pairs = (pair for pair in itertools.combinations(sorted(wishing), 2) if not {*pair}.isdisjoint(replicas))
        apart = frozenset(pair for pair in pairs if not self._are_connected(*pair))
        words = f"{names_of(replicas)} {'want' if len(replicas) > 1 else 'wants'} to join"
        self._views.end(words, joining=frozenset(replicas), apart=apart)

    @property
    def _joining(self) -> frozenset[int]:
        """Replicas that become members by the present change, if there is one."""
        change = self._views.change.known
        return change.mine.joining if change is not None else frozenset()

    def _are_connected(self, one: int, other: int) -> bool:
        """Whether all ranks of two replicas that want to join are connected, as one of each two says."""
        reach = {**self._admitted.get(one, {}), **self._admitted.get(other, {})}
        pairs = itertools.product(self._rules.ranks((one,)), self._rules.ranks((other,)))
        return all(there in reach.get(here, ()) or here in reach.get(there, ()) for here, there in pairs)

    def _lose_unreachable(self, mine: Report, unheard: frozenset[int]) -> None:
        """Lose members that were lost before this view was agreed on: no connection is left whose end would tell."""
        me, members = self._rules.replica, frozenset(self._views.view.members)
        left = frozenset(each for each in mine.left if each[0] in members)
        gone = mine.gone & members
        unheard |= frozenset(other for one, other in mine.unheard if one == me) & members
        if gone | unheard:
            words = f"replica {me} can't reach all of the next view: {names_of(gone | unheard)}"
            commits = mine.left_commits if left else frozenset()
            self._views.end(words, unheard=unheard, gone=gone, left=left, left_commits=commits)
