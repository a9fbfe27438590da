"""The sequence of views: adopting the next one, what happens to the rounds, and hanging up on lost members."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Unpack

from diloco.errors import ReplicaLostError, TransportError
from diloco.membership import News, NextView, Rounds, View, byzantine_quorum, could_follow
from diloco.protocol.actions import Adopt, CloseLinks, HangUp, OpenLinks
from diloco.protocol.contributions import Contributions
from diloco.protocol.events import Outbox, Submitted, ViewBegan
from diloco.protocol.messages import ChangeReport, Leaving, adopted_message
from diloco.protocol.roster import Roster
from diloco.protocol.rules import Policies, Rules, exclusion_reason, stop_error
from diloco.protocol.view_change import ViewChange

__all__ = ["ViewManager"]


class ViewManager:
    """The current view, and the change to the next one."""

    def __init__(self, rules: Rules, policies: Policies, roster: Roster, outbox: Outbox) -> None:
        self.view = View(-1, (rules.replica,))  # the current view; a joiner is not in it yet
        self.contributions = Contributions(rules, policies, roster.message_counts, outbox)
        self.change = ViewChange(rules, policies, roster, self.contributions, outbox)
        self.first: View | None = None  # the view in which this rank began with all others; None: it joined
        # what ended the previous view, or stopped this rank; None before the first change
        self.adopted_last: NextView | None = None
        self._rules = rules
        self._policies = policies
        self._roster = roster
        self._outbox = outbox
        self._parted: set[int] = set()  # replicas that report that they continue, or stop, without this one

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
        """The newest view that this rank was a member of; None before the first."""
        return self.view if self.is_member else None

    @property
    def agreed_view(self) -> View | None:
        """The view after `last_view` that this rank was ready for, and that others may have adopted; or None."""
        agreed = self.change.agreed
        return agreed if agreed is not None and agreed.id > self.view.id else None

    def others(self) -> list[int]:
        """Return all other ranks of the view."""
        return [rank for rank in self._rules.ranks(self.view.members) if rank != self._rules.rank]

    # Requests of this rank's owner.

    def begin(self, view: View, *, member: bool) -> None:
        """Start in ``view``, or only observe it until `enter` if this rank is not a ``member``."""
        self.view = view
        if member:
            self.first = view
            self._open((), frozenset())
        self._outbox.queue.append(ViewBegan())

    def enter(self, following: NextView, connections: Mapping[int, int]) -> None:
        """Become a member of a view that the others agreed on. Ranks that were lost earlier are lost in this view.

        Args:
            following: the view.
            connections: rank -> its connection when the welcome was received; another process may have taken its place
                since.
        """
        assert following.view is not None
        self.view = following.view
        self.contributions.joined = following.from_step > 1  # at step 1 all replicas have the initial state
        self.contributions.from_step, self.contributions.step = following.from_step, following.from_step - 1
        self._roster.set_connections(connections)
        self._open((), following.void)
        self._outbox.queue.append(ViewBegan(following))

    def leave(self, step: int) -> None:
        """Leave for good after inner step ``step``, with all ranks of this replica; rounds in flight end here."""
        if self.failure is None:
            commits = self.contributions.rounds.freeze().commits if self.contributions.rounds is not None else {}
            self._outbox.send(self.others(), Leaving(step, commits).to_message(self.view.id))
            # the others hang up once they have received it
            me = self._rules.replica
            self.close(TransportError(f"replica {me} left after step {step} and takes part in no more rounds."))

    def close(self, failure: TransportError) -> None:
        """Take part in no more rounds. Those in flight end with ``failure``."""
        self.change.end()
        self.contributions.close(failure)
        self._outbox.actions.append(CloseLinks(self.view))

    def stop(self, why: str) -> None:
        """Take part in no more rounds for the reason ``why``, and hang up on all others."""
        me = self._rules.replica
        words = f"{why} Replica {me} takes part in no more rounds; work not yet shared stays in its local parameters."
        self.close(ReplicaLostError(words, replicas=[me]))
        for rank in self.others():
            self._hang_up(rank)

    def hang_up_on_others(self) -> None:
        """Hang up on the other replicas."""
        for rank in self.others():
            if self._rules.replica_of(rank) != self._rules.replica:
                self._hang_up(rank)

    # The end of the current view, and messages of members about it.

    def end(self, why: str, **news: Unpack[News]) -> None:
        """End the current view for the reason ``why``; ignored if this rank takes no part in it."""
        self._follow(self.change.extend(why, **news))

    def receive_change(self, received: ChangeReport) -> None:
        """Process a member's report that the current view ends."""
        self._follow(self.change.absorb(received))

    def receive_adopted(self, sender: int, following: NextView) -> None:
        """Process a member's message that it has adopted what follows the current view.

        That the others continue or stop without this rank needs as many reports as in `receive_parting`.
        """
        change, rounds = self.change.known, self.contributions.rounds
        if change is None or rounds is None:
            return
        if following.view is not None and self._rules.replica in following.view.members:
            near = following.from_step - 1 <= self.contributions.greatest_step
            if near and could_follow(following, change.mine):
                self._adopt(following)
        elif self._has_support(sender):
            self._adopt(following)

    def receive_parting(self, sender: int, reason: str) -> None:
        """Process a member's report that it continues, or stops, without this replica.

        The report counts once more than f members (`byzantine_quorum`), or all that are connected, have sent one.
        """
        if self._has_support(sender):
            self.exclude(reason)

    def _has_support(self, sender: int) -> bool:
        self._parted.add(self._rules.replica_of(sender))
        here = {*self.view.members} - {self._rules.replica} - self._roster.unreached(self.view)
        return len(self._parted) >= byzantine_quorum(len(self.view.members)) or here <= self._parted

    def send_excluded(self, rank: int) -> None:
        """Tell a rank of an ended view that it is excluded: it was lost while it began, and could not be told then."""
        reason = self.contributions.reason
        self._outbox.send([rank], {"kind": "excluded", "view": self.view.id, "reason": reason})

    def exclude(self, reason: str) -> None:
        """Stop, as the others continue or stop without this replica."""
        self.stop(exclusion_reason(self._rules.replica, reason, self._policies))

    def _follow(self, following: NextView | None) -> None:
        """Adopt ``following``, if it is known by now."""
        if following is not None:
            self._adopt(following)

    def _adopt(self, following: NextView) -> None:
        change, rounds = self.change.known, self.contributions.rounds
        assert change is not None
        assert rounds is not None
        me, members = self._rules.replica, following.previous.members
        if following.view is not None and me not in following.view.members:
            self.exclude(following.reason)
            return
        self.change.end()
        staying: Collection[int] = change.staying
        if following.view is not None:
            staying = following.view.members
        elif change.is_left_out:
            heard = (m for m in members if all(map(self._roster.is_connected, self._rules.ranks((m,)))))
            staying = {me, *heard}
        lost = [member for member in members if member not in staying]
        self.adopted_last, failure = following, stop_error(following, lost, change.why, self._policies)
        self.contributions.failure = failure
        self.contributions.reason = reason = change.why if failure else f"{change.why}; {following.reason}"
        carried = rounds.end(following, reason, failure)
        self._outbox.actions.append(CloseLinks(following.previous))
        self._disconnect(lost, following)
        joined: tuple[int, ...] = ()
        if following.view is not None:
            self.view, joined = following.view, self._rules.ranks(following.joined)
            # they were lost after the view was agreed on, so they may not know of it
            self._outbox.send(
                self._rules.ranks(m for m in staying if m not in change.staying), adopted_message(following)
            )
        welcome = adopted_message(following) | {"kind": "welcome"}
        self._outbox.actions.append(Adopt(following, reason, joined, welcome))
        if following.joined:
            self.contributions.from_step = following.from_step
        self._open(carried, following.void)
        self._outbox.queue.append(ViewBegan(following, change.mine))

    def _open(self, carried: Sequence[Submitted], void: Rounds) -> None:
        """Open the current view with the rounds that are carried over; ``void`` ones are not."""
        self._roster.set_members(self.view)
        self._parted.clear()
        if self.failure is None:
            self._outbox.actions.append(OpenLinks(self.view))
        self.contributions.open(self.view, carried, void)

    def _disconnect(self, lost: Sequence[int], following: NextView) -> None:
        excluded = {"kind": "excluded", "view": following.previous.id, "reason": self.contributions.reason}
        left = dict(following.left)
        for rank in self._rules.ranks(lost):
            if self._roster.is_connected(rank):
                if following.view is not None and self._rules.replica_of(rank) not in left:  # a replica that left knows
                    self._outbox.send([rank], excluded)
                self._hang_up(rank)
            self._roster.remove(rank)

    def _hang_up(self, rank: int) -> None:
        if rank in self._roster.connections:
            self._roster.disconnect(rank)
            self._outbox.actions.append(HangUp(rank))
