"""To whom a message goes: what waits for views, who has a say, and in whose name somebody may speak."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from diloco.membership.view import View
from diloco.protocol.registry import Entry, Registry
from diloco.transport.address import Address
from diloco.transport.peers.agreement import Agreement
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.dispatch import Dispatch
from diloco.transport.peers.joining import Joining
from diloco.transport.peers.meetings import Meetings
from diloco.transport.peers.speeds import Speeds, speed_message
from diloco.transport.peers.threads import Mailbox
from diloco.transport.peers.views import ViewKeeper

VIEW = View(3, (0, 1))
ENTRY = Entry(5, "host:5")
MEET = {"kind": "meet", "name": "end", "value": 7}


class Desk:
    """Rank 0 of a view of replicas 0 and 1 of two ranks each, and all that its messages go to."""

    def __init__(self) -> None:
        self.connections = mock.Mock(spec=ConnectionManager)
        self.connections.address_of.side_effect = lambda rank: Address("host", rank)
        self.connections.connected = frozenset({1, 2})
        self.connections.connection.side_effect = lambda rank: f"connection {rank}"
        self.mailbox = Mailbox()
        self.meetings = mock.Mock(spec=Meetings)
        self.joining = Joining(self.connections)
        self.speeds = Speeds()
        self.agreement = mock.Mock(spec=Agreement)
        self.introduced: list[Entry] = []
        self.registry = Registry(4, 2)
        self.keeper = mock.Mock(spec=ViewKeeper)
        self.keeper.view = VIEW
        self.keeper.attendance = mock.Mock()
        self.dispatch = Dispatch(
            2,
            self.connections,
            self.mailbox,
            self.meetings,
            self.joining,
            self.speeds,
            self.agreement,
            self.introduced.append,
        )

    def deliver(self, sender: int, message: dict[str, Any], blob: bytes = b"") -> None:
        self.dispatch.deliver(sender, message, blob)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def ready(desk: Desk) -> Desk:
    assert not desk.dispatch.begin(desk.keeper, desk.registry)
    return desk


def test_before_there_are_views_what_is_about_them_waits_and_nothing_else_does(desk: Desk) -> None:
    for number in range(3):
        desk.deliver(2, {"kind": "vote", "number": number}, b"blob")
    desk.deliver(2, {"kind": "store", "key": "k"}, b"value")
    desk.deliver(2, MEET)
    assert desk.mailbox.take("k", 0.0) == b"value"
    desk.meetings.heard.assert_called_once_with(2, "end", 7)
    early = desk.dispatch.begin(desk.keeper, desk.registry)
    assert [(sender, message["number"], blob) for sender, message, blob in early] == [(2, n, b"blob") for n in range(3)]
    desk.keeper.heard.assert_not_called()
    assert not desk.dispatch.begin(desk.keeper, desk.registry), "each is given out once"


def test_nobody_can_fill_the_memory_before_there_are_views(desk: Desk) -> None:
    for _ in range(1001):
        desk.deliver(2, {"kind": "vote"})
    with pytest.raises(ValueError, match="too much to somebody who is not ready"):
        desk.deliver(2, {"kind": "vote"})
    assert len(desk.dispatch.begin(desk.keeper, desk.registry)) == 1001


@pytest.mark.parametrize("sender", [2, 3, 4, 5])
def test_only_members_have_a_say(ready: Desk, sender: int) -> None:
    """Ranks 2 and 3 are replica 1's; 4 and 5 are of nobody who is a member."""
    member = sender < 4
    said: list[dict[str, Any]] = [MEET, {"kind": "introduce", "entry": ENTRY.to_message()}, speed_message(2.0)]
    for message in [*said, {"kind": "excluded", "view": 3, "reason": "late"}, {"kind": "replaced"}]:
        ready.deliver(sender, message)
    assert ready.meetings.heard.called == member
    assert ready.introduced == ([ENTRY] if member else [])
    assert ready.speeds.known == ({sender // 2: 2.0} if member else {})
    assert [call.args for call in ready.keeper.exclude.call_args_list] == (
        [("late",), ("another process has come in its place",)] if member else []
    )


def test_what_others_did_in_a_view_that_is_over_excludes_nobody(ready: Desk) -> None:
    ready.deliver(2, {"kind": "excluded", "view": 2, "reason": "late"})
    ready.keeper.exclude.assert_not_called()
    ready.deliver(2, {"kind": "excluded", "view": 4, "reason": "late"})
    ready.keeper.exclude.assert_called_once_with("late")


def test_what_is_of_no_other_kind_is_about_a_view_or_a_round(ready: Desk) -> None:
    ready.deliver(5, {"kind": "vote"})
    ready.keeper.heard.assert_called_once_with(5, {"kind": "vote"})


def test_who_is_no_member_may_ask_to_be_one_in_its_own_name(ready: Desk) -> None:
    ready.deliver(5, {"kind": "join", **ENTRY.to_message(), "connected": [0, 2, 2]})
    assert ready.registry.entries == {5: ENTRY}
    ready.keeper.attendance.join.assert_called_once_with(5, frozenset({0, 2}))


@pytest.mark.parametrize("entry", [Entry(4, "host:5"), Entry(5, "elsewhere:5")])
def test_nobody_joins_in_the_name_of_another_one(ready: Desk, entry: Entry) -> None:
    with pytest.raises(ValueError, match="in the name of another one"):
        ready.deliver(5, {"kind": "join", **entry.to_message(), "connected": []})
    assert not ready.registry.entries
    ready.keeper.attendance.join.assert_not_called()


def test_a_welcome_counts_more_than_a_refusal_and_says_who_was_connected_when_it_came(desk: Desk) -> None:
    assert desk.joining.answer(0.0) is None
    desk.deliver(2, {"kind": "welcome", "view": 4})
    desk.connections.connected = frozenset({1})
    desk.deliver(1, {"kind": "refused", "reason": "late"})
    lineup = {1: "connection 1", 2: "connection 2"}
    assert desk.joining.answer(0.0) == {"kind": "welcome", "view": 4, "lineup": lineup}
    assert desk.joining.answer(0.0) is None, "an answer is taken once"
    for reason in ("late", "later"):
        desk.deliver(1, {"kind": "refused", "reason": reason})
    assert desk.joining.answer(0.0) == {"kind": "refused", "reason": "later", "lineup": {1: "connection 1"}}
