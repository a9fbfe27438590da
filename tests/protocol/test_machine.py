"""How a machine treats messages: which ones wait for a view, and on whose behalf a sender may act."""

import contextlib
import gc
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from diloco.algorithm import Contribution, RoundId
from diloco.errors import TransportError
from diloco.events import Site
from diloco.membership import NextView, Report, View
from diloco.protocol import (
    Adopted,
    Announced,
    Announcement,
    Beat,
    Begun,
    Change,
    Closed,
    Connected,
    Disconnected,
    Effects,
    Entry,
    Event,
    Excluded,
    FactsMessage,
    Header,
    Introduce,
    Join,
    Left,
    Machine,
    Message,
    MessageError,
    RankLost,
    Received,
    Refused,
    RoundVote,
    SiteMessage,
    Submitted,
    Welcome,
    decode,
    encode,
    header_of,
)
from tests.protocol.network import Limits, settle
from tests.protocol.simulated import CODEC, NUMEL, PAYLOAD, RULES, assert_nothing, finish, simulated

VIEW = View(3, (0, 1))
ENTRY = Entry(5, "host:5")
VOTE = RoundVote(3, (0, 0))
MEET = Announcement("finished", 7)
SITE = Site(7, 2.5, 100, 0.5)
LATE = Excluded(3, "late")


class Rank:
    """Rank 0 of replicas of two ranks each, connected to ranks 1 to 5; its effects are not carried out."""

    def __init__(self) -> None:
        self.machine = Machine(replace(RULES, late_s=None, ranks_per_replica=2))
        for rank in range(1, 6):
            self.handle(Connected(rank, 10 + rank, f"host:{rank}"))

    def handle(self, event: Event) -> Effects:
        return self.machine.handle(0.0, event)

    def hear(self, sender: int, message: Any) -> Effects:
        return self.handle(Received(sender, decode(encode(message), Message)))


def first_of_three(*, survive: bool = True) -> Machine:
    """Return rank 0 of three replicas, connected to the others."""
    machine = Machine(replace(RULES, continue_without_lost=survive))
    for rank in (1, 2):
        machine.handle(0.0, Connected(rank, 10 + rank, f"host:{rank}"))
    machine.handle(0.0, Begun(View.of(3), member=True))
    return machine


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def member(rank: Rank) -> Rank:
    """A member of a view of replicas 0 and 1."""
    assert rank.handle(Begun(VIEW, member=True)).view == VIEW
    return rank


def test_before_there_are_views_what_is_about_them_waits_and_nothing_else_does(rank: Rank) -> None:
    assert_nothing(rank.hear(2, LATE))
    assert rank.machine.views.failure is None
    for sender in (2, 4):
        rank.hear(sender, MEET)
    assert not rank.machine.said.numbers["finished"]
    rank.handle(Begun(VIEW, member=True))
    assert rank.machine.said.numbers["finished"] == {2: 7}
    assert "the others continued without replica 0: late" in str(rank.machine.views.failure)


def test_nobody_can_fill_the_memory_before_there_are_views(rank: Rank) -> None:
    for _ in range(1000):
        assert_nothing(rank.hear(2, VOTE))
    with pytest.raises(MessageError, match="exceeded the hold-back limit"):
        rank.hear(2, VOTE)
    assert_nothing(rank.hear(3, VOTE))  # the limit is per sender


