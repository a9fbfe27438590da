"""`SwarmFleet`: replicas of a swarm as a session sees them, on loopback and in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from diloco.data import Shares
from diloco.errors import RunFinishedError
from diloco.events import Event, Note, ViewChanged
from diloco.membership import NextView, View
from diloco.train import Held, PeerThreads, Seats, Session, StopRequest, SwarmFleet, follow_views
from diloco.transport import Admission, NodePlace, SwarmPlace, Wire
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, LIMIT_S, LOOPBACK, QUICK
from tests.transport.wires import at_once

pytestmark = HIVEMIND_LEAVES_CONNECTIONS

Make = Callable[..., SwarmFleet]

WINDOW_S = 3.0  # enough for a busy machine to start a daemon and be found


@pytest.fixture
def make(tmp_path: Path, keys: Path) -> Iterator[Make]:
    fleets: list[SwarmFleet] = []

    def made(
        number: int,
        *known: SwarmFleet,
        run: str = "run",
        held_step: int = -1,
        start: int = 1,
        join_window_s: float = 0.5,
    ) -> SwarmFleet:
        place = SwarmPlace(
            identity=keys / f"{number}.key",
            admission=Admission(run, "", frozenset()),
            node=NodePlace(
                join=tuple(address for each in known for address in each.addresses()), listen=LOOPBACK, map_ports=False
            ),
            replica=number,
            name="anna-pc" if number == 2 else "pc",
            join_window_s=join_window_s,
        )
        fleets.append(
            SwarmFleet(
                place,
                Wire(**QUICK | {"rendezvous_timeout_s": 15.0}),
                Held(held_step),
                start_replicas=start,
                margin=1,
                batch_size=1,
                threads=PeerThreads(1, Seats(tmp_path / "seats")),
            )
        )
        return fleets[-1]

    yield made
    for fleet in fleets:
        fleet.transport.close()
    gc.collect()  # so that objects which Hivemind leaves open are reported for this test, not for a later one


def test_who_comes_back_lets_others_in_whatever_it_did_when_it_started(make: Make) -> None:
    """Joining replicas are referred to replica 0."""
    first = make(0)
    first.close_to_joiners("")
    second = make(1, first)
    second.close_to_joiners("")
    second.join(LIMIT_S)
    first.transport.leave()
    first.rejoin(LIMIT_S)
    first.close_to_joiners("")
    first.join(LIMIT_S)
    third = make(2, second)
    third.join(10.0)
    assert third.transport.view.members == (0, 1, 2)
    assert third.names() == {"0": "pc/0", "1": "pc/1", "2": "anna-pc"}


def test_where_all_have_lost_each_other_the_one_with_the_newest_state_founds_another_view(make: Make) -> None:
    """They reuse their ports, and there is no other peer."""
    fleets = [make(0, join_window_s=WINDOW_S)]
    fleets[0].close_to_joiners("")
    fleets.append(make(1, fleets[0], join_window_s=WINDOW_S))
    fleets[1].join(LIMIT_S)
    swarm, before = fleets[0].connected.swarm, fleets[0].transport.view.id
    for fleet, step in zip(fleets, (20, 30), strict=True):
        fleet.transport.step = step
    at_once([fleet.transport.close for fleet in fleets])

    def rejoin(fleet: SwarmFleet) -> int:
        fleet.rejoin(LIMIT_S)
        fleet.close_to_joiners("")
        if fleet.joining:
            return fleet.join(LIMIT_S)
        fleet.gather(LIMIT_S)
        return -1

    assert at_once([lambda fleet=fleet: rejoin(fleet) for fleet in fleets]) == [30, -1]
    assert [fleet.connected.swarm for fleet in fleets] == [swarm] * 2
    assert [fleet.transport.view.members for fleet in fleets] == [(0, 1)] * 2
    assert fleets[1].transport.view.id > before


def test_a_change_of_threads_is_told_between_two_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, told = make(0), list[Event]()
    monkeypatch.setattr(fleet.threads, "follow", lambda: "2 peers train on this machine.")
    session = cast(Session, SimpleNamespace(totals=SimpleNamespace(steps=7)))
    follow_views(fleet, session, StopRequest(), told.append)
    assert Note(step=7, text="2 peers train on this machine.", detail=True) in told


def test_who_is_gone_without_a_word_is_told_apart_from_who_has_left() -> None:
    told, view = list[Event](), View.of(4)
    following = NextView(view.followed_by(1, (0, 3), ()), view, 8, {}, "words", left=((1, 7),))
    transport = SimpleNamespace(replica=0)
    fleet = SimpleNamespace(
        take_notices=str,
        take_news=lambda: [following],
        failure=None,
        gathering=False,
        transport=transport,
        names=lambda: {"2": "anna-pc"},
    )
    session = SimpleNamespace(totals=SimpleNamespace(steps=7))
    follow_views(cast(SwarmFleet, fleet), cast(Session, session), StopRequest(), told.append)
    (changed,) = told
    assert isinstance(changed, ViewChanged)
    assert (changed.members, changed.left, changed.lost) == ((0, 3), (1, 2), (2,))
    assert changed.names == {"2": "anna-pc"}


def test_who_comes_when_the_others_have_finished_is_told_so_at_once(make: Make) -> None:
    """This includes a replica that rejoins. One that can resume from a checkpoint founds its own swarm."""
    standing = make(9, run="another")  # keeps the entries of the DHT alive
    first = make(0, standing)
    first.close_to_joiners("")
    second = make(1, standing, first)
    second.join(LIMIT_S)
    first.tell_finished()
    first.close()
    second.transport.close()
    with pytest.raises(RunFinishedError, match="the others have finished run 'run', and no member is left"):
        second.rejoin(LIMIT_S)
    with pytest.raises(RunFinishedError):
        make(2, standing)
    assert not make(3, standing, held_step=5).joining


def test_what_the_others_would_have_drawn_is_drawn_by_who_goes_on_alone(make: Make) -> None:
    """It draws the rest of the slice that was already divided, only for the steps that were not done."""
    before = Shares.of((0, 1)).following(6, (0, 1, 2), joined=(2,), left={}, margin=4, batch_size=1)
    fleet = make(0)
    fleet.load_state_dict({"traffic": [0, 0], "step": 8, "shares": before.to_message(), "swarm": "another"})
    (following,) = fleet.take_assignments()
    assert (following.from_step, following.members) == (10, (0,))
    drawn = [position for m in (0, 1, 2) for position in _drawn(before, m, range(8))]
    drawn += _drawn(before, 0, range(8, 10)) + _drawn(fleet.shares, 0, range(10, 40))
    assert sorted(drawn) == list(range(len(drawn))), "none is repeated or left out"


def test_who_joins_before_training_goes_on_has_something_to_draw_at_once(make: Make) -> None:
    """The founder's checkpoint is from a moment after a view change but before the next slice of data had begun."""
    before = Shares.of((0, 1)).following(6, (0,), joined=(), left={1: 6}, margin=4, batch_size=1)
    first = make(0, start=2)
    first.load_state_dict({"traffic": [0, 0], "step": 8, "shares": before.to_message(), "swarm": "another"})
    first.close_to_joiners("")
    second = make(1, first, start=2)
    assert second.join(LIMIT_S) == 8
    assert [each.from_step for each in second.take_assignments()] == [8, 10]
    drawn = [position for m in (0, 1) for position in _drawn(before, m, range(8 if m == 0 else 6))]
    drawn += _drawn(before, 0, range(8, 10)) + _drawn(second.shares, 1, range(8, 20))
    drawn += _drawn(second.shares, 0, range(10, 20))
    assert sorted(drawn) == list(range(len(drawn)))
    assert first.shares == second.shares


