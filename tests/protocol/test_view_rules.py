"""Each rule of a view change has a network in which leaving it out makes two histories."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any

import pytest

from diloco.protocol import (
    Accept,
    Adopted,
    Change,
    Entry,
    Join,
    Message,
    Propose,
    ViewChange,
    Views,
    WireMessage,
    decode,
)
from tests.protocol.histories import outcome
from tests.protocol.network import Limits, Network
from tests.protocol.simulated import LATE_S, RULES, begin, finish, simulated

Patch = Callable[[pytest.MonkeyPatch], None]


def no_promise(patch: pytest.MonkeyPatch) -> None:
    """A report binds nobody: its sender still accepts what an earlier ballot proposes."""
    report, receive = ViewChange.receive_report, ViewChange.receive

    def raises(self: ViewChange, sender: int, message: Any) -> None:
        if isinstance(message, Propose) and message.ballot > self.mine.ballot:
            self._promise(message.ballot)
        receive(self, sender, message)

    def current(self: ViewChange) -> Any:
        return {
            rank: each
            for rank, each in self._reports.last.items()
            if self._rules.replica_of(rank) not in self.mine.lost
        }

    patch.setattr(ViewChange, "receive_report", lambda self, each: report(self, replace(each, ballot=0)))
    patch.setattr(ViewChange, "receive", raises)
    patch.setattr(ViewChange, "_current_reports", current)


def nothing_stands(patch: pytest.MonkeyPatch) -> None:
    """A proposer does not take over what somebody may have adopted."""
    patch.setattr(ViewChange, "_value_to_keep", lambda self, reports: None)


def enough_accept(patch: pytest.MonkeyPatch) -> None:
    """A new proposal is adopted once a quorum has accepted it, and not all that stay."""
    chosen = ViewChange._chosen

    def without_reports(self: ViewChange) -> Any:
        proposal = self._proposal
        if proposal is not None:
            self._proposal = type(proposal)(proposal.ballot, proposal.following, again=True)
        following = chosen(self)
        self._proposal = proposal
        return following

    patch.setattr(ViewChange, "_chosen", without_reports)


def no_quorum(patch: pytest.MonkeyPatch) -> None:
    """What is proposed again is adopted by any number of members."""
    patch.setattr(ViewChange, "_refusal", lambda self, lost, joining: "")


def silence_ends(patch: pytest.MonkeyPatch) -> None:
    """Who was silent counts as ended once its end is seen."""
    extend = ViewChange.extend

    def later(self: ViewChange, *, gone: Any = (), **more: Any) -> None:
        self.mine = replace(self.mine, apart=self.mine.apart.difference(gone))
        self._were_apart.clear()
        extend(self, gone=gone, **more)

    patch.setattr(ViewChange, "extend", later)


def no_guard(patch: pytest.MonkeyPatch) -> None:
    """Others join right after a member was lost by silence."""
    patch.setattr(Views, "_is_guarded", lambda self, replica: False)


# Networks.


class Scene:
    """A network in which the test says what happens, of five members and a rank that may join."""

    def __init__(self) -> None:
        self.network = network = simulated(5, Limits(cuts=99, deaf=99, ends=99, returns=1), strangers=1)
        network.end(5)
        begin(network, *range(5))

    def cut(self, one: int, *others: int, lost: bool = False) -> None:
        """Cut links, of which both ends learn; what is in transit gets lost, or still arrives before."""
        for other in others:
            self.network.happen("cuts", one, other, 0)
            for pair in ((one, other), (other, one)):
                if lost:
                    self.network.on_the_way[pair].clear()

    def notice(self, one: int, *others: int) -> None:
        for other in others:
            self.network.happen("notice", one, other, 0)

    def spread(self, *kinds: type, between: Iterable[int] = range(5)) -> None:
        """Deliver all that is sent between these ranks up to the first message of another kind on each link."""
        network, is_moving = self.network, True
        while is_moving:
            is_moving = False
            for pair in permutations(between, 2):
                waiting = network.on_the_way[pair]
                if network.can("deliver", *pair) and isinstance(decode(waiting[0], Message), kinds):
                    network.happen("deliver", *pair, 0)
                    is_moving = True

    def give(self, sender: int, *receivers: int) -> None:
        """Deliver all that is in transit from one rank to others."""
        for receiver in receivers:
            while self.network.can("deliver", sender, receiver):
                self.network.happen("deliver", sender, receiver, 0)

    def leave_out(self, staying: Iterable[int], *others: int) -> None:
        """Let these members agree on the next view, of which the others hear nothing."""
        self.spread(Change, Propose, Accept, between=staying)
        assert {self.network[each].view.members for each in staying} == {tuple(staying)}
        for pair in product(staying, others):
            self.network.on_the_way[pair].clear()

    def join(self, members: Iterable[int], *others: int) -> None:
        """Let a replica ask these members to join, which is not connected to the others."""
        self.network.happen("returns", 5, 0, 0)
        for other in others:
            self.network.hang_up(other, 5)
            self.network.hang_up(5, other)
        for _ in range(40):
            for each in (*members, 5):
                self.network[each].act()
            self.spread(WireMessage, between=(*members, 5))


def late_proposal() -> Scene:
    """A proposal reaches two of those that stay after they have reported the next ballot."""
    scene = Scene()
    scene.cut(0, 1)
    scene.notice(0, 1)
    scene.notice(1, 0)
    scene.spread(Change)
    scene.give(0, 2)  # its proposal, without 1; 2 accepts it
    scene.cut(0, 2)
    scene.notice(2, 0)
    scene.give(2, 1)
    scene.network[1].now_s += LATE_S  # a turn
    scene.network[1].fire(of_round=False)
    scene.spread(Change, Accept, between=(1, 2, 3, 4))
    scene.give(0, 3, 4)
    scene.cut(0, 3, 4)
    for each in (2, 3, 4):
        scene.give(each, 0)
    return scene


def proposer_is_cut_off(*hear_the_proposal: int) -> Scene:
    """Some of those that stay have accepted a proposal, and its proposer knows it, when it is cut off.

    If 1, 2 and 3 have, the proposer adopts it, and nobody else hears of that.
    """
    scene = Scene()
    scene.cut(0, 4)
    scene.notice(0, 4)
    scene.notice(4, 0)
    scene.spread(Change)
    scene.give(0, *hear_the_proposal)
    for each in hear_the_proposal:
        scene.give(each, 0)
    scene.cut(0, 1, 2, 3, lost=True)
    for each in (1, 2, 3):
        scene.notice(each, 0)
    return scene


def ended_after_silence() -> Scene:
    """Two don't hear two others, which continue with the fifth and a joiner. All three end, and the two see that."""
    scene = Scene()
    for one in (0, 1):
        scene.cut(one, 3, 4)
        for other in (3, 4):
            scene.notice(one, other)
            scene.notice(other, one)
    scene.spread(Change)
    scene.leave_out((0, 1, 2), 3, 4)
    for each in (0, 1, 2):
        scene.network[each].now_s += 10 * LATE_S
    scene.join((0, 1, 2), 3, 4)
    assert scene.network[5].view.members == (0, 1, 2, 5)
    for each in (0, 1, 2):
        scene.network.happen("ends", each, 0, 0)
    for other in (3, 4):
        for each in (0, 1):
            scene.network[other].lose(each, gone=True)
    return scene