@pytest.mark.parametrize("sender", [2, 3, 4, 5])
def test_only_members_have_a_say(member: Rank, sender: int) -> None:
    """Ranks 2 and 3 belong to replica 1; 4 and 5 to a replica that is no member."""
    has_a_say = sender < 4
    member.hear(sender, MEET)
    assert member.machine.said.numbers["finished"] == ({sender: 7} if has_a_say else {})
    assert member.hear(sender, Introduce(ENTRY)).introduced == ([ENTRY] if has_a_say else [])
    member.hear(sender, Announcement("speed", 2.0))
    assert member.machine.said.numbers["speed"] == ({sender: 2.0} if has_a_say else {})
    member.hear(sender, SiteMessage(SITE))
    assert member.machine.said.sites == ({sender: SITE} if has_a_say else {})
    member.hear(sender, Excluded(1 << 53, "it was started again"))
    assert (member.machine.views.failure is not None) == has_a_say


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_whose_place_is_taken_knows_it_in_whatever_order_the_others_say_so(member: Rank, order: int) -> None:
    """One member has the new process already, another has heard of it from that one and goes on without the old one."""
    partings = [Excluded(1 << 53, "it was started again"), Excluded(VIEW.id, "replica 0 was started again")]
    for sender, parting in zip((2, 3), partings[::order], strict=True):
        member.hear(sender, parting)
    assert member.machine.views.replaced
    assert "was started again" in str(member.machine.views.failure)


def test_members_know_the_figures_of_own_data_also_of_one_that_has_left() -> None:
    machine = first_of_three()
    told = machine.handle(0.0, Announced(SiteMessage(SITE)))
    assert told.messages == [(1, SiteMessage(SITE)), (2, SiteMessage(SITE))]
    machine.handle(0.0, Received(2, SiteMessage(SITE._replace(loss=None))))
    machine.handle(0.0, Disconnected(2))
    assert machine.said.sites == {0: SITE, 2: SITE._replace(loss=None)}


@pytest.mark.parametrize("site", [SITE._replace(loss=math.inf), SITE._replace(tokens=-1), SITE._replace(passes=-0.5)])
def test_what_is_no_figure_of_own_data_is_no_message(site: Site) -> None:
    with pytest.raises(MessageError):
        decode(encode(SiteMessage(site)), Message)


def test_what_others_did_in_a_view_that_is_over_excludes_nobody(member: Rank) -> None:
    assert_nothing(member.hear(2, Excluded(2, "late")))
    assert member.machine.views.failure is None
    parted = member.hear(2, Excluded(4, "late"))
    assert parted.hang_ups == [1, 2, 3]
    assert "late" in str(member.machine.views.failure)


def test_who_was_lost_while_all_began_is_told_so_when_it_begins_after_all(member: Rank) -> None:
    """It was suspended then, say, and had no connection whose end it could notice."""
    assert member.hear(4, Header(2, (0, 0), 2, 1.0, 1.0, "d")).messages == [(4, Excluded(3, ""))]


def test_who_is_no_member_may_ask_to_be_one_in_its_own_name(member: Rank) -> None:
    for rank in (4, 5):
        entry = Entry(rank, f"host:{rank}")
        effects = member.hear(rank, Join(entry, (0, 1, 2, 3)))
        assert effects.registered == [entry]
        assert {type(message) for _, message in effects.messages} == ({Change} if rank == 5 else set()), (
            "all have to ask"
        )


# Bounds on what is kept of others' messages.


@pytest.fixture
def memory() -> Iterator[Callable[[], int]]:
    """Return how many bytes have been allocated since the test began, and are still used."""

    def used() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    gc.collect()
    tracemalloc.start()
    yield used
    tracemalloc.stop()


FAR = Change(
    Report(2, 99, gone=frozenset(range(200)), commits={(0, n): "d" * 64 for n in range(200)}), "x" * 10_000, "other"
)
FLOODS: dict[str, tuple[int, Callable[[int], Any]]] = {
    "changes of a view far away": (8000, lambda n: FAR),
    "votes on rounds that no rank begins": (200, lambda n: RoundVote(3, (n, 0), "", "x" * 500)),
}
"""How many kB 400 of them may take, and the message."""


