"""Each rule of a view change has a network in which leaving it out makes two histories, or ends an honest member."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any

import pytest

from diloco.membership import Policy, Report, View, next_view
from diloco.protocol import (
    Accept,
    Change,
    Message,
    Propose,
    RoundVote,
    ViewChange,
    Views,
    WireMessage,
    decode,
    digest_of,
    encode,
)
from tests.protocol.histories import outcome
from tests.protocol.network import Limits, Network
from tests.protocol.simulated import LATE_S, begin, simulated

Patch = Callable[[pytest.MonkeyPatch], None]


def no_promise(patch: pytest.MonkeyPatch) -> None:
    """A report binds nobody: its sender still accepts what an earlier ballot proposes."""
    report, receive = ViewChange.receive_report, ViewChange.receive

    def raises(self: ViewChange, sender: int, message: Any) -> None:
        if isinstance(message, Propose) and message.ballot > self.mine.ballot:
            self._raise(message.ballot)
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
    patch.setattr(ViewChange, "_standing", lambda self, reports: None)
    patch.setattr(ViewChange, "_may_switch", lambda self, accepted: True)


def enough_accept(patch: pytest.MonkeyPatch) -> None:
    """A new proposal is adopted once a quorum has accepted it, and not all that stay."""
    chosen = ViewChange._chosen

    def without_reports(self: ViewChange) -> Any:
        proposal = self._proposal
        if proposal is not None:
            self._proposal = type(proposal)(proposal.ballot, proposal.following, {})
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
        extend(self, gone=gone, **more)

    patch.setattr(ViewChange, "extend", later)


def no_guard(patch: pytest.MonkeyPatch) -> None:
    """Others join right after a member was lost by silence."""
    patch.setattr(Views, "_is_estranged", lambda self, replica: False)


def two_digests(patch: pytest.MonkeyPatch) -> None:
    """What others have accepted in the same ballot is no reason to wait."""
    receive = ViewChange.receive

    def alike(self: ViewChange, sender: int, message: Any) -> None:
        if isinstance(message, Propose) or (self._proposal is not None and message.digest == self._digest):
            receive(self, sender, message)

    patch.setattr(ViewChange, "receive", alike)
    patch.setattr(ViewChange, "_misses_proposals", lambda self, rank: True)


def unchecked(patch: pytest.MonkeyPatch) -> None:
    """Who stays does not compute again what is proposed."""
    patch.setattr(ViewChange, "_is_computed", lambda self, proposal: True)


def anyone_says_late(patch: pytest.MonkeyPatch) -> None:
    """Who is late for one member is late for all."""

    def amplified(view: View, reports: Any, *more: Any) -> Any:
        late = frozenset().union(*(each.behind for each in reports))
        return next_view(view, [replace(each, behind=late) for each in reports], *more)

    patch.setattr(sys.modules[ViewChange.__module__], "next_view", amplified)


def anyone_goes(patch: pytest.MonkeyPatch) -> None:
    """A member may be left out that nobody accuses."""

    def accusing(view: View, reports: Any, staying: Any, *more: Any) -> Any:
        lost = frozenset(view.members).difference(staying)
        return next_view(view, [replace(each, apart=each.apart | lost) for each in reports], staying, *more)

    patch.setattr(sys.modules[ViewChange.__module__], "next_view", accusing)


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


def end_view(scene: Scene) -> None:
    """Let members 1 to 4 end the view; 0 says nothing but what the test sends."""
    scene.network[0].lie = lambda receiver, message: []
    for each in (1, 2, 3, 4):
        scene.network[each].machine.views.end("it begins")


def lie(scene: Scene, mine: Report, staying: Sequence[int] = range(5), accused: str = "", **changes: Any) -> Scene:
    """Member 0 reports ``mine``, and proposes and accepts what follows from that and the others' reports, changed.

    It pretends that all have ``accused`` member 1.
    """
    network = scene.network
    reports = [mine, *(network[each].machine.views.change.mine for each in staying[1:])]
    accusing = [replace(each, **{accused: frozenset({1})}) if accused else each for each in reports]
    following = next_view(View.of(5), accusing, staying, Policy())
    assert following is not None
    following = replace(following, **changes)
    digests = {each.rank: digest_of(each.content) for each in reports}
    for receiver in set(staying) - {0} | ({1} if accused else set()):
        for message in (Change(mine, ""), Propose(0, following, digests), Accept(0, 0, digest_of(following))):
            network.send(0, receiver, encode(message))
    return scene


def two_proposals() -> Scene:
    """The proposer lies: it proposes to two members that they continue with it alone, and to two others the same."""
    scene = Scene()
    end_view(scene)
    others = frozenset(range(1, 5))
    told = {side: Report(0, 0, apart=others.difference(side), number=1) for side in ((1, 2), (3, 4))}
    for side, mine in told.items():
        for receiver in side:
            scene.network.send(0, receiver, encode(Change(mine, "a lie")))
    scene.spread(Change)
    for side, mine in told.items():
        lie(scene, mine, (0, *side))
    return scene


def false_commit() -> Scene:
    """The proposer lies: it proposes to all that a round is committed for which only some have voted."""
    scene = Scene()
    while not (votes := scene.network[1].sent_of(RoundVote)):
        assert scene.network[1].act()
    end_view(scene)
    scene.network.liar = 0
    return lie(scene, Report(0, 0, number=1), commits={votes[0].round: (votes[0].digest,)}, void=frozenset())


def one_is_left_out(*, late: bool) -> Scene:
    """The proposer lies: it leaves out member 1, which it alone says is late, or nobody accuses."""
    scene = Scene()
    end_view(scene)
    scene.network.liar = 0
    mine = Report(0, 0, behind=frozenset({1} if late else ()), number=1)
    return lie(scene, mine, (0, 2, 3, 4), "behind" if late else "apart")


def ending(network: Network) -> str:
    """Return how a run ends for those that have not ended."""
    network.nodes = {number: node for number, node in network.nodes.items() if number in network.alive}
    how = outcome(network)
    honest = [network[each] for each in sorted(network.alive - {network.liar})]
    is_out = network.liar is not None and any(node.left for node in honest)
    return "an honest member is out" if is_out and how in ("one", "none") else how


@pytest.mark.parametrize(
    ("scene", "without", "wrong"),
    [
        (late_proposal, no_promise, "two values"),
        (partial(proposer_is_cut_off, 1, 2, 3), nothing_stands, "two values"),
        (partial(proposer_is_cut_off, 1, 2), enough_accept, "two values"),
        (proposer_is_cut_off, no_quorum, "two values"),
        (ended_after_silence, silence_ends, "two histories"),
        (joined_after_silence, no_guard, "two histories"),
        (two_proposals, two_digests, "two values"),
        (false_commit, unchecked, "a round is applied by some"),
        (partial(one_is_left_out, late=True), anyone_says_late, "an honest member is out"),
        (partial(one_is_left_out, late=False), anyone_goes, "an honest member is out"),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_no_rule_can_be_left_out(
    scene: Callable[[], Scene], without: Patch, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ending(scene().network) in ("one", "none")
    without(monkeypatch)
    assert ending(scene().network) == wrong
