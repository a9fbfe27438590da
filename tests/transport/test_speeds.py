"""What members tell each other of their speeds: heard by all, believed only if it can be one, forgotten with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.membership.change import NextView
from diloco.transport.peers.speeds import Speeds, speed_message
from diloco.transport.peers.transport import PeerTransport
from tests.transport.wires import Wires

LIMIT_S = 60.0


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_every_speed_arrives_as_it_was_told(steps_per_s: float) -> None:
    speeds = Speeds()
    speeds.hear(3, speed_message(steps_per_s))
    assert speeds.known == {3: steps_per_s}


@pytest.mark.parametrize("value", ["0.0", "-1.0", "nan", "inf", "-inf", "1e999", "quick", "", 3.0, None, [1]])
def test_what_is_no_speed_is_refused_and_the_one_before_stays(value: object) -> None:
    speeds = Speeds()
    speeds.hear(1, speed_message(2.0))
    with pytest.raises(ValueError, match="its 'steps_per_s' is"):
        speeds.hear(1, {"kind": "speed", "steps_per_s": value})
    assert speeds.known == {1: 2.0}


def test_who_is_no_member_is_forgotten() -> None:
    speeds = Speeds()
    for replica in range(3):
        speeds.hear(replica, speed_message(1.0 + replica))
    speeds.keep((0, 2, 5))
    assert speeds.known == {0: 1.0, 2: 3.0}


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires()
    yield made
    made.close()


def until(condition: Callable[[], Any], changed: threading.Condition) -> bool:
    with changed:
        return bool(changed.wait_for(condition, LIMIT_S))


def listening(transport: PeerTransport) -> threading.Condition:
    """Notified after everything that a transport hears."""
    changed, deliver = threading.Condition(), transport._deliver

    def heard(sender: int, message: dict[str, Any], blob: bytes) -> None:
        with changed:
            deliver(sender, message, blob)
            changed.notify_all()

    transport.connections._deliver = heard
    return changed


def test_members_hear_each_others_speeds_and_forget_who_leaves(wires: Wires) -> None:
    first, second, third = transports = wires.meet(3, go_on=True)
    changed = [listening(transport) for transport in transports]
    for number, transport in enumerate(transports):
        transport.tell_speed(1.5 + number)
    assert until(lambda: first.speeds() == {1: 2.5, 2: 3.5}, changed[0])
    assert until(lambda: second.speeds() == {0: 1.5, 2: 3.5}, changed[1])
    third.tell_speed(0.25)
    assert until(lambda: first.speeds() == {1: 2.5, 2: 0.25}, changed[0])
    adopted, follow = threading.Event(), first.on_change

    def followed(following: NextView) -> Any:
        adopted.set()
        return follow(following)

    first.on_change = followed
    third.leave()
    assert adopted.wait(LIMIT_S)
    assert first.speeds() == {1: 2.5}


def test_who_tells_a_speed_that_is_none_is_lost_and_named(wires: Wires) -> None:
    first, second = wires.meet(2, go_on=True, min_replicas=1)
    adopted: list[NextView] = []
    changed = threading.Condition()

    def followed(following: NextView) -> None:
        with changed:
            adopted.append(following)
            changed.notify_all()

    first.on_change = followed
    second.connections.post(second.connections.send, 0, {"kind": "speed", "steps_per_s": "nan"})
    assert until(lambda: adopted, changed)
    assert "replica 1" in first.reason
    assert "steps_per_s" in first.reason
    assert first.speeds() == {}
