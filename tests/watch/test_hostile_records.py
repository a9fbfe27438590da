"""Records and files that a stranger wrote neither end nor stall the page, nor show one peer's figures as another's."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.events import Event, to_record
from diloco.watch import FollowedFolder, FollowedSwarm, Tail, Thresholds, Watched, page_data, parse
from tests.monitor import made_events as made
from tests.watch.test_history import view
from tests.watch.test_swarms import NOW_S, answer, report

HOSTILE = ("Infinity", "-Infinity", "NaN", float("inf"), 1e308, -1e308, 2**53, -1, 10**400, True, None, "x" * 9_000,
           "</script>", [], [[[]]], [2**53] * 2_000, {"a": {"b": 1}}, {"a": float("nan")}, ["NaN"])  # fmt: skip
EVENTS: tuple[Event, ...] = (
    made.started(), made.step(3), made.sent(0, 0, 0), made.committed(0, 0, 0), made.void(0, 0, 1),
    made.evaluated(3, 2.0), view(1, (0, 1)), made.fetched(0, 5, 5),
)  # fmt: skip


def shown(*runs: Watched) -> dict[str, Any]:
    page = page_data(runs, Thresholds(), NOW_S)
    json.dumps(page, allow_nan=False)
    assert not any("can't be shown" in problem for run in page["runs"].values() for problem in run["problems"])
    return page["runs"]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_no_value_of_any_field_ends_the_page(event: Event) -> None:
    names = [field.name for field in dataclasses.fields(event)] + ["time_s", "unknown"]
    for name in names:
        for value in HOSTILE:
            swarm = FollowedSwarm("mine", ["/ip4/1"])
            forged = {**to_record(event), "time_s": NOW_S, name: value}
            records = [forged, forged, *map(to_record, EVENTS), forged]
            swarm.take([report(0, {"events": records, "next_event": 9, "state": "training", name: value})], {}, NOW_S)
            shown(swarm.run)


def test_a_fault_of_one_run_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Watched("good", "a"), Watched("bad", "b", settings={"a": "b"})
    bad.free_bytes = object()  # type: ignore[assignment]  # stands for a fault that nobody knows yet
    bad.history.take("", {"schema": 1, "event": "CheckpointSaved", "step": 1, "size_bytes": 5, "path": ""})
    runs = page_data([good, bad], Thresholds(), NOW_S)["runs"]
    assert (runs["0"]["problems"], runs["0"]["name"], runs["1"]["name"]) == ([], "good", "bad")
    assert "can't be shown: TypeError" in runs["1"]["problems"][0]


def test_a_second_peer_with_a_number_of_another_has_its_own_row() -> None:
    swarm = FollowedSwarm("mine", ["/ip4/1"])
    honest = answer(to_record(made.started()), to_record(made.step(5)), to_record(made.sent(0, 0, 0, digest="a")))
    liar = answer(
        to_record(made.step(2**50)), to_record(made.evaluated(2**50, 0.001)), to_record(made.sent(0, 0, 0, digest="b"))
    )
    liar["events"].append({**to_record(made.step(1)), "event": "RunFinished", "summary": {"heldout_loss": 0.001}})
    liar["next_event"] = 4
    for order in (("Qm0", "QmLiar"), ("QmLiar", "Qm0")):
        reports = {"Qm0": report(0, honest), "QmLiar": dataclasses.replace(report(0, liar), peer_id="QmLiar")}
        swarm = FollowedSwarm("mine", ["/ip4/1"])
        swarm.take([reports["Qm0"]], {}, NOW_S)
        swarm.take([reports[peer] for peer in order], {}, NOW_S)
        (run,) = shown(swarm.run).values()
        rows = run["peers"]
        assert (rows["0"]["peer"], rows["0"]["step"], rows["0"]["digest"]) == ("Qm0", 5, "agrees")
        assert (rows["QmLiar"]["peer"], rows["QmLiar"]["digest"], rows["QmLiar"]["sent_rounds"]) == ("QmLiar", "", None)
        assert run["lines"]["replica 0"]["heldout"] == {}
        assert set(run["lines"]) == {"replica 0", "replica 0 (QmLiar)"}


def test_peers_that_change_their_numbers_or_identities_fill_no_memory() -> None:
    swarm = FollowedSwarm("mine", ["/ip4/1"])
    for number in range(1_500):
        events = answer(to_record(made.step(1)), following=number + 1)
        swarm.take([dataclasses.replace(report(number, events), peer_id="QmLiar"), report(number, events)], {}, NOW_S)
    assert len(swarm.run.history.processes) <= 1_024
    assert list(swarm.run.history.processes)[:2] == ["replica 0", "replica 0 (Qm0)"]


def test_one_peer_can_not_set_the_members_or_the_step_of_all() -> None:
    swarm = FollowedSwarm("mine", ["/ip4/1"])

    def told(number: int, *events: Event) -> Any:
        return report(number, answer(*map(to_record, events)))

    liar = (view(2**53, (9, 10), replica=2), made.step(2**53))
    peers = [told(number, view(4, (0, 1, 2), replica=number), made.step(7)) for number in (0, 1)]
    swarm.take([told(2, *liar), *peers], {}, NOW_S)
    assert swarm.run.history.expected == (0, 1, 2)
    assert swarm.run.history.step == 7
    later = {"events": [to_record(view(5, (0, 1), replica=0))], "next_event": 3}
    swarm.take([report(0, later), report(1, {**later, "events": [to_record(view(5, (0, 1), replica=1))]})], {}, 0.0)
    assert swarm.run.history.expected == (0, 1)


def test_a_loop_of_ones_own_is_running_without_losses(tmp_path: Path) -> None:
    lines = [
        json.dumps({**to_record(event), "time_s": NOW_S}) for event in (made.sent(0, 0, 0), made.committed(0, 0, 0))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    followed = FollowedFolder(tmp_path)
    followed.read()
    (run,) = shown(followed.run).values()
    assert (run["header"]["state"], run["header"]["step"], run["header"]["merged"]) == ("running", 2, 1)
    assert run["peers"]["0"]["state"] == "running"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [fifo, endless, folder])
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "replica-1/metrics.jsonl"])
def test_what_is_no_file_is_not_read(make: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    (tmp_path / "replica-1").mkdir()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(to_record(made.step(1))) + "\n")
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    followed = FollowedFolder(tmp_path)
    followed.read()
    (run,) = shown(followed.run).values()
    told = " ".join(run["problems"])
    assert (name.endswith(".jsonl")) == (str(tmp_path / name) in told and "cannot be read" in told)


def backwards(count: int) -> Iterator[bytes]:
    for step in range(count, 0, -1):
        yield json.dumps(to_record(made.started(step))).encode() + b"\n"
        yield json.dumps(to_record(made.step(step + 1))).encode() + b"\n"


def test_starts_that_go_back_again_and_again_take_time_in_proportion(tmp_path: Path) -> None:
    took = []
    for count in (500, 2_000):
        path = tmp_path / f"{count}.jsonl"
        path.write_bytes(b"".join(backwards(count)))
        tail, records, began_s = Tail(path), [], time.perf_counter()
        while True:
            afresh, more = tail.read()
            records = [*([] if afresh else records), *more]
            if not tail.behind_bytes:
                break
        took.append(time.perf_counter() - began_s)
        assert [record["step"] for record in records] == [1, 2]
    assert took[1] < 12 * took[0] + 0.1, "four times the records"


@pytest.mark.parametrize("line", [b'{"schema": true, "event": "Note", "step": 1}', b"[" * 100_000, b"9" * 100_000])
def test_a_line_that_only_looks_like_a_record_is_none(line: bytes) -> None:
    assert parse(line) is None