def joined_after_silence() -> Scene:
    """Four don't hear the fifth, which hears them. A replica asks to join, the four end, and the others see that."""
    scene = Scene()
    for each in range(4):
        scene.network.happen("deaf", each, 4, 0)
        scene.notice(each, 4)
    scene.leave_out(range(4), 4)
    scene.join(range(4), 4)
    for each in range(4):
        scene.network.happen("ends", each, 0, 0)
    return scene


def ending(network: Network) -> str:
    """Return how a run ends for those that have not ended."""
    network.nodes = {number: node for number, node in network.nodes.items() if number in network.alive}
    return outcome(network)


@pytest.mark.parametrize(
    ("scene", "without", "wrong"),
    [
        (late_proposal, no_promise, "two values"),
        (partial(proposer_is_cut_off, 1, 2, 3), nothing_stands, "two values"),
        (partial(proposer_is_cut_off, 1, 2), enough_accept, "two values"),
        (proposer_is_cut_off, no_quorum, "two values"),
        (ended_after_silence, silence_ends, "two histories"),
        (joined_after_silence, no_guard, "two histories"),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_no_rule_can_be_left_out(
    scene: Callable[[], Scene], without: Patch, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ending(scene().network) in ("one", "waits", "none")
    without(monkeypatch)
    assert ending(scene().network) == wrong


def test_a_view_that_only_newcomers_made_large_enough_is_kept() -> None:
    """Of three, two agree with newcomers to go on, and only one of them adopts it; others come to the other two."""
    network = simulated(3, Limits(cuts=9, heals=1), replace(RULES, min_replicas=4), strangers=4)

    def cut(one: int, other: int) -> None:
        network.happen("cuts", one, other, 0)
        for pair in ((one, other), (other, one)):
            network.on_the_way[pair].clear()
            network.happen("notice", *pair, 0)

    def join(*newcomers: int, at: tuple[int, int]) -> None:
        for newcomer, member in product(newcomers, at):
            network[member].hear(newcomer, Join(Entry(newcomer, f"simulated:{newcomer}"), (*at, *newcomers)))

    def deliver(one: int, other: int) -> None:
        """Deliver what two send each other until the first adopts the next view, which the second does not hear."""
        while not network[one].changes and (network.can("deliver", one, other) or network.can("deliver", other, one)):
            for pair in ((one, other), (other, one)):
                while network.can("deliver", *pair) and not (
                    pair == (one, other) and isinstance(decode(network.on_the_way[pair][0], Message), Accept | Adopted)
                ):
                    network.happen("deliver", *pair, 0)

    begin(network, 0, 1, 2)
    cut(0, 2)
    cut(1, 2)
    finish(network)
    assert network[0].waits == network[1].waits == "2 of at least 4 replicas are left"
    join(3, 4, at=(0, 1))
    while not network[0].changes:
        for number in (0, 1):
            network[number].fire(of_round=False)
        deliver(0, 1)
    assert network[0].view.members == (0, 1, 3, 4)
    assert not network[1].changes
    cut(0, 1)
    cut(1, 3)
    cut(1, 4)
    network.happen("heals", 1, 2, 0)
    assert network.dial(1, 2)
    join(5, 6, at=(1, 2))
    finish(network)
    assert network[1].changes[:1] in ([], network[0].changes[:1])
