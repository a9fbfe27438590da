"""Views as they follow one another: agreeing on the next one, connecting its members, and handing over the rounds.

Runs in the control thread; connections are made in threads of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.errors import ReplicaLostError, RoundVoidError, TransportError, ViewChangedError
from diloco.membership.change import Change, NextView, Report
from diloco.membership.quorum import Policy
from diloco.membership.view import View
from diloco.transport.peers.data_link import DataLink, LinkRequest, OpenLink
from diloco.transport.peers.mailbox import Mailbox
from diloco.transport.peers.payloads import Postman
from diloco.transport.peers.pending import PeerPending
from diloco.transport.peers.rounds import RoundBook, Rules
from diloco.transport.peers.switchboard import Loss, Switchboard
from diloco.transport.peers.view_messages import adopted, change_message, next_view, report_of

__all__ = ["Policies", "ViewKeeper"]


@dataclass(frozen=True)
class Policies:
    """What happens when replicas are lost, and how links are made.

    Attributes:
        quorum: who may go on.
        go_on: whether survivors go on in a smaller view; else every round from then on is void, or raises.
        raise_on_loss: whether a round that can't take place raises `ReplicaLostError`; else it is void, and the owner
            looks at `ViewKeeper.failure` itself.
        streams: payload connections to each peer.
        connect_timeout_s: the longest that making one may take.
    """

    quorum: Policy
    go_on: bool
    raise_on_loss: bool
    streams: int
    connect_timeout_s: float


@dataclass(frozen=True, eq=False)
class _Waiting:
    contribution: Contribution
    pending: PeerPending
    step: int


class ViewKeeper:
    """The present view and its rounds.

    Args:
        view: the first one; for a joiner, without itself.
        rules: of rounds.
        policies: see there.
        board: control connections.
        postman: of payloads.
        open_link: makes payload connections.
        mailbox: of payload connections being made.
        step: tells the inner step that this rank has begun to synchronise.
        on_change: told of every next view.
    """

    def __init__(
        self,
        view: View,
        rules: Rules,
        policies: Policies,
        board: Switchboard,
        postman: Postman,
        open_link: OpenLink,
        mailbox: Mailbox,
        step: Callable[[], int],
        on_change: Callable[[NextView], None],
    ) -> None:
        self.view = view
        self.failure: TransportError | None = None
        self.joined = False
        self.closed_to_joiners = ""
        self.book: RoundBook | None = None
        self._rules = rules
        self._policies = policies
        self._board = board
        self._postman = postman
        self._open_link = open_link
        self._mailbox = mailbox
        self._step = step
        self._on_change = on_change
        self._from_step = 0
        self._reason = ""
        self._change: Change | None = None
        self._last: NextView | None = None
        self._links: dict[int, DataLink] = {}
        self._waiting: list[_Waiting] = []
        self._early: list[tuple[int, Mapping[str, Any]]] = []
        self._joiners: dict[int, set[int]] = {}
        self._connections: dict[int, object | None] = {}
        self._has_state_of: set[int] = set()
        self._gone_before: set[int] = set()

    # Called by the transport, in the control thread.

    def open(self, view: View, from_step: int) -> None:
        """Begin with ``view``: connect its members, and let rounds from ``from_step`` on take place in it."""
        self.view, self._from_step = view, from_step
        # of the processes that are members, which others of the same ranks may replace
        self._connections = {
            rank: self._connections.get(rank, self._board.connection(rank)) for rank in self._ranks(view.members)
        }
        if self.failure is None:
            links: Future[Mapping[int, DataLink]] = Future()
            self.book = RoundBook(
                view,
                self._rules,
                links=links,
                postman=self._postman,
                tell=self.tell,
                later=self._board.loop.call_later,
                post=self._board.post,
                broken=self._broken,
                confirmed=self._confirmed,
            )
            peers = [member for member in view.members if member != self._rules.replica]
            threading.Thread(
                target=self._connect, args=(view, peers, links, self.book), name="diloco-connect", daemon=True
            ).start()
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self.begin(each.contribution, each.pending, each.step)
        early, self._early = self._early, []
        for sender, message in early:
            self.heard(sender, message)

    def begin(self, contribution: Contribution, pending: PeerPending, step: int) -> None:
        """A contribution sent at inner step ``step``."""
        if self.failure is not None:
            failed = self._failure_of(pending.round)
            pending.resolve(
                failed or RoundVoidError(f"{pending.round} is void: {self.failure}", round=str(pending.round))
            )
        elif self._change is not None or self.book is None:
            self._waiting.append(_Waiting(contribution, pending, step))
        elif step < self._from_step and contribution.round.fragment >= 0:
            why = f"{pending.round} is void: the view changed before it was sent ({self._reason})."
            pending.resolve(ViewChangedError(why, round=str(pending.round)))
        else:
            fragment = contribution.round.fragment
            taking_over = self.joined and fragment >= 0 and fragment not in self._has_state_of
            self.book.begin(contribution, pending, taking_over=taking_over)

    def heard(self, sender: int, message: Mapping[str, Any]) -> None:
        """A message about a view or a round."""
        kind, view_id = message["kind"], int(message["view"])
        if view_id > self.view.id or (self.book is None and kind in ("header", "vote")):
            self._early.append((sender, message))
        elif kind in ("header", "vote"):
            if view_id == self.view.id and self.book is not None:
                self.book.heard(sender, message)
        elif kind == "change" and view_id == self.view.id:
            if self.failure is not None or self._has_lost(sender):
                return  # who is lost for me has no say in who else is
            report = report_of(sender, message)
            if self._change is None:
                self._start(str(message["why"]), lost=report.lost, gone=report.gone, joining=report.joining)
            assert self._change is not None
            if self._change.absorb(report):
                self._announce()
            if self._rules.replica in self._change.mine.lost:
                self.exclude(f"replica {sender // self._rules.ranks_per_replica} says: {message['why']}")
            self._settle()
        elif kind == "change" and self._last is not None and view_id == self._last.previous.id:
            self._board.send(sender, adopted(self._last))  # it asks about a view that I have left behind
        elif kind == "adopted" and view_id == self.view.id and self._change is not None:
            self._adopt(next_view(message, self.view))

    def enter(self, following: NextView) -> None:
        """Become a member of a view that was agreed on without me; who was lost before that is lost in it."""
        assert following.view is not None
        self.joined = True
        self.open(following.view, following.from_step)
        if lost := self._unreached():
            words = f"replica {self._rules.replica} can't reach all that it joins"
            self._extend(words, lost=lost, gone=lost & self._gone_before)

    def lose(self, rank: int, loss: Loss) -> None:
        """A rank can't be reached any more."""
        replica = rank // self._rules.ranks_per_replica
        self._joiners.pop(replica, None)
        if self.book is None and replica != self._rules.replica:  # no member yet, so it has no say
            if loss.kind == "gone":
                self._gone_before.add(replica)
            return
        known = replica in self.view.members or (self._change is not None and replica in self._change.mine.joining)
        if not known or self.failure is not None:
            return
        if replica == self._rules.replica:
            self._leave(
                f"rank {rank} of replica {replica} is lost: {loss.text}. Starting the replica again would work."
            )
            return
        gone = frozenset({replica}) if loss.kind == "gone" else frozenset[int]()
        self._extend(f"replica {replica} is lost: {loss.text}", lost=frozenset({replica}), gone=gone)

    def join(self, rank: int) -> None:
        """A rank that is connected to all members asks to be one; its replica joins when all its ranks have asked."""
        replica, size = rank // self._rules.ranks_per_replica, self._rules.ranks_per_replica
        if self._is_member(rank):
            return  # another member heard it first, and all have agreed since
        if self.closed_to_joiners or self.failure is not None or self.book is None:
            why = self.closed_to_joiners or str(self.failure or "this replica is joining itself")
            self._board.send(rank, {"kind": "refused", "reason": why, "for_good": self.failure is not None})
            return
        self._gone_before.discard(replica)
        asked = self._joiners.setdefault(replica, set())
        asked.add(rank)
        if len(asked) == size:
            del self._joiners[replica]
            if replica in self.view.members:  # back before anybody noticed that it was lost
                self._joiners[replica] = asked
                text = f"replica {replica} was started again"
                self._extend(text, lost=frozenset({replica}), gone=frozenset({replica}))
            else:
                self._extend(f"replica {replica} wants to join", joining=frozenset({replica}))

    def tell(self, message: Mapping[str, Any]) -> None:
        """To all other ranks of the view."""
        for rank in self._ranks(self.view.members):
            if rank != self._rules.rank:
                self._board.send(rank, message)

    def exclude(self, reason: str) -> None:
        """The others go on, or stop, without this replica."""
        went, works = "went on", "Starting it again, so that it joins them,"
        if not self._policies.go_on:
            went, works = "stopped", "Starting all replicas again with --resume"
        self._leave(f"the others {went} without replica {self._rules.replica}: {reason}. {works} would work.")

    def close(self, failure: TransportError) -> None:
        """End everything; who waits gets ``failure``."""
        self.failure = self.failure or failure
        self._change = None
        if self.book is not None:
            self.book.freeze()
            self.book.end({}, str(failure), self._failure_of)
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self.begin(each.contribution, each.pending, each.step)
        self._close_links()

    # What follows from it.

    def _failure_of(self, round_id: RoundId) -> TransportError | None:
        """What a round that can't take place raises; without gradients no step can be finished, so theirs always do."""
        return self.failure if self._policies.raise_on_loss or round_id.fragment < 0 else None

    def _ranks(self, members: tuple[int, ...]) -> list[int]:
        size = self._rules.ranks_per_replica
        return [rank for member in members for rank in range(member * size, (member + 1) * size)]

    def _extend(
        self,
        why: str,
        *,
        lost: frozenset[int] = frozenset(),
        gone: frozenset[int] = frozenset(),
        joining: frozenset[int] = frozenset(),
    ) -> None:
        if self._change is None:
            self._start(why, lost=lost, gone=gone, joining=joining)
        elif self._change.extend(lost=lost, gone=gone, joining=joining):
            self._announce()
        self._settle()

    def _start(self, why: str, *, lost: frozenset[int], gone: frozenset[int], joining: frozenset[int]) -> None:
        commits = self.book.freeze() if self.book is not None else {}
        mine = Report(self._rules.rank, self.view.id, lost, gone, joining, self._step(), commits)
        self._change = Change(mine, self.view, self._rules.ranks_per_replica, self._policies.quorum, why)
        self._announce()

    def _announce(self) -> None:
        assert self._change is not None
        message = change_message(self._change.mine, self._change.why)
        for rank in self._change.survivors:
            if rank != self._rules.rank:
                self._board.send(rank, message)

    def _leave(self, why: str) -> None:
        self.close(
            ReplicaLostError(
                f"{why} It stops here; what it had not shared yet is lost.", replicas=[self._rules.replica]
            )
        )
        for rank in self._ranks(self.view.members):
            self._board.hang_up(rank)

    def _is_member(self, rank: int) -> bool:
        """Whether who is connected as ``rank`` is the process that is a member."""
        return rank in self._connections and self._connections[rank] is self._board.connection(rank)

    def _unreached(self) -> frozenset[int]:
        """Members to whom no control connection stands."""
        ranks, connected = self._ranks, self._board.connected
        return frozenset(
            m for m in self.view.members if m != self._rules.replica and not connected.issuperset(ranks((m,)))
        )

    def _has_lost(self, rank: int) -> bool:
        return self._change is not None and rank // self._rules.ranks_per_replica in self._change.mine.lost

    def _settle(self) -> None:
        outcome = self._change.outcome() if self._change is not None else None
        if outcome is not None:
            self._adopt(outcome)

    def _adopt(self, following: NextView) -> None:
        assert self._change is not None
        change, self._change = self._change, None
        why = change.why
        lost = [
            m
            for m in following.previous.members
            if (m in change.mine.lost if following.view is None else m not in following.view.members)
        ]
        stops = following.view is None or (bool(lost) and not self._policies.go_on)
        self._last, self._reason = following, why if stops else f"{why}; {following.reason}"
        if stops:
            self.failure = ReplicaLostError(
                f"{why}. "
                + (f"{following.reason}, so this side does not go on. " if following.view is None else "")
                + "What was committed stands. Starting all replicas again with --resume would work"
                + (
                    ", and with --on-failure continue the others would have gone on."
                    if following.view is not None
                    else "."
                ),
                replicas=lost,
            )
        if self.book is not None:
            self.book.end(following.commits, self._reason, self._failure_of)
        self._close_links()
        excluded = {"kind": "excluded", "view": following.previous.id, "reason": self._reason}
        for rank in self._ranks(tuple(lost)):
            if self._is_member(rank):
                if following.view is not None:  # the smaller side excludes nobody
                    self._board.send(rank, excluded)
                self._board.hang_up(rank)
            self._connections.pop(rank, None)
        self._mailbox.forget(f"{following.previous.id}/")
        if following.view is not None:
            welcome = adopted(following) | {"kind": "welcome"}
            for rank in self._ranks(following.joined):
                self._board.send(rank, welcome)
            self.view = following.view
        self._on_change(following)  # before `open`, which may adopt the view after this one
        self.open(self.view, following.from_step)
        # Those whom the others agreed on before they heard of it; no connection is left that would tell of it again.
        still = (change.mine.lost & frozenset(self.view.members)) | self._unreached()
        if still and self.failure is None and self.view is following.view:
            words = f"replica {self._rules.replica} can't reach all of the next view"
            self._extend(words, lost=still, gone=change.mine.gone & still)
        for replica in list(self._joiners):  # each may bring the next view, which asks here for the others
            asked = self._joiners.get(replica, ())
            if len(asked) == self._rules.ranks_per_replica and replica not in self.view.members:
                del self._joiners[replica]
                self._extend(f"replica {replica} wants to join", joining=frozenset({replica}))

    def _connect(self, view: View, peers: list[int], links: Future[Mapping[int, DataLink]], book: RoundBook) -> None:
        """In a thread: payload connections to all peers at once."""
        size, me = self._rules.ranks_per_replica, self._rules.replica
        made: dict[int, DataLink] = {}
        failed: dict[int, str] = {}

        def connect(peer: int) -> None:
            rank = peer * size + self._rules.rank % size

            def tell(key: str, value: bytes) -> None:
                self._board.post(self._board.send, rank, {"kind": "store", "key": key}, value)

            low, high = sorted((me, peer))
            try:
                made[peer] = self._open_link(
                    LinkRequest(
                        f"{view.id}/{low}-{high}/{self._rules.rank % size}",
                        rank=rank,
                        first=me < peer,
                        streams=self._policies.streams,
                        timeout_s=self._policies.connect_timeout_s,
                        tell=tell,
                    )
                )
            except TransportError as error:
                failed[peer] = str(error)

        threads = [threading.Thread(target=connect, args=(peer,), daemon=True) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._board.post(self._connected, view, made, failed, links, book)

    def _connected(
        self,
        view: View,
        made: dict[int, DataLink],
        failed: dict[int, str],
        links: Future[Mapping[int, DataLink]],
        book: RoundBook,
    ) -> None:
        if view is not self.view or self.failure is not None:
            for link in made.values():
                link.close()
            links.set_exception(TransportError("the view has ended"))
            return
        self._links = made
        if failed:
            links.set_exception(TransportError("; ".join(failed.values())))
            peer, words = next(iter(failed.items()))
            self._extend(
                f"replica {peer} has no payload connection to replica {self._rules.replica}: {words}",
                lost=frozenset(failed),
            )
        else:
            links.set_result(made)

    def _broken(self, words: str) -> None:
        """A payload connection ended while the control connection stands: the same members connect anew."""
        if self._change is None and self.failure is None:
            self._board.loop.call_later(1.0, self._form_anew, self.view, words)

    def _form_anew(self, view: View, words: str) -> None:
        if self.view is view and self._change is None and self.failure is None:
            self._extend(words)

    def _confirmed(self, fragment: int) -> None:
        self._has_state_of.add(fragment)

    def _close_links(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            link.close()
