"""Following a swarm through the answers of its peers, any of which may be malicious."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from diloco.events import to_record
from diloco.transport import PeerReport, PeerStatus
from diloco.watch import FollowedSwarm
from tests.monitor.made_events import sent, started, step

NOW_S = 1_000.0


def answer(*records: Mapping[str, Any], following: Any = None, **fields: Any) -> dict[str, Any]:
    told = [{**record, "time_s": NOW_S} for record in records]
    return {"state": "training", "events": told, "next_event": len(told) if following is None else following, **fields}


def report(number: int, status: Mapping[str, Any], **given: Any) -> PeerReport:
    return PeerReport(f"Qm{number}", number, status, **given)


def test_events_are_taken_once_and_asked_for_from_there_on() -> None:
    swarm, recent = FollowedSwarm("mine", ["/ip4/1"]), PeerStatus()
    for number in range(1, 4):
        recent.add(step(number))
        status = {"state": "training", **recent.since(swarm.since.get("Qm7", 0))}
        swarm.take([report(7, status, route="direct", round_trip_s=0.1)], {}, NOW_S)
    process = swarm.run.history.processes["replica 7"]
    assert [row[0] for row in process.steps.rows()] == [1, 2, 3]
    assert swarm.since == {"Qm7": 3}
    (peer,) = swarm.run.seen
    assert (peer.replica, peer.state, peer.route, peer.heard_s) == (7, "training", "direct", NOW_S)


def test_a_peer_that_was_started_again_counts_from_the_beginning() -> None:
    swarm = FollowedSwarm("mine", ["/ip4/1"])
    swarm.take([report(0, answer(to_record(step(1)), to_record(step(2))))], {}, NOW_S)
    swarm.take([report(0, answer(following=1))], {}, NOW_S)
    assert swarm.since == {"Qm0": 0}
    swarm.take([report(0, answer(to_record(step(3))))], {}, NOW_S)
    assert swarm.run.history.processes["replica 0"].step == 3


def test_who_does_not_answer_stays_in_the_table() -> None:
    swarm = FollowedSwarm("mine", ["/ip4/1"])
    swarm.take([report(0, answer()), report(1, answer())], {}, NOW_S)
    swarm.take([report(0, answer()), report(1, {}, problem="lost")], {"Qm1": "gone"}, NOW_S + 9)
    assert [(peer.replica, peer.state, peer.heard_s) for peer in swarm.run.seen] == [
        (0, "training", NOW_S + 9),
        (1, "gone", NOW_S),
    ]


def test_everybody_speaks_for_itself_alone() -> None:
    swarm = FollowedSwarm("mine", ["/ip4/1"])
    swarm.take([report(0, answer(to_record(sent(0, 0, 0)), to_record(sent(1, 0, 0))))], {}, NOW_S)
    assert set(swarm.run.history.grid.cells[0, 0].sent) == {0}


@pytest.mark.parametrize(
    "status",
    [
        {"events": "none", "next_event": 1},
        {"events": [None, 7, [], {}, {"schema": 1}], "next_event": 5},
        {"events": [{"schema": 1, "event": "RoundSent", "step": 1}], "next_event": 1},
        {"events": [], "next_event": "<script>"},
        {"state": {"a": 1}, "members": 7, "step": "<b>"},
        answer({**to_record(started()), "num_replicas": 10**12, "facts": 7, "tokens_per_step": "x"}),
    ],
)
def test_a_stranger_raises_nothing(status: Mapping[str, Any]) -> None:
    swarm = FollowedSwarm("mine", ["/ip4/1"])
    swarm.take([report(0, status), PeerReport("Qm", -1)], {}, NOW_S)
    assert len(swarm.run.seen) == 1


def test_what_a_peer_tells_holds_nothing_of_its_machine() -> None:
    recent = PeerStatus()
    recent.add(started(facts={"run folder": "/home/me"}, resumed_from="/home/me"))
    recent.add(step(1))
    told = recent.since(0)
    assert [record["event"] for record in told["events"]] == ["RunStarted", "StepFinished"]
    assert "/home" not in str(told)
    for number in range(2, 2_000):
        recent.add(step(number))
    assert len(recent.since(0)["events"]) < 300
