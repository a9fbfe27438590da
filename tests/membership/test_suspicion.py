"""Which silent ranks count as lost: a dead one soon, whoever else is quiet; and what a suspended process knows."""

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol import Machine, Rules

RULES = Rules(heartbeat_s=2.0, silence_s=15.0)
DEAD = 1


def detected_s(heard: dict[int, Callable[[float], float]], members: Iterable[int]) -> tuple[float, list[int]]:
    """Return when the first silent ranks are found after the last message of all at 0 s, and which.

    Args:
        heard: rank -> the time of its last message before a given time.
        members: the members among the ranks.
    """
    machine, now_s = Machine(RULES), 0.0
    for rank in heard:
        machine.handle(0.0, machine.connect, rank, rank, "")
    while now_s < 300:
        now_s += RULES.heartbeat_s
        for rank, last in heard.items():
            machine.roster.note_message(rank, last(now_s))
        if lost := machine.roster.silent({*members}, now_s):
            return now_s, lost
    return now_s, []


def every(interval_s: float, first_s: float = 0.0) -> Callable[[float], float]:
    return lambda now_s: max(0.0, now_s - (now_s - first_s) % interval_s)


@pytest.mark.parametrize("replicas", [4, 64])
@pytest.mark.parametrize("are_members", [True, False])
def test_two_that_beat_every_eight_seconds_in_turn_hide_no_dead_one(replicas: int, are_members: bool) -> None:
    slow = (replicas, replicas + 1)
    members = {*range(1, replicas)} | ({*slow} if are_members else set())
    heard = dict.fromkeys(members, every(2.0)) | {DEAD: every(1e9), slow[0]: every(8.0, 1.0), slow[1]: every(8.0, 5.0)}
    assert detected_s(heard, members) == (16.0, [DEAD])


@pytest.mark.parametrize("interval_s", [8.0, 14.9])
@pytest.mark.parametrize("num_slow", [1, 2, 5])
def test_no_number_of_slow_members_hides_a_dead_one_for_longer_than_twice_the_limit(
    interval_s: float, num_slow: int
) -> None:
    """Also if they are all there are, and take turns."""
    slow = {2 + each: every(interval_s, each * interval_s / num_slow) for each in range(num_slow)}
    when_s, lost = detected_s({DEAD: every(1e9), **slow}, [DEAD, *slow])
    assert when_s <= 2 * RULES.silence_s + RULES.heartbeat_s
    assert lost == [DEAD]


@pytest.mark.parametrize("replicas", [2, 3, 64])
@given(st.randoms())
def test_who_hears_nobody_any_more_accuses_all_at_once(replicas: int, chance: random.Random) -> None:
    """Property: whatever the others sent last; strangers that it still hears change nothing."""
    last_s = {rank: chance.uniform(-RULES.heartbeat_s, 0.0) for rank in range(1, replicas)}
    heard = {rank: lambda now_s, each=each: each for rank, each in last_s.items()} | {99: every(2.0)}
    when_s, lost = detected_s(heard, range(1, replicas))
    assert sorted(lost) == [*range(1, replicas)]
    assert when_s <= RULES.silence_s + RULES.heartbeat_s


def test_a_process_that_was_suspended_gives_the_others_time_and_knows_it_for_a_silence() -> None:
    machine = Machine(RULES)
    roster = machine.roster
    machine.handle(0.0, machine.connect, 1, 1, "")
    assert not roster.beat(0.0)
    assert not roster.beat(2.1)
    assert (roster.was_suspended(15.0), roster.was_suspended(15.2)) == (False, True), "it should have beaten by then"
    assert roster.beat(22.1)
    assert not roster.silent({1}, 37.0)
    assert (roster.was_suspended(30.0), roster.was_suspended(37.2)) == (True, True)
    assert [roster.beat(now_s) for now_s in (24.0, 26.0, 36.0, 38.0)] == [False, False, True, False]
    assert not roster.was_suspended(38.0), "ten seconds are no silence"