def _drawn(shares: Shares, member: int, steps: range) -> list[int]:
    """Return the positions, one per step, that a member draws in the steps for which it has assignments."""
    of_member = shares.of_member(member)
    at = [(step, [each for each in of_member if each.from_step <= step]) for step in steps]
    return [int(known[-1].positions(member, step, 1)[0]) for step, known in at if known]


def test_a_peer_that_is_started_again_says_what_becomes_of_its_checkpoint(make: Make) -> None:
    alone = make(0, held_step=30)
    assert alone.beginning() == (
        "It knows no other peer (no --join), so it founds a new swarm at step 30. Peers that join adopt its state.",
    )
    assert alone.state_dict()["swarm"] == alone.connected.swarm, "a checkpoint names the swarm that it was saved in"
    alone.transport.step = 70
    alone.close_to_joiners("")
    (words,) = make(1, alone, held_step=50).beginning()
    assert words == (
        "It adopts the state of the others, which are at step 70. Its own checkpoint of step 50 is not used: the "
        "others continued from step 30 and do not have the later steps either."
    )
    assert make(2, alone).beginning() == ()


def test_before_training_begins_a_new_member_draws_from_the_first_step_on(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No replica takes a step before that, so new shares apply at once; later they apply after a margin. The founder
    reports that it waits."""
    first = make(0, start=2)
    monkeypatch.setattr("diloco.waiting.FIRST_S", 0.01)

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "more replica" in record.getMessage()]

    first.wait_for_start(lambda: bool(told()))
    assert told()[0].startswith("waiting for 1 more replica, to start with 2 (Ctrl-C leaves), for")
    second = make(1, first, start=2)
    second.join(LIMIT_S)
    assert {each.from_step for each in second.take_assignments()} == {0}
    third = make(2, second, start=2)
    second.close_to_joiners("")
    third.join(LIMIT_S)
    assert [each.from_step for each in third.take_assignments()][-1] == 1
