"""Views as they follow one another: why the present one ends, agreeing on the next one, and handing over the rounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from diloco.errors import ReplicaLostError, TransportError
from diloco.membership.change import NextView, Report, Rounds
from diloco.membership.quorum import enough_without
from diloco.membership.view import View
from diloco.protocol.actions import Adopt, CloseLinks, HangUp, OpenLinks, SetTimer, Timer
from diloco.protocol.contributions import Contributions
from diloco.protocol.events import HandedIn, Outbox, ViewBegan
from diloco.protocol.failure_detector import Loss
from diloco.protocol.messages import ChangeReport, Leaving, adopted
from diloco.protocol.roster import Roster
from diloco.protocol.rules import Policies, Rules, left_out, stopped
from diloco.protocol.view_change import ViewChange

__all__ = ["ViewManager"]

_RENEW_S = 1.0
_AGAIN = {"kind": "refused", "reason": "the members are changing", "for_good": False}


class ViewManager:
    """The present view, and what is known of its end.

    Args:
        rules: who I am.
        policies: what happens when replicas are lost.
        roster: who is connected.
        outbox: gets what is to be done.

    Attributes:
        view: the present one; for a joiner, without itself.
        closed_to_joiners: why nobody can join for now; "" where all can.
        contributions: takes what this rank gives to rounds.
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
        self._last: NextView | None = None
        self._gone_before: set[int] = set()
        self._broken = ""

    @property
    def failure(self) -> TransportError | None:
        """Why no round takes place any more, or None."""
        return self.contributions.failure

    @property
    def is_member(self) -> bool:
        """Whether this rank is a member of the view, or was when it stopped."""
        return self.contributions.rounds is not None

    @property
    def last_view(self) -> View | None:
        """The newest view that this rank was a member of, or has agreed to be; None: none yet."""
        if not self.is_member:
            return None
        return max((view for view in (self.view, self._ending.agreed) if view is not None), key=lambda view: view.id)

    def others(self) -> list[int]:
        """All other ranks of the view."""
        return [rank for rank in self._rules.ranks(self.view.members) if rank != self._rules.rank]

    # What this rank does of its own accord.

    def begin(self, view: View, *, member: bool, closed: str) -> None:
        """Begin with ``view``; as one that looks on, if this rank is no ``member`` yet."""
        self.view, self.closed_to_joiners = view, closed
        if member:
            self._open((), frozenset())
        self._outbox.queue.append(ViewBegan())

    def enter(self, following: NextView, connections: Mapping[int, int]) -> None:
        """Become a member of a view that was agreed on without me; who was lost before that is lost in it.

        Args:
            following: the view.
            connections: rank -> the connection to it when I was told of the view; another process may have come since.
        """
        assert following.view is not None
        self.view = following.view
        self.contributions.joined = following.from_step > 1  # before it there is no state but the one all begin with
        self.contributions.from_step, self.contributions.step = following.from_step, following.from_step - 1
        self._roster.remember(connections)
        self._open((), following.void)
        self._outbox.queue.append(ViewBegan(following))

    def leave(self, step: int) -> None:
        """Leave for good after inner step ``step``: the others go on, and need not find out. Rounds in flight end here.

        All ranks of a replica leave when one of them does.
        """
        if self.failure is None:
            rounds = self.contributions.rounds
            commits = rounds.freeze()[0] if rounds is not None else {}
            self._outbox.send(self.others(), Leaving(step, commits).to_message(self.view.id))
            # the others hang up when they have heard it
            self.close(TransportError(f"replica {self._rules.replica} left after step {step}; it takes part no more."))

    def close(self, failure: TransportError) -> None:
        """Take part no more; who waits gets ``failure``."""
        self._ending.known = None
        self.contributions.close(failure)
        self._outbox.actions.append(CloseLinks(self.view))

    # What members say.

    def hear_change(self, sender: int, view_id: int, said: ChangeReport) -> None:
        """A member says that a view ends."""
        if view_id == self.view.id:
            self._follow(self._ending.absorb(said))
        elif self._last is not None and view_id == self._last.previous.id:
            self._outbox.send([sender], adopted(self._last))  # it asks about a view that I have left behind

    def hear_adopted(self, following: NextView) -> None:
        """A member has adopted what follows the present view."""
        if self._ending.known is not None:
            self._adopt(following)

    def hear_leaving(self, sender: int, said: Leaving) -> None:
        """A member leaves of its own accord."""
        replica = self._rules.replica_of(sender)
        if replica == self._rules.replica:
            self.leave(said.step)  # and say so, lest my connections end before its words have come
        else:
            words, left = f"replica {replica} left after step {said.step}", frozenset({(replica, said.step)})
            self._follow(self._ending.extend(words, left=left, left_commits=said.left_commits))

    def exclude(self, reason: str) -> None:
        """The others go on, or stop, without this replica."""
        self._stop(left_out(self._rules.replica, reason, self._policies))

    # Who comes and who goes: each is a reason for the present view to end.

    def ask_to_join(self, rank: int, connected: frozenset[int]) -> None:
        """A rank asks to be a member; its replica joins when all its ranks have asked.

        Args:
            rank: that asks.
            connected: ranks that it is connected to; without all members it is told to look again.
        """
        replica = self._rules.replica_of(rank)
        if self._roster.is_connected(rank):
            return  # another member heard it first, and all have agreed since
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
                if replica in self.view.members:  # back before anybody noticed its loss; it joins once that is done
                    self._follow(self._ending.extend(f"replica {replica} was started again", gone=frozenset({replica})))
                else:
                    self._let_join(replica)

    def lose(self, rank: int, loss: Loss) -> None:
        """A rank can't be reached any more."""
        replica = self._rules.replica_of(rank)
        of_mine = f"rank {rank} of " if replica == self._rules.replica else ""
        self.give_up(rank, f"{of_mine}replica {replica} is lost: {loss.text}", gone=loss.kind == "gone")

    def give_up(self, rank: int, words: str, *, gone: bool = False) -> None:
        """A rank is no use any more, for the reason in ``words``; ``gone``: its process is known to have ended."""
        replica = self._rules.replica_of(rank)
        self._asked.pop(replica, None)
        if not self.is_member and replica != self._rules.replica:  # I have no say yet
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
            # all that are lost in this moment are told of at once: half of it may look like another one's fault
            unheard = lost | self._roster.unreached(self.view)
            self._follow(self._ending.extend(words, unheard=unheard, gone=lost if gone else frozenset()))

    def give_up_late(self, behind: frozenset[int], unheard: frozenset[int], words: str) -> None:
        """Replicas keep a round waiting for too long, and of others nothing is heard at all."""
        if unheard or enough_without(self.view, behind, self._policies.quorum):
            self._follow(self._ending.extend(words, behind=behind, unheard=unheard))

    def give_up_unlinked(self, replicas: Sequence[int], reason: str) -> None:
        """No payload connection came to be to some replicas."""
        words = f"replica {replicas[0]} has no payload connection to replica {self._rules.replica}: {reason}"
        self._follow(self._ending.extend(words, unheard=frozenset(replicas)))

    def renew_soon(self, words: str) -> None:
        """A payload connection ended while the control connections stand: the same members connect anew."""
        if words and not self._broken and self._ending.known is None and self.failure is None:
            self._broken = words
            self._outbox.actions.append(SetTimer(Timer("renew", self.view.id), _RENEW_S))

    def renew(self, view_id: int) -> None:
        """Form the view anew, if it is still the one whose payload connection has ended."""
        if view_id == self.view.id and self._ending.known is None:
            self._follow(self._ending.extend(self._broken))

    def go_on(self, began: ViewBegan) -> None:
        """A view has begun, and maybe one after it: see to those who could not be reached, and to those who ask."""
        me, following, mine = self._rules.replica, began.following, began.mine
        if following is None:
            return
        unheard = self._roster.unreached(self.view)
        if mine is None:
            if unheard:
                gone = unheard & (self._gone_before | self._roster.replaced(unheard))
                self._follow(
                    self._ending.extend(f"replica {me} can't reach all that it joins", unheard=unheard, gone=gone)
                )
            return
        if self.view is following.view:
            self._lose_again(mine, unheard)
        complete = [replica for replica, asked in self._asked.items() if len(asked) == self._rules.ranks_per_replica]
        for replica in dict.fromkeys(each for each in (*complete, *mine.joining) if each not in self.view.members):
            if following.joined or replica in mine.joining:  # it may have no connection to who has just joined
                self._asked.pop(replica, None)
                self._outbox.send(self._rules.ranks((replica,)), _AGAIN)
            else:
                self._let_join(replica)

    def _let_join(self, replica: int) -> None:
        self._asked.pop(replica, None)
        self._follow(self._ending.extend(f"replica {replica} wants to join", joining=frozenset({replica})))

    def _lose_again(self, mine: Report, unheard: frozenset[int]) -> None:
        """Those whom the others agreed on before they heard of their loss; no connection is left that would tell."""
        me, members = self._rules.replica, frozenset(self.view.members)
        left = frozenset(each for each in mine.left if each[0] in members)
        gone = mine.gone & members
        unheard |= frozenset(other for one, other in mine.unheard if one == me) & members
        if gone | unheard:
            words = f"replica {me} can't reach all of the next view"
            commits = mine.left_commits if left else frozenset()
            self._follow(self._ending.extend(words, unheard=unheard, gone=gone, left=left, left_commits=commits))

    # The next view.

    def _follow(self, following: NextView | None) -> None:
        """Adopt what follows the present view, if that is known by now."""
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
        self._ending.known = None
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
            # it was agreed on before they were lost, and they may not know
            self._outbox.send(self._rules.ranks(m for m in staying if m not in change.staying), adopted(following))
        welcome = adopted(following) | {"kind": "welcome"}
        self._outbox.actions.append(Adopt(following, reason, joined, welcome))
        if following.joined:
            self.contributions.from_step = following.from_step
        self._open(carried, following.void)
        self._outbox.queue.append(ViewBegan(following, change.mine))

    def _open(self, carried: Sequence[HandedIn], void: Rounds) -> None:
        """Begin with the present view, and with rounds that go on in it; ``void`` ones don't."""
        self._roster.form(self.view)
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
            knows = following.view is None or self._rules.replica_of(rank) in left  # or it is the larger side
            if self._roster.is_connected(rank):
                if not knows:
                    self._outbox.send([rank], excluded)
                self._hang_up(rank)
            self._roster.forget(rank)

    def _hang_up(self, rank: int) -> None:
        if rank in self._roster.connections:
            self._roster.disconnect(rank)
            self._outbox.actions.append(HangUp(rank))
