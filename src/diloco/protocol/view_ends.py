"""The reasons to end a view: members that are lost, late or leave, links that break, and replicas that join."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from diloco.membership import Report, enough_without, names_of
from diloco.protocol.actions import SetTimer, Timer
from diloco.protocol.events import Outbox, ViewBegan
from diloco.protocol.failure_detector import Loss
from diloco.protocol.messages import ChangeReport, Leaving, adopted_message
from diloco.protocol.roster import Roster
from diloco.protocol.rules import Policies, Rules
from diloco.protocol.views import ViewManager

__all__ = ["ViewEnds"]

_RENEW_S = 1.0
# most replicas that join by one change: what must be known of them grows with the square of their number
_MOST_AT_ONCE = 32
_TRY_AGAIN = {"kind": "refused", "reason": "a view change is in progress", "for_good": False}


class ViewEnds:
    """Decides when the current view ends, and tells the view manager why."""

    def __init__(self, rules: Rules, policies: Policies, roster: Roster, views: ViewManager, outbox: Outbox) -> None:
        self.closed_to_joiners = ""  # why no replica can join at present; "" if any can
        self._rules = rules
        self._policies = policies
        self._roster = roster
        self._views = views
        self._outbox = outbox
        # replica -> each of its ranks that asked to join -> the ranks that it is connected to
        self._asked: dict[int, dict[int, frozenset[int]]] = {}
        # the same for the replicas that join by the current change
        self._admitted: dict[int, dict[int, frozenset[int]]] = {}
        self._ended_early: set[int] = set()  # replicas that ended before this rank was a member
        self._broken_link = ""  # why the view is to be replaced by one of the same members

    def receive_change(self, sender: int, view_id: int, received: ChangeReport) -> None:
        """Process a member's report on the end of a view."""
        views, last, step = self._views, self._views.adopted_last, received.report.step
        if last is not None and view_id == last.previous.id:
            self._outbox.send([sender], adopted_message(last))  # the sender is still in the view that has ended here
        elif view_id == views.view.id and step > views.contributions.greatest_step:
            words = f"replica {self._rules.replica_of(sender)} reports step {step}"
            self.drop(sender, f"{words}, but no member can be past step {views.contributions.greatest_step}")
        elif view_id == views.view.id:
            views.receive_change(received)

    def receive_leaving(self, sender: int, leaving: Leaving) -> None:
        """Process a member's announcement that it leaves."""
        replica = self._rules.replica_of(sender)
        if replica == self._rules.replica:
            # and announce it, in case this rank's connections end before the other rank's message arrives
            self._views.leave(leaving.step)
        else:
            words, left = f"replica {replica} left after step {leaving.step}", frozenset({(replica, leaving.step)})
            self._views.end(words, left=left, left_commits=leaving.left_commits)

    def lose(self, rank: int, loss: Loss) -> None:
        """Handle the loss of the connection to a rank."""
        replica = self._rules.replica_of(rank)
        of_mine = f"rank {rank} of " if replica == self._rules.replica else ""
        self.drop(rank, f"{of_mine}replica {replica} is lost: {loss.text}", gone=loss.kind == "gone")

    def drop(self, rank: int, words: str, *, gone: bool = False) -> None:
        """Declare a rank lost for the reason in ``words``; ``gone``: its process is known to have ended."""
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
            # report all current losses together: one of them alone may look like another replica's fault
            unheard = lost | self._roster.unreached(self._views.view)
            self._views.end(words, unheard=unheard, gone=lost if gone else frozenset())

    def drop_late(self, behind: frozenset[int], unheard: frozenset[int], words: str) -> None:
        """Exclude replicas that keep a round waiting for too long; those ``behind`` still send something."""
        if unheard or enough_without(self._views.view, behind, self._policies.quorum):
            self._views.end(words, behind=behind, unheard=unheard)

    def drop_unlinked(self, replicas: Sequence[int], reason: str) -> None:
        """Exclude replicas to which no payload connections could be opened."""
        words = f"replica {replicas[0]} has no payload connection to replica {self._rules.replica}: {reason}"
        self._views.end(words, unheard=frozenset(replicas))

    def renew_soon(self, words: str) -> None:
        """Schedule a new view of the same members, since a payload connection has broken, as ``words`` say."""
        if words and not self._broken_link and self._views.change.known is None and self._views.failure is None:
            self._broken_link = words
            self._outbox.actions.append(SetTimer(Timer("renew", self._views.view.id), _RENEW_S))

    def renew(self, view_id: int) -> None:
        """Install a new view, unless the one with the broken payload connection has ended."""
        if view_id == self._views.view.id and self._views.change.known is None:
            self._views.end(self._broken_link)

    def settle(self, view_id: int) -> None:
        """Push a long view change to its end: stop waiting for answers first, then exclude the replicas that obstruct
        it."""
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
        """Process a rank's request to join. Its replica joins once all of its ranks have asked.

        Args:
            rank: the rank that asks.
            connected: the ranks to which it is connected. If a member is missing, the rank is asked to try again.
        """
        replica = self._rules.replica_of(rank)
        if self._roster.is_connected(rank):
            if self._views.view is not self._views.first:
                return  # it has joined already, by the request to another member
            self._roster.mark_replaced(rank)  # restarted before this view began
        if self.closed_to_joiners or self._views.failure is not None or not self._views.is_member:
            why = self.closed_to_joiners or str(self._views.failure or "this replica is still joining")
            refused = {"kind": "refused", "reason": why, "for_good": self._views.failure is not None}
            self._outbox.send([rank], refused)
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
                if replica in self._views.view.members:  # it is back before its loss was noticed: lose it first
                    self._views.end(f"replica {replica} was restarted", gone=frozenset({replica}))
                else:
                    self._admit([replica])

    def on_view_began(self, began: ViewBegan) -> None:
        """Handle members that can't be reached and replicas that ask to join, as a view has begun."""
        self._broken_link = ""
        self._admitted.clear()
        following, mine, view = began.following, began.mine, self._views.view
        unheard = self._roster.unreached(view)
        if following is None or mine is None:
            if unheard:
                gone = unheard & (self._ended_early | self._roster.replaced(unheard))
                how = "joins" if following else "begins with"
                words = f"replica {self._rules.replica} can't reach every member that it {how}: {names_of(unheard)}"
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
        """Let replicas join, and report which of the joining ones are not connected to each other."""
        if not replicas:
            return
        self._admitted.update((each, self._asked.pop(each)) for each in replicas)
        wishing = self._joining.union(replicas)
        pairs = (pair for pair in itertools.combinations(sorted(wishing), 2) if not {*pair}.isdisjoint(replicas))
        apart = frozenset(pair for pair in pairs if not self._are_connected(*pair))
        words = f"{names_of(replicas)} {'ask' if len(replicas) > 1 else 'asks'} to join"
        self._views.end(words, joining=frozenset(replicas), apart=apart)

    @property
    def _joining(self) -> frozenset[int]:
        """The replicas that become members by the current change, if there is one."""
        change = self._views.change.known
        return change.mine.joining if change is not None else frozenset()

    def _are_connected(self, one: int, other: int) -> bool:
        """Return whether all ranks of two joining replicas are connected, as one of each pair reports."""
        reach = {**self._admitted.get(one, {}), **self._admitted.get(other, {})}
        pairs = itertools.product(self._rules.ranks((one,)), self._rules.ranks((other,)))
        return all(there in reach.get(here, ()) or here in reach.get(there, ()) for here, there in pairs)

    def _lose_unreachable(self, mine: Report, unheard: frozenset[int]) -> None:
        """Lose members that were lost before this view was agreed on; they have no connection whose end would be
        noticed."""
        me, members = self._rules.replica, frozenset(self._views.view.members)
        left = frozenset(each for each in mine.left if each[0] in members)
        gone = mine.gone & members
        unheard |= frozenset(other for one, other in mine.unheard if one == me) & members
        if gone | unheard:
            words = f"replica {me} can't reach every member of the next view: {names_of(gone | unheard)}"
            commits = mine.left_commits if left else frozenset()
            self._views.end(words, unheard=unheard, gone=gone, left=left, left_commits=commits)