@pytest.mark.parametrize(("most_kb", "flood"), FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize("sender", [2, 5], ids=["a member", "a stranger"])
def test_nobody_can_fill_the_memory(
    member: Rank, most_kb: int, flood: Callable[[int], Any], sender: int, memory: Callable[[], int]
) -> None:
    began_s = time.process_time()
    with contextlib.suppress(ValueError):  # which ends the connection
        for n in range(400):
            member.hear(sender, flood(n))
            if sender not in member.machine.roster.connections:
                break  # it was dropped
    assert memory() < most_kb << 10
    assert time.process_time() - began_s < 10.0


def test_who_contributes_to_more_rounds_than_a_view_has_is_lost(member: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(member.machine.rounds), "MOST_EARLY", 20)
    for n in range(20):
        member.hear(2, Header(3, (n, 0), 2, 1.0, 1.0, "d"))
    assert member.machine.views.change is None
    member.hear(2, Header(3, (20, 0), 2, 1.0, 1.0, "d"))
    assert (change := member.machine.views.change) is not None
    assert change.mine.lost == {1}
    assert "rank 2 sent messages about too many rounds" in change.why


@pytest.mark.parametrize("begun", [False, True])
def test_strangers_together_can_not_fill_the_memory_either(rank: Rank, begun: bool, memory: Callable[[], int]) -> None:
    """Also before there are views, such as those that connect to a peer that searches for a swarm."""
    if begun:
        rank.handle(Begun(VIEW, member=True))
    for stranger in range(100, 120):
        rank.handle(Connected(stranger, 1000 + stranger, f"host:{stranger}"))
        rank.hear(stranger, FactsMessage(Entry(stranger, f"host:{stranger}", "key", {"x": "y" * 4000})))
        with contextlib.suppress(ValueError):
            for _ in range(20):
                rank.hear(stranger, FAR)
        rank.handle(Disconnected(stranger))
        rank.handle(RankLost(stranger, "it ended", "ended"))
    assert memory() < 6 << 20


def test_a_rank_that_fails_stops_its_own_replica_and_no_other(member: Rank) -> None:
    """Its process ends after an error in training, say, before any other rank has lost it."""
    ends = member.handle(Closed(TransportError("it ends")))
    assert ends.hang_ups == [2, 3]
    assert ends.messages == [(1, Announcement("stop", 0))]


@pytest.mark.parametrize("gone", [True, False])
def test_nobody_waits_before_it_is_known_what_has_become_of_all_whose_connections_ended(gone: bool) -> None:
    """Two of three end at once: the third is no smaller side, unless one of them may be continuing."""
    machine = first_of_three()
    machine.handle(1.0, Disconnected(1))
    machine.handle(1.0, Disconnected(2))
    machine.handle(1.1, RankLost(1, "it ended", "ended"))
    assert machine.views.failure is None
    assert machine.views.view == View.of(3)
    machine.handle(1.2, RankLost(2, "it ended, or not", "ended" if gone else "unreachable"))
    if gone:
        assert machine.views.failure is None
        assert machine.views.view.members == (0,)
    else:
        assert "smaller side" in machine.views.waiting
        assert machine.views.missing == {1, 2}


@pytest.mark.parametrize("lost", [Disconnected(1), Connected(1, 9, "host:1", "another process")], ids=["ends", "new"])
@pytest.mark.parametrize("welcome", [False, True])
def test_who_asks_to_join_asks_again_at_once_if_an_answer_may_be_lost(lost: Event, welcome: bool) -> None:
    machine = Machine(replace(RULES, rank=2))
    for rank in (0, 1):
        machine.handle(0.0, Connected(rank, rank + 1, f"host:{rank}", f"process {rank}"))
    machine.handle(0.0, Begun(View(-1, (0, 1)), member=False))
    machine.handle(0.0, Announced(Join(Entry(2, "host:2"))))
    if welcome:
        following = NextView(View(1, (0, 1, 2)), View(0, (0, 1)), 1, {})
        assert machine.handle(0.1, Received(0, Welcome(following))).answers
    answers = machine.handle(0.2, lost).answers
    assert [type(answer) for answer, _ in answers] == ([] if welcome else [Refused])


@pytest.mark.parametrize("survive", [False, True])
def test_a_refused_connection_is_a_silence_where_all_stop(survive: bool) -> None:
    """A router that has lost its way refuses for a process that runs. Of two sites, one that is killed must not stop
    the other where it is to continue."""
    machine = first_of_three(survive=survive)
    machine.handle(1.0, Disconnected(1))
    machine.handle(1.1, RankLost(1, "its port refuses", "ended"))
    report = machine.views.change.mine
    assert (report.apart, report.gone) == (({1}, set()) if not survive else (set(), {1}))
    machine.handle(1.2, Disconnected(2))
    machine.handle(1.3, RankLost(2, "its port refuses", "ended"))
    if survive:
        assert (machine.views.view.members, machine.views.presumed_gone) == ((0,), {1, 2})
    else:
        assert "its port refuses; all replicas stop when one is lost" in str(machine.views.failure)
        assert machine.views.view == View.of(3)


def test_one_of_three_stops_alone_and_two_stop_all() -> None:
    machine = first_of_three()
    for rank, stops in ((1, False), (2, True)):
        machine.handle(0.0, Received(rank, Announcement("stop", 5)))
        assert machine.said.stopping == stops


@pytest.mark.parametrize("topic", ["stop", "finished", "speed"])
@pytest.mark.parametrize("how", ["leaves", "ends"])
@pytest.mark.parametrize("replicas", [3, 4, 5])
def test_what_a_replica_announced_is_forgotten_once_it_is_no_member(replicas: int, topic: Any, how: str) -> None:
    """It was preempted, started again, and rejoined. Hours later another one that was preempted stopped all."""
    network = simulated(replicas, Limits(returns=replicas), replace(RULES, together=False))
    finish(network)
    for victim in range(replicas - 1, 0, -1):
        rank = network[victim]
        rank.handle(Announced(Announcement(topic, 1)))
        settle(network)
        assert victim in network[0].machine.said.numbers[topic]
        assert not network[0].machine.said.stopping
        if how == "leaves":
            rank.handle(Left())
        network.end(victim)
        finish(network)
        network.return_whole(victim)
        finish(network)
        assert network[0].view.members == tuple(range(replicas))
        assert victim not in network[0].machine.said.numbers[topic]


def test_who_is_no_member_stops_nobody_also_if_it_asked_before_there_were_views() -> None:
    machine = Machine(RULES)
    machine.handle(0.0, Connected(2, 12, "host:2"))
    for rank, step in ((1, 1 << 53), (7, 0), (8, 0), (9, 0)):
        machine.handle(0.0, Connected(rank, 10 + rank, f"host:{rank}"))
        machine.handle(0.0, Received(rank, Announcement("stop", step)))
    machine.handle(0.0, Begun(View.of(3), member=True))
    assert not machine.said.stopping
    assert not machine.said.numbers["stop"], "also of the member that names a step that nobody can have reached"


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize(
    "message",
    [*(Announcement(topic, 0) for topic in ("stop", "finished", "speed")), SiteMessage(SITE), Introduce(ENTRY), LATE],
)
def test_another_process_with_the_number_of_a_member_speaks_for_nobody(message: Any, has_begun: bool) -> None:
    """Without a secret a stranger took it before the member came, and stopped the run that then began."""
    machine = first_of_three() if has_begun else Machine(replace(RULES, continue_without_lost=False))
    for rank in (1, 2):
        machine.handle(0.0, Connected(rank, 20 + rank, f"host:{rank}", "another"))
    assert not machine.handle(0.0, Received(2, message)).introduced
    if not has_begun:
        machine.handle(0.0, Disconnected(2))
        machine.handle(0.0, Connected(2, 12, "host:2", "its"))
        assert not machine.handle(0.0, Begun(View.of(3), member=True)).introduced
    assert not machine.said.stopping
    assert not any(machine.said.numbers.values())
    assert not machine.said.sites
    assert machine.views.failure is None


def test_facts_of_a_stranger_refuse_nobody(rank: Rank) -> None:
    """Also if it sent them before this rank knew who is a member, and under a rank that is none."""
    rank.handle(Announced(FactsMessage(Entry(0, "host:0", "key", {"codec": "fp4"}))))
    for sender in (4, 2):
        rank.hear(sender, FactsMessage(Entry(sender, f"host:{sender}", "key", {"codec": "int8"})))
        assert not rank.machine.said.refusal()
    rank.handle(Begun(VIEW, member=True))
    assert "replica 1 (host:2) has codec = int8" in rank.machine.said.refusal()


@pytest.mark.parametrize("comes", ["before", "after"])
def test_facts_of_a_process_that_was_started_again_with_other_arguments_refuse_nobody_else(comes: str) -> None:
    """It counted as the member that it replaces, and stopped another one that began beside it."""
    machine = first_of_three(survive=True)
    mine = Announced(FactsMessage(Entry(0, "host:0", "key", {"codec": "fp4"})))
    events = [Disconnected(2), Connected(2, 99, "host:2")]
    events += [Received(2, FactsMessage(Entry(2, "host:2", "key", {"codec": "int8"})))]
    for event in [*events, mine] if comes == "before" else [mine, *events]:
        machine.handle(0.0, event)
    assert not machine.said.refusal()


@pytest.mark.parametrize("dissenter", [None, 1, 2])
@pytest.mark.parametrize("survive", [True, False])
def test_facts_of_any_other_member_that_differ_refuse_a_rank_that_begins(dissenter: int | None, survive: bool) -> None:
    machine = first_of_three(survive=survive)
    machine.handle(0.0, Announced(FactsMessage(Entry(0, "host:0", "key", {"codec": "fp4"}))))
    for rank in (1, 2):
        facts = {"codec": "int8" if rank == dissenter else "fp4"}
        machine.handle(0.0, Received(rank, FactsMessage(Entry(rank, f"host:{rank}", "key", facts))))
    assert bool(machine.said.refusal()) == (dissenter is not None)


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (2, Announcement("stop", 1 << 53)),
        (2, FactsMessage(ENTRY)),
        (2, Join(ENTRY)),
        (5, Join(Entry(4, "host:5"))),
        (5, Join(Entry(5, "elsewhere:5"))),
    ],
)
def test_what_nobody_can_mean_is_the_senders_fault(member: Rank, sender: int, message: Any) -> None:
    with pytest.raises(MessageError, match=r"past step|facts of another rank|another rank or address"):
        member.hear(sender, message)
    assert_nothing(member.hear(sender, Beat()))


