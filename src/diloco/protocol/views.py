"""The sequence of views: why the present one ends, the change to the next one, and what happens to its rounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from diloco.errors import ReplicaLostError, TransportError
from diloco.membership.change import NextView, Report, Rounds
from diloco.membership.quorum import enough_without, more_than_could_lie
from diloco.membership.view import View
from diloco.protocol.actions import Adopt, CloseLinks, HangUp, OpenLinks, SetTimer, Timer
from diloco.protocol.contributions import Contributions
from diloco.protocol.events import HandedIn, Outbox, ViewBegan
from diloco.protocol.failure_detector import Loss
from diloco.protocol.hearsay import could_follow
from diloco.protocol.messages import ChangeReport, Leaving, adopted
from diloco.protocol.roster import Roster
from diloco.protocol.rules import Policies, Rules, left_out, stopped
from diloco.protocol.view_change import ViewChange

__all__ = ["ViewManager"]

_RENEW_S = 1.0
_AGAIN = {"kind": "refused", "reason": "the members are changing", "for_good": False}


class ViewManager:
    """View manager: the present view, and the change to the next one.

    Args:
        rules: this rank.
        policies: what happens when replicas are lost.
        roster: connected ranks and members.
        outbox: collects actions.

    Attributes:
        view: the present one; a joiner is not in it yet.
        closed_to_joiners: why nobody can join at present; "" if anybody can.
        contributions: to the rounds of the view.
    """

    def __init__(self, rules: Rules, policies: Policies, roster: Roster, outbox: Outbox) -> None:
        self.view = View(-1, (rules.replica,))
        self.closed_to_joiners = ""
        self.contributions = Contributions(rules, policies, roster.words, outbox)
        self._rules = rules
        self._policies = policies
        self._roster = roster
        self._outbox = outbox
        self._ending = ViewChange(rules, policies, roster, self.contributions, outbox)
        self._asked: dict[int, set[int]] = {}  # ranks that asked to join, by replica
        self._first: View | None = None  # in which this rank began, with all others
        self._last: NextView | None = None
        self._gone_before: set[int] = set()
        self._parted: set[int] = set()  # replicas that say that they go on, or stop, without this one
        self._broken = ""

    @property
    def failure(self) -> TransportError | None:
        """Why this rank takes part in no more rounds, or None."""
        return self.contributions.failure

    @property
    def is_member(self) -> bool:
        """Whether this rank is a member of the view, or was when it stopped."""
        return self.contributions.rounds is not None

    @property
    def last_view(self) -> View | None:
        """The newest view that this rank was a member of or has agreed to; None before the first."""
        if not self.is_member:
            return None
        return max((view for view in (self.view, self._ending.agreed) if view is not None), key=lambda view: view.id)

    def others(self) -> list[int]:
        """All other ranks of the view."""
        return [rank for rank in self._rules.ranks(self.view.members) if rank != self._rules.rank]

    # What the owner of this rank wants.

    def begin(self, view: View, *, member: bool, closed: str) -> None:
        """Start in ``view``, or only observe it until `enter` if this rank is not a ``member``."""
        self.view, self.closed_to_joiners = view, closed
        if member:
            self._first = view
            self._open((), frozenset())
        self._outbox.queue.append(ViewBegan())

    def enter(self, following: NextView, connections: Mapping[int, int]) -> None:
        """Become a member of a view that the others agreed on. Ranks that were lost before are lost in this view.

        Args:
            following: the view.
            connections: rank -> its connection when the welcome came; another process may have taken its place since.
        """
        assert following.view is not None
        self.view = following.view
        self.contributions.joined = following.from_step > 1  # at step 1 everybody has the initial state
        self.contributions.from_step, self.contributions.step = following.from_step, following.from_step - 1
        self._roster.remember(connections)
        self._open((), following.void)
        self._outbox.queue.append(ViewBegan(following))

    def leave(self, step: int) -> None:
        """Leave for good after inner step ``step``, with all ranks of this replica; rounds in flight end here."""
        if self.failure is None:
            commits = self.contributions.rounds.freeze().commits if self.contributions.rounds is not None else {}
            self._outbox.send(self.others(), Leaving(step, commits).to_message(self.view.id))
            # the others hang up once they have heard it
            self.close(TransportError(f"replica {self._rules.replica} left after step {step}; it takes part no more."))

    def close(self, failure: TransportError) -> None:
        """Take part in no more rounds; those in flight end with ``failure``."""
        self._ending.end()
        self.contributions.close(failure)
        self._outbox.actions.append(CloseLinks(self.view))

    # What members say.

    def hear_change(self, sender: int, view_id: int, said: ChangeReport) -> None:
        """A member says that a view ends."""
        if self._last is not None and view_id == self._last.previous.id:
            self._outbox.send([sender], adopted(self._last))  # it is still in the view that has ended here
        elif view_id == self.view.id and said.report.step > self.contributions.furthest_step:
            words = f"replica {self._rules.replica_of(sender)} says that it is at step {said.report.step}"
            self.give_up(sender, f"{words}, while others can't be past {self.contributions.furthest_step}")
        elif view_id == self.view.id:
            self._follow(self._ending.absorb(said))

    def hear_adopted(self, sender: int, following: NextView) -> None:
        """A member has adopted what follows the present view.

        That others go on or stop without this rank, as many must say as `hear_parting` asks for.
        """
        change, rounds = self._ending.known, self.contributions.rounds
        if change is None or rounds is None:
            return
        if following.view is not None and self._rules.replica in following.view.members:
            near = following.from_step - 1 <= self.contributions.furthest_step
            if near and could_follow(following, change.mine):
                self._adopt(following)
        elif self._has_support(sender):
            self._adopt(following)

    def hear_parting(self, sender: int, reason: str) -> None:
        """A member goes on, or stops, without this replica; counts once more say so than could lie, or all that are
        heard."""
        if self._has_support(sender):
            self.exclude(reason)

    def _has_support(self, sender: int) -> bool:
        self._parted.add(self._rules.replica_of(sender))
        here = {*self.view.members} - {self._rules.replica} - self._roster.unreached(self.view)
        return len(self._parted) >= more_than_could_lie(len(self.view.members)) or here <= self._parted

    def hear_leaving(self, sender: int, said: Leaving) -> None:
        """A member leaves of its own accord."""
        replica = self._rules.replica_of(sender)
        if replica == self._rules.replica:
            self.leave(said.step)  # and say so, in case my connections end before its message arrives
        else:
            words, left = f"replica {replica} left after step {said.step}", frozenset({(replica, said.step)})
            self._follow(self._ending.extend(words, left=left, left_commits=said.left_commits))

    def tell_late(self, rank: int) -> None:
        """A rank speaks of a view that is over for all others: it was lost while it began, and could not be told."""
        reason = self.contributions.reason
        self._outbox.send([rank], {"kind": "excluded", "view": self.view.id, "reason": reason})

    def exclude(self, reason: str) -> None:
        """The others go on, or stop, without this replica."""
        self._stop(left_out(self._rules.replica, reason, self._policies))

    # Who comes and who goes: each is a reason for the present view to end.

    def ask_to_join(self, rank: int, connected: frozenset[int]) -> None:
        """A rank asks to join. Its replica joins once all of its ranks have asked.

        Args:
            rank: the one that asks.
            connected: ranks that it is connected to. If a member is missing, it is asked to try again.
        """
        replica = self._rules.replica_of(rank)
        if self._roster.is_connected(rank):
            if self.view is not self._first:
                return  # it has joined already: another member heard it first
            self._roster.disown(rank)  # started again before this view began
        if self.closed_to_joiners or self.failure is not None or not self.is_member:
            why = self.closed_to_joiners or str(self.failure or "this replica is joining itself")
            refused = {"kind": "refused", "reason": why, "for_good": self.failure is not None}
            self._outbox.send([rank], refused)
        elif not connected.issuperset(self._rules.ranks(each for each in self.view.members if each != replica)):
            self._outbox.send([rank], _AGAIN)
        else:
            self._gone_before.discard(replica)
            asked = self._asked.setdefault(replica, set())
            asked.add(rank)
            if len(asked) == self._rules.ranks_per_replica:
                if replica in self.view.members:  # back before its loss was noticed: lose it first
                    self._follow(self._ending.extend(f"replica {replica} was started again", gone=frozenset({replica})))
                else:
                    self._let_join(replica)

    def lose(self, rank: int, loss: Loss) -> None:
        """The connection to a rank was lost."""
        replica = self._rules.replica_of(rank)
        of_mine = f"rank {rank} of " if replica == self._rules.replica else ""
        self.give_up(rank, f"{of_mine}replica {replica} is lost: {loss.text}", gone=loss.kind == "gone")

    def give_up(self, rank: int, words: str, *, gone: bool = False) -> None:
        """Give up a rank for the reason in ``words``; ``gone``: its process is known to have ended."""
        replica = self._rules.replica_of(rank)
        self._asked.pop(replica, None)
        if not self.is_member and replica != self._rules.replica:
            if gone:
                self._gone_before.add(replica)
            return
        known = replica in self.view.members or self._ending.is_joining(replica)
        if not known or self.failure is not None:
            return
        if replica == self._rules.replica:
            self._stop(f"{words}.")
        else:
            lost = frozenset({replica})
            # report all that are lost at this moment together: one of them alone may look like another's fault
            unheard = lost | self._roster.unreached(self.view)
            self._follow(self._ending.extend(words, unheard=unheard, gone=lost if gone else frozenset()))

    def give_up_late(self, behind: frozenset[int], unheard: frozenset[int], words: str) -> None:
        """Replicas keep a round waiting for too long; those ``behind`` still send something."""
        if unheard or enough_without(self.view, behind, self._policies.quorum):
            self._follow(self._ending.extend(words, behind=behind, unheard=unheard))

    def give_up_owing(self, behind: frozenset[int], unheard: frozenset[int], words: str) -> None:
        """Replicas have not voted for too long; the view ends also where it can't go on without them."""
        self._follow(self._ending.extend(words, behind=behind, unheard=unheard))

    def give_up_unlinked(self, replicas: Sequence[int], reason: str) -> None:
        """Payload connections to some replicas could not be made."""
        words = f"replica {replicas[0]} has no payload connection to replica {self._rules.replica}: {reason}"
        self._follow(self._ending.extend(words, unheard=frozenset(replicas)))

    def renew_soon(self, words: str) -> None:
        """A payload connection has broken, as ``words`` say: let the same members form a new view soon."""
        if words and not self._broken and self._ending.known is None and self.failure is None:
            self._broken = words
            self._outbox.actions.append(SetTimer(Timer("renew", self.view.id), _RENEW_S))

    def renew(self, view_id: int) -> None:
        """Form a new view, unless the one with the broken payload connection is over."""
        if view_id == self.view.id and self._ending.known is None:
            self._follow(self._ending.extend(self._broken))

    def settle(self, view_id: int) -> None:
        """A change of views takes long: wait for no answers first, then give up those who keep it from its end."""
        if view_id == self.view.id and self._ending.hurry():
            self._outbox.actions.append(SetTimer(Timer("settle", view_id), self._rules.settle_s / 2))
        elif view_id == self.view.id and (blamed := self._ending.blame()):
            words = f"{'replicas' if len(blamed) > 1 else 'replica'} {', '.join(map(str, sorted(blamed)))}"
            why = f"{words} did not agree on the next view within {self._rules.settle_s:g} s"
            self._outbox.actions.append(SetTimer(Timer("settle", view_id), self._rules.settle_s))
            self._follow(self._ending.extend(why, unheard=blamed))

    def go_on(self, began: ViewBegan) -> None:
        """A view has begun: deal with members that can't be reached, and with replicas that ask to join."""
        following, mine, unheard = began.following, began.mine, self._roster.unreached(self.view)
        if following is None or mine is None:
            if unheard:
                gone = unheard & (self._gone_before | self._roster.replaced(unheard))
                words = (
                    f"replica {self._rules.replica} can't reach all that it {'joins' if following else 'begins with'}"
                )
                self._follow(self._ending.extend(words, unheard=unheard, gone=gone))
            return
        if self.view is following.view:
            self._lose_again(mine, unheard)
        complete = [replica for replica, asked in self._asked.items() if len(asked) == self._rules.ranks_per_replica]
        for replica in dict.fromkeys(each for each in (*complete, *mine.joining) if each not in self.view.members):
            if following.joined or replica in mine.joining:  # it may not be connected to the one that has just joined
                self._asked.pop(replica, None)
                self._outbox.send(self._rules.ranks((replica,)), _AGAIN)
            else:
                self._let_join(replica)

    def _let_join(self, replica: int) -> None:
        self._asked.pop(replica, None)
        self._follow(self._ending.extend(f"replica {replica} wants to join", joining=frozenset({replica})))

    def _lose_again(self, mine: Report, unheard: frozenset[int]) -> None:
        """Lose members that were lost before this view was agreed on: no connection is left whose end would tell."""
        me, members = self._rules.replica, frozenset(self.view.members)
        left = frozenset(each for each in mine.left if each[0] in members)
        gone = mine.gone & members
        unheard |= frozenset(other for one, other in mine.unheard if one == me) & members
        if gone | unheard:
            words = f"replica {me} can't reach all of the next view"
            commits = mine.left_commits if left else frozenset()
            self._follow(self._ending.extend(words, unheard=unheard, gone=gone, left=left, left_commits=commits))

    def _follow(self, following: NextView | None) -> None:
        """Adopt the next view, if it is known by now."""
        if following is not None:
            self._adopt(following)

    def _adopt(self, following: NextView) -> None:
        change, rounds = self._ending.known, self.contributions.rounds
        assert change is not None
        assert rounds is not None
        me, members = self._rules.replica, following.previous.members
        if following.view is not None and me not in following.view.members:
            self.exclude(following.reason)
            return
        self._ending.end()
        staying: Collection[int] = change.staying
        if following.view is not None:
            staying = following.view.members
        elif change.is_left_out:
            heard = (m for m in members if all(map(self._roster.is_connected, self._rules.ranks((m,)))))
            staying = {me, *heard}
        lost = [member for member in members if member not in staying]
        self._last, failure = following, stopped(following, lost, change.why, self._policies)
        self.contributions.failure = failure
        self.contributions.reason = reason = change.why if failure else f"{change.why}; {following.reason}"
        carried = rounds.end(following, reason, failure)
        self._outbox.actions.append(CloseLinks(following.previous))
        self._part_from(lost, following)
        joined: tuple[int, ...] = ()
        if following.view is not None:
            self.view, joined = following.view, self._rules.ranks(following.joined)
            # lost after the view was agreed on, so they may not know of it
            self._outbox.send(self._rules.ranks(m for m in staying if m not in change.staying), adopted(following))
        welcome = adopted(following) | {"kind": "welcome"}
        self._outbox.actions.append(Adopt(following, reason, joined, welcome))
        if following.joined:
            self.contributions.from_step = following.from_step
        self._open(carried, following.void)
        self._outbox.queue.append(ViewBegan(following, change.mine))

    def _open(self, carried: Sequence[HandedIn], void: Rounds) -> None:
        """Open the present view with the rounds that are carried over; ``void`` ones are not."""
        self._roster.form(self.view)
        self._parted.clear()
        self._broken = ""
        if self.failure is None:
            self._outbox.actions.append(OpenLinks(self.view))
        self.contributions.open(self.view, carried, void)

    def _stop(self, why: str) -> None:
        words = f"{why} It takes part in no more rounds; what it has not shared is in its own parameters."
        self.close(ReplicaLostError(words, replicas=[self._rules.replica]))
        for rank in self.others():
            self._hang_up(rank)

    def _part_from(self, lost: Sequence[int], following: NextView) -> None:
        excluded = {"kind": "excluded", "view": following.previous.id, "reason": self.contributions.reason}
        left = dict(following.left)
        for rank in self._rules.ranks(lost):
            if self._roster.is_connected(rank):
                if following.view is not None and self._rules.replica_of(rank) not in left:  # else it knows
                    self._outbox.send([rank], excluded)
                self._hang_up(rank)
            self._roster.forget(rank)

    def _hang_up(self, rank: int) -> None:
        if rank in self._roster.connections:
            self._roster.disconnect(rank)
            self._outbox.actions.append(HangUp(rank))
