"""What strangers write neither ends nor stalls the page, nor shows one peer's figures as another's."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco import events
from diloco.events import Event, to_record
from diloco.protocol import MessageError, decode, encode
from diloco.transport import PeerReport, PeerStatus, Status
from diloco.watch import FollowedSwarm
from tests.monitor import made_events as made
from tests.watch.runs import NOW_S, shown, write

HOSTILE = ("Infinity", "-Infinity", "NaN", float("inf"), 1e308, -1e308, 2**53, -1, 10**400, True, None, "x" * 9_000,
           "</script>", [], [[[]]], [2**53] * 2_000, {"a": {"b": 1}}, {"a": float("nan")}, ["NaN"], "\ud800",
           {"\ud800": "\ud800"}, {"0": "x" * 200_000}, {"heldout_loss": True}, ["\ud800"])  # fmt: skip


EVENTS: tuple[Event, ...] = (
    made.started(), made.step(3), made.sent(0, 0, 0), made.committed(0, 0, 0), made.void(0, 0, 1),
    made.evaluated(3, 2.0), made.view(1, (0, 1)), made.fetched(0, 5, 5),
    events.CheckpointSaved(step=1, path="", size_bytes=1, save_s=1.0),
    events.RunFinished(step=4, summary={"heldout_loss": 1.0}), events.SampleGenerated(step=3, prompt="a", text="b"),
)  # fmt: skip


def line(event: Event, **fields: Any) -> bytes:
    return json.dumps({**to_record(event), "time_s": NOW_S, **fields}).encode()


def report(number: int, *told: Event, peer: str = "", **status: Any) -> PeerReport:
    """Return the report of a peer of its own events, as a client receives it."""
    answer = {"kind": "status", "state": "training", "events": [*map(line, told)], "next_event": len(told), **status}
    try:
        said = decode(encode(answer), Status)
    except (MessageError, OverflowError, UnicodeError):  # it can't be sent, or is refused
        said = None
    return PeerReport(peer or f"Qm{number}", number, said)


def swarm_of(*reports: PeerReport) -> FollowedSwarm:
    swarm = FollowedSwarm("mine", ["/ip4/1"])
    swarm.take(reports, NOW_S)
    return swarm


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_no_value_of_any_field_ends_the_page(event: Event, tmp_path: Path) -> None:
    names = [*(field.name for field in dataclasses.fields(event)), "time_s", "schema", "unknown"]
    for value in HOSTILE:
        forged = [line(event, **{name: value}) for name in names]
        (run,) = shown(swarm_of(report(0, events=[*forged, *forged, *map(line, EVENTS), *forged], next_event=9)))
        assert len(str(run)) < 100_000
    for name in names:
        write(tmp_path, [event], **{name: "Infinity"})
    shown(tmp_path)
    (run,) = shown(swarm_of(report(0, events.RunFinished(step=1, summary={"heldout_loss": True}))))
    assert run["header"]["heldout_loss"] is None, "the page formats numbers"


def test_peer_with_the_number_of_another_has_its_own_row() -> None:
    honest = report(0, made.started(), made.step(5), made.sent(0, 0, 0, digest="a"), step=5)
    told = made.step(2**40), made.evaluated(2**40, 0.001), made.sent(0, 0, 0, digest="b")
    liar = report(0, *told, events.RunFinished(step=1, summary={"heldout_loss": 0.001}), peer="QmLiar", step=2**40)
    for order in ([honest, liar], [liar, honest]):
        swarm = swarm_of(honest)
        swarm.take(order, NOW_S)
        (run,) = shown(swarm)
        rows = [
            [row.get(name) for name in ("peer", "step", "digest", "counted")] for row in run["peers"] if row["peer"]
        ]
        assert rows == [["Qm0", 5, "agrees", None], ["QmLiar", 2**40, None, None]]
        assert run["lines"]["replica 0"]["Evaluated"]["rows"] == []
        assert set(run["lines"]) == {"replica 0", "replica 0 (QmLiar)"}


def test_one_peer_can_not_set_the_members_or_the_step_of_all() -> None:
    liar = report(2, made.view(2**53, (9, 10), replica=2), made.step(2**53), made.sent(0, 0, 0))
    swarm = swarm_of(liar, *(report(m, made.view(4, (0, 1, 2), replica=m), made.step(7)) for m in (0, 1)))
    (run,) = shown(swarm)
    assert ([row["replica"] for row in run["peers"]], run["header"]["step"]) == ([0, 1, 2], 7)
    assert run["grid"]["cells"] == {}, "it reports about itself alone"
    swarm.take([report(m, made.view(5, (0, 1), replica=m), next_event=3) for m in (0, 1)], NOW_S)
    assert [row["replica"] for row in shown(swarm)[0]["peers"]] == [0, 1]


@pytest.mark.parametrize("forged", [made.sent(2, 0, 2**50), made.committed(2, 0, 2**50), made.void(2, 0, 2**50)])
@pytest.mark.parametrize("first", [True, False])
def test_one_peer_can_not_set_the_newest_rounds_of_all(forged: Event, first: bool) -> None:
    honest = [report(m, *(made.sent(m, 0, k) for k in range(70))) for m in (0, 1)]
    liar = report(2, forged, *(made.sent(2, fragment, 0) for fragment in range(1_000, 1_300)))
    (run,) = shown(swarm_of(*([liar, *honest] if first else [*honest, liar])))
    assert [*run["grid"]["cells"]] == [f"0:{k}" for k in range(6, 70)]
    assert {tuple(cell["sent"]) for cell in run["grid"]["cells"].values()} == {(0, 1)}


def test_peers_that_change_their_numbers_or_identities_fill_no_memory() -> None:
    swarm = FollowedSwarm("mine", ["/ip4/1"])
    for number in range(1_500):
        swarm.take([report(number, made.step(1), next_event=number + 1, peer=peer) for peer in ("QmLiar", "")], NOW_S)
    assert len(swarm.run.processes) <= 1_024
    rounds = [made.sent(0, number, number) for number in range(3_000)]
    assert len(shown(swarm_of(report(0, *rounds)))[0]["grid"]["cells"]) <= 256


def test_rounds_of_one_peer_fill_no_memory_and_hide_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["diloco.watch.history"], "MAX_BYTES", 8 << 20)
    swarm, note = swarm_of(*(report(m, made.sent(m, 0, 0)) for m in (0, 1))), "\U0001f469" * 4_000
    flood = [made.committed(2, fragment, k, note=note) for k in range(64) for fragment in range(10)]
    for first in range(0, len(flood), 320):
        swarm.take([report(2, *flood[first : first + 320], next_event=first + 320)], NOW_S)
    cells = shown(swarm)[0]["grid"]["cells"]
    assert sum(len(cell["why"].encode()) for cell in cells.values()) < 8 << 20
    assert cells["0:0"]["sent"] == [0, 1]


def test_events_are_asked_for_once_and_again_after_a_restart() -> None:
    swarm, recent = FollowedSwarm("mine", ["/ip4/1"]), PeerStatus()
    for event in (made.started(facts={"run folder": "/home/me"}, resumed_from="/home/me"), made.step(1), made.step(2)):
        recent.add(event)
        status = recent.since(swarm.since.get("Qm7", 0))
        assert "/home" not in str(status)
        swarm.take([report(7, **status)], NOW_S)
    assert [row[0] for row in shown(swarm)[0]["lines"]["replica 7"]["StepFinished"]["rows"]] == [1, 2]
    swarm.take([report(7, next_event=1)], NOW_S)
    assert swarm.since == {"Qm7": 0}


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "replica-1/metrics.jsonl"])
def test_what_is_no_file_is_not_read(kind: str, name: str, tmp_path: Path) -> None:
    write(tmp_path, [made.step(1)])
    (tmp_path / "replica-1").mkdir()
    path = tmp_path / name
    path.unlink(missing_ok=True)
    {"fifo": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero"), "folder": path.mkdir}[kind]()
    words = " ".join(shown(tmp_path)[0]["problems"])
    assert name.endswith(".jsonl") == (f"{path} cannot be read" in words)


@pytest.mark.parametrize(("members", "state", "alerts"), [([0], "gone", 0), ([0, 1], "no answer", 1)])
def test_peer_that_does_not_answer_stays_in_the_table(members: list[int], state: str, alerts: int) -> None:
    swarm = swarm_of(report(0, made.step(1)), report(1, made.step(1)))
    swarm.take([report(0, members=members), PeerReport("Qm1", 1, problem="lost")], NOW_S + 61)
    (run,) = shown(swarm, now_s=NOW_S + 61)
    assert [(row["state"], row["heard_s"]) for row in run["peers"]] == [("training", 0), (state, 61)]
    assert len([alert for alert in run["alerts"] if alert["kind"] == "silent"]) == alerts


@pytest.mark.parametrize("name", Status.__struct_fields__)
def test_no_value_of_any_field_of_a_status_ends_the_page(name: str) -> None:
    for value in (*HOSTILE, "\x1b[2J", "\u202e"):
        answer = report(0, made.started(), **{name: value})
        assert answer.status is None or str(getattr(answer.status, name)).isprintable()
        assert len(str(shown(swarm_of(answer)))) < 100_000
    assert report(0, members=[*range(4_097)]).status is None