@pytest.mark.parametrize(
    "message",
    [
        Header(3, (0, 1 << 50), 2, 1.0, 1.0, "d"),
        RoundVote(3, (0, 1 << 50), "d"),
        Change(Report(2, 3, step=1 << 50), "why", "other"),
        Change(Report(3, 3), "why", "other"),
        Adopted(NextView(View(1 << 50, (0, 1)), View((1 << 50) - 1, (0, 1)), 1, {})),
    ],
    ids=lambda message: type(message).__name__,
)
def test_who_is_far_ahead_or_speaks_for_another_is_lost(member: Rank, message: Any) -> None:
    """Ranges alone would let one message freeze steps and views for ever."""
    sent = [sent for _, sent in member.hear(2, message).messages]
    assert {type(each) for each in sent} == {Change}
    assert "rank 2" in sent[0].why or "replica 1" in sent[0].why
    assert 1 in sent[0].report.apart


def test_rounds_may_count_from_a_checkpoint_and_steps_from_zero(member: Rank) -> None:
    """A loop that restores `DiLoCo` alone: its rounds go on, and the steps that its transport counts begin anew."""
    given = Contribution(round=RoundId(0, 5000), replica=0, codec=CODEC, numel=NUMEL, payload=PAYLOAD, digest="d")
    member.handle(Submitted(header_of(given), 1, 0.0))
    assert_nothing(member.hear(2, Header(3, (1, 5001), NUMEL, 1.0, 1.0, "d")))
    assert member.machine.rounds.others_have_contributed()
