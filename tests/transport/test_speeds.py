"""Speeds that members report to each other: received by all, accepted only if plausible, dropped with the member."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.membership import NextView
from diloco.protocol import speed_message, speed_of
from diloco.transport import PeerTransport
from tests.transport.wires import Wires, at_once

LIMIT_S = 60.0


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_every_speed_arrives_as_it_was_told(steps_per_s: float) -> None:
    assert speed_of(speed_message(steps_per_s)) == steps_per_s


@pytest.mark.parametrize("value", ["0.0", "-1.0", "nan", "inf", "-inf", "1e999", "quick", "", 3.0, None, [1]])
def test_what_is_no_speed_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="field 'steps_per_s' must be"):
        speed_of({"kind": "speed", "steps_per_s": value})


def hear_each_other(transports: Sequence[PeerTransport], name: str) -> None:
    """Wait until all earlier messages have been processed, as the messages of a connection arrive in order."""
    met = at_once([partial(transport.meet, name, 0) for transport in transports])
    assert met == [dict.fromkeys(range(len(transports)), 0)] * len(transports)


def next_view_of(transport: PeerTransport) -> threading.Event:
    """Return an event that is set once the transport has adopted a view."""
    adopted, follow = threading.Event(), transport.on_change

    def followed(following: NextView) -> Any:
        adopted.set()
        return follow(following)

    transport.on_change = followed
    return adopted


def test_members_hear_each_others_speeds_and_forget_who_leaves(wires: Wires) -> None:
    first, second, third = transports = wires.meet(3, continue_without_lost=True)
    for number, transport in enumerate(transports):
        transport.announce_speed(1.5 + number)
    hear_each_other(transports, "told")
    assert first.speeds() == {1: 2.5, 2: 3.5}
    assert second.speeds() == {0: 1.5, 2: 3.5}
    third.announce_speed(0.25)
    hear_each_other(transports, "told again")
    assert first.speeds() == {1: 2.5, 2: 0.25}
    adopted = next_view_of(first)
    third.leave()
    assert adopted.wait(LIMIT_S)
    assert first.speeds() == {1: 2.5}


def test_who_tells_a_speed_that_is_none_is_lost_and_named(wires: Wires) -> None:
    first, second = wires.meet(2, continue_without_lost=True, min_replicas=1)
    adopted = next_view_of(first)
    second.connections.post(second.connections.send, 0, {"kind": "speed", "steps_per_s": "nan"})
    assert adopted.wait(LIMIT_S)
    assert "replica 1" in first.reason
    assert "steps_per_s" in first.reason
    assert first.speeds() == {}
