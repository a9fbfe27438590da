"""`PeerFleet` in a swarm: replicas as a session sees them, on loopback and in one process."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.data import Shares, as_message
from diloco.errors import RunFinishedError, TransportError
from diloco.protocol import Rules
from diloco.train import PeerFleet
from diloco.transport import Admission, NodePlace, SwarmPlace
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, LIMIT_S, LOOPBACK, QUICK, wait_for_members
from tests.transport.wires import at_once

pytestmark = HIVEMIND_LEAVES_CONNECTIONS

Make = Callable[..., PeerFleet]


@pytest.fixture
def make(keys: Path) -> Iterator[Make]:
    fleets: list[PeerFleet] = []

    def made(
        number: int,
        *known: PeerFleet,
        run: str = "run",
        held_step: int = -1,
        start: int = 1,
        join_window_s: float = 0.5,
    ) -> PeerFleet:
        place = SwarmPlace(
            identity=keys / f"{number}.key",
            admission=Admission(run, "", frozenset()),
            node=NodePlace(
                join=tuple(address for each in known for address in each.addresses), listen=LOOPBACK, map_ports=False
            ),
            replica=number,
            name="anna-pc",
            join_window_s=join_window_s,
        )
        rules = Rules(**QUICK | {"rendezvous_timeout_s": 15.0, "together": False})
        fleets.append(PeerFleet(place, rules, held_step=held_step, replicas=start, margin=1))
        return fleets[-1]

    yield made
    for fleet in fleets:
        fleet.transport.close()
    gc.collect()  # so that objects which Hivemind leaves open are reported for this test, not for a later one


def test_who_comes_when_the_others_have_finished_is_told_so_at_once(make: Make) -> None:
    """This includes a replica that rejoins. One that can resume from a checkpoint founds its own swarm."""
    standing = make(9, run="another")  # keeps the entries of the DHT alive
    first = make(0, standing)
    first.close_to_joiners("")
    second = make(1, standing, first)
    second.join(LIMIT_S)
    assert first.names() == second.names() == {"0": "anna-pc/0", "1": "anna-pc/1"}
    first.directory.finish()
    first.close()
    second.transport.close()
    with pytest.raises(RunFinishedError, match="the others have finished run 'run', and no member is left"):
        second.rejoin(LIMIT_S)
    with pytest.raises(RunFinishedError):
        make(2, standing)
    assert not make(3, standing, held_step=5).joining


def find_again(fleet: PeerFleet) -> None:
    """Rejoin. Its port may have been taken meanwhile, as a run's may, which tries again, too."""
    for _ in range(20):
        try:
            return fleet.rejoin(LIMIT_S)
        except TransportError as error:
            if "address already in use" not in str(error):
                raise
    raise AssertionError("its port stays taken")


def test_those_who_lost_each_other_meet_again_where_they_were(make: Make) -> None:
    """First one alone, which the other one goes on without, then both. Nobody gave the first one an address."""
    first = make(0)
    first.close_to_joiners("")
    second = make(1, first)
    second.join(LIMIT_S)
    first.transport.step, before = 40, second.addresses
    find_again(second)
    assert second.joining
    assert second.addresses == before
    assert second.join(LIMIT_S) == 40
    wait_for_members(first.transport, 2)

    def found() -> None:
        find_again(first)
        first.close_to_joiners("")

    name = first.directory.swarm
    assert at_once([found, lambda: find_again(second)]) == [None, None]
    assert [fleet.joining for fleet in (first, second)] == [False, True]
    assert first.directory.swarm == second.directory.swarm == name


def test_who_goes_on_alone_leaves_out_only_what_the_others_had_been_assigned(make: Make) -> None:
    before = Shares.of((0, 1)).following(6, (0, 1, 2), joined=(2,), margin=4, batch_size=1)
    fleet = make(0)
    fleet.load_state_dict({"traffic": [0, 0], "step": 8, "shares": as_message(before), "swarm": "another"})
    (following,) = fleet.take_assignments()
    assert (following.from_step, following.members) == (10, (0,))
    drawn = [position for m in (0, 1, 2) for position in _drawn(before, m, range(8))]
    drawn += _drawn(before, 0, range(8, 10)) + _drawn(fleet.shares, 0, range(10, 40))
    left_out = [position for m in (1, 2) for position in _drawn(before, m, range(8, 10))]
    assert sorted(drawn + left_out) == list(range(len(drawn + left_out))), "none is repeated"


def test_who_joins_before_training_goes_on_has_something_to_draw_at_once(make: Make) -> None:
    """The founder's checkpoint is from a moment after a view change but before the next slice of data had begun."""
    before = Shares.of((0, 1)).following(6, (0,), joined=(), margin=4, batch_size=1)
    first = make(0, start=2)
    first.load_state_dict({"traffic": [0, 0], "step": 8, "shares": as_message(before), "swarm": "another"})
    first.close_to_joiners("")
    second = make(1, first, start=2)
    assert second.join(LIMIT_S) == 8
    assert [each.from_step for each in second.take_assignments()] == [8, 10]
    drawn = [position for m in (0, 1) for position in _drawn(before, m, range(8 if m == 0 else 6))]
    drawn += _drawn(before, 0, range(8, 10)) + _drawn(second.shares, 1, range(8, 20))
    drawn += _drawn(second.shares, 0, range(10, 20)) + _drawn(before, 1, range(6, 10))  # the last are left out
    assert sorted(drawn) == list(range(len(drawn)))
    assert first.shares == second.shares


def _drawn(shares: Shares, member: int, steps: range) -> list[int]:
    """Return the positions, one per step, that a member draws in the steps for which it has assignments."""
    of_member = shares.of_member(member)
    at = [(step, [each for each in of_member if each.from_step <= step]) for step in steps]
    return [int(known[-1].positions(member, step, 1)[0]) for step, known in at if known]
