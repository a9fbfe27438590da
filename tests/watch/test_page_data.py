"""What the page shows of the records of a run."""

import itertools
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco import events
from diloco.errors import ConfigurationError
from diloco.events import Event, Site
from diloco.monitor import read_metrics
from diloco.watch import FollowedFolder
from tests.monitor.made_events import committed, evaluated, fetched, sent, started, step, view, void
from tests.watch.runs import curve, shown, write


def run_of(folder: Path, *told: Event) -> dict[str, Any]:
    return shown(write(folder, [started(num_replicas=3, total_steps=100), *told]))[0]


def test_the_header_of_the_page_has_the_newest_figures_of_the_run(tmp_path: Path) -> None:
    begin = started(total_steps=100, tokens_per_step=8, data_parallel_bytes_per_step=100_000)
    steps = [step(number, tokens=8 * number) for number in range(1, 11)]
    header = shown(write(tmp_path, [begin, *steps, evaluated(10, 2.5), committed(0, 0, 0)]))[0]["header"]
    expected = {"state": "running", "step": 10, "total_steps": 100, "tokens": 80, "tokens_per_s": 16, "left_s": 45,
                "heldout_loss": 2.5, "best_heldout_loss": 2.5, "data_parallel_bytes": 1_000_000, "rounds_committed": 1,
                "rounds_void": 0, "model_flops_utilization": None, "sent_bytes": 10_000}  # fmt: skip
    assert {name: header[name] for name in expected} == expected
    summary = {"sent_bytes_per_replica": 5, "data_parallel_bytes_per_replica": 50}
    write(tmp_path, [events.RunFinished(step=10, summary=summary)])
    header = shown(tmp_path)[0]["header"]
    assert (header["state"], header["sent_bytes"], header["data_parallel_bytes"]) == ("finished", 5, 50)


def test_unknown_values_are_null_and_never_zero(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'seed = 0\n[train]\nsteps = 9\nlong = "{"x" * 999}"\n')
    (run,) = shown(tmp_path)
    assert run["settings"] == {"seed": "0", "train.steps": "9", "train.long": "x" * 200}
    assert {name: value for name, value in run["header"].items() if value not in (None, "")} == {"state": "not started"}
    (run,) = shown(write(tmp_path, [sent(0, 0, 0), committed(0, 0, 0)]))  # a loop of one's own reports no more
    assert (run["header"]["state"], run["header"]["step"], run["header"]["loss"]) == ("running", 2, None)


@pytest.mark.parametrize(
    ("told", "state", "contributors", "counts"),
    [
        ([sent(0, 0, 0)], "sent", [], (0, 0)),
        ([sent(0, 0, 0), committed(0, 0, 0)], "merged", [0, 1], (1, 0)),
        ([sent(0, 0, 0), void(0, 0, 0)], "void", [], (0, 1)),
        ([committed(0, 0, 0), void(1, 0, 0)], "merged", [0, 1], (1, 0)),  # one replica missed the commit
        ([void(1, 0, 0), committed(0, 0, 0)], "merged", [0, 1], (1, 0)),
        ([sent(0, 0, 0), void(0, 0, 0), sent(0, 0, 0)], "sent", [], (0, 1)),  # it is repeated
    ],
)
def test_a_round_is_sent_merged_or_void_as_its_events_say(
    tmp_path: Path, told: list[Event], state: str, contributors: Any, counts: Any
) -> None:
    run = run_of(tmp_path, *told)
    cell = run["grid"]["cells"]["0:0"]
    assert (cell["state"], cell["contributors"]) == (state, contributors)
    assert (run["header"]["rounds_committed"], run["header"]["rounds_void"]) == counts


def test_the_table_of_peers_counts_in_how_many_means_each_replica_is(tmp_path: Path) -> None:
    late = committed(0, 0, 3, step=5, late_s=(0.0, 0.2)), committed(1, 0, 3, step=5, late_s=(0.5, 0.0))
    digests = [sent(m, 0, 3, step=5, digest="ba"[m != 1], weight=0.5) for m in range(3)]
    run = run_of(tmp_path, committed(0, 0, 0, contributors=(0, 1, 2)), committed(0, 0, 1), *digests, *late)
    rows = [[row.get(name) for name in ("counted", "missed", "weight", "digest", "late_s")] for row in run["peers"]]
    assert rows == [
        ["3 of 3", 0, 0.5, "agrees", 0.5],
        ["3 of 3", 0, 0.5, "differs", 0.0],
        ["1 of 3", 2, 0.5, "agrees", None],
    ]
    cell = run["grid"]["cells"]["0:3"]
    assert (cell["absent"], cell["last"], cell["last_after_s"], cell["differ"]) == ([2], 0, 0.5, [1])


def test_members_of_the_newest_view_and_who_is_fetching_state(tmp_path: Path) -> None:
    names = {"2": "anna-pc"}
    told = (view(2, (0, 2), left=(1,), names=names), view(1, (0, 1, 2), left=(1,), names=names))
    run_of(tmp_path, step(1), sent(1, 0, 0), *told)
    for event, state, received in ((fetched(1, 50, 150), "joining", 150), (step(8), "running", None)):
        run = shown(write(tmp_path / "replica-2", [event]).parent)[0]
        assert [(row["replica"], row["state"]) for row in run["peers"]] == [(0, "running"), (1, "gone"), (2, state)]
        assert (run["peers"][2]["fetched"] or {}).get("received_bytes") == received
        assert [row["name"] for row in run["peers"]] == [None, None, "anna-pc"]
    assert [each["view"] for each in run["views"]] == [2]
    (numbered,) = shown(write(tmp_path / "other", [started(num_replicas=4), sent(178120399, 0, 0)]))
    assert [row["replica"] for row in numbered["peers"]] == [178120399]


def test_replica_that_goes_back_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    rounds = [(sent(m, 0, k, step=k), committed(m, 0, k, step=k)) for k in range(1, 6) for m in (0, 1)]
    for m, name in enumerate(("", "replica-1")):
        steps = [step(k) for k in range(1, 6)]
        write(tmp_path / name, [started(), *steps, *itertools.chain(*rounds[m::2])])
    followed = FollowedFolder(tmp_path)
    before = shown(followed)[0]
    write(tmp_path / "replica-1", [started(2), step(3, 0.5), sent(1, 0, 3, step=3), committed(1, 0, 3, step=3)])
    run = shown(followed)[0]
    assert curve(run, "loss", "replica 0") == curve(before, "loss", "replica 0")
    assert curve(run, "loss", "replica 1") == [[1, 1.0], [2, 1.0], [3, 0.5]]
    assert [run["grid"]["cells"][f"0:{k}"]["merged"] for k in range(1, 6)] == [[0, 1], [0, 1], [0, 1], [0], [0]]
    write(tmp_path, [started(2), step(3), sent(0, 0, 3, step=3)])
    run = shown(followed)[0]
    assert sorted(run["grid"]["cells"]) == ["0:1", "0:2", "0:3"]
    assert run["header"]["rounds_committed"] == 3


def test_folder_that_is_used_for_another_run(tmp_path: Path) -> None:
    write(tmp_path, [started(), step(1), step(2)])
    (tmp_path / "config.toml").write_text("seed = 1")
    for name in ("replica-1", "replica-2"):
        write(tmp_path / name, [step(1)])
    followed = FollowedFolder(tmp_path)
    shown(followed)
    (tmp_path / "replica-2" / "metrics.jsonl").unlink()  # its replica has been removed, the others continue
    assert [*shown(followed)[0]["lines"]] == ["replica 0", "replica 1", "replica 2"]
    shutil.rmtree(tmp_path / "replica-1")
    assert [*shown(followed)[0]["lines"]] == [""], "now there is one process"
    (tmp_path / "config.toml").write_text("seed = 2")
    (tmp_path / "metrics.jsonl").write_bytes(b"")  # the same file, which is longer again before it is read
    write(tmp_path, [step(number, 5.0) for number in range(3, 9)])
    (run,) = shown(followed)
    assert (curve(run, "loss"), run["settings"]) == ([[number, 5.0] for number in range(3, 9)], {"seed": "2"})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "old")
    assert curve(shown(followed)[0], "loss")[-1] == [8, 5.0], "what was read stays while there is none"
    shutil.copy(tmp_path / "old", tmp_path / "metrics.jsonl")  # synchronised from another machine
    write(tmp_path, [step(9, 5.0)])
    assert curve(shown(followed)[0], "loss")[-2:] == [[8, 5.0], [9, 5.0]]


def test_names_that_are_not_utf8_and_replicas_that_can_not_be_read(tmp_path: Path) -> None:
    folder = write(tmp_path / os.fsdecode(b"run\xff\x1b"), [step(1)])
    (folder / "replica-1").symlink_to("x" * 300)
    (run,) = shown(folder)
    assert (run["name"], run["header"]["step"], run["problems"]) == (r"run\udcff\x1b", 1, [])
    with pytest.raises(ConfigurationError, match="does not exist"):
        FollowedFolder(tmp_path / ("x" * 300))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_curves_have_what_read_metrics_reads(tmp_path_factory: pytest.TempPathFactory, what: Any) -> None:
    """Property: runs that resume repeatedly."""
    told = [started(number) if start else step(number, loss=place) for place, (start, number) in enumerate(what)]
    folder = write(tmp_path_factory.mktemp("run"), [started(), *told])
    records = read_metrics(folder / "metrics.jsonl", "StepFinished")
    assert curve(shown(folder)[0], "loss") == [[record["step"], record["loss"]] for record in records]


def test_long_curve_keeps_extremes_in_bounded_size(tmp_path: Path) -> None:
    spikes = {77: 9.0, 1_001: 0.5, 1_999: math.nan}
    run = run_of(tmp_path, *(step(number, spikes.get(number, 2.0)) for number in range(1, 2_001)))
    lows, highs = ([value for _, value in curve(run, f"loss_{end}")] for end in ("low", "high"))
    assert 256 <= len(lows) <= 512
    assert (min(lows), max(highs), curve(run, "loss")[-1][0]) == (0.5, 9.0, 2_000)


def test_evaluations_of_any_process_and_pauses(tmp_path: Path) -> None:
    for end_s, event in ((0, started()), (10, step(1)), (1000, started(1)), (1005, step(2))):
        write(tmp_path, [event], end_s=end_s)
    write(tmp_path / "replica-1", [evaluated(1, 2.0), evaluated(2, math.nan), evaluated(3, 2.5)])
    (run,) = shown(tmp_path)
    assert (run["header"]["heldout_loss"], run["header"]["best_heldout_loss"]) == (2.5, 2.0)
    assert curve(run, "time_s", "replica 0") == [[1, 10], [2, 15]], "a pause is not time of the run"


def test_the_newest_figures_of_own_data_that_any_process_has_of_each_replica(tmp_path: Path) -> None:
    first = {"0": Site(8, 2.0, 300, 0.5), "1": Site(4, 9.0, 50, 3.5)}
    second = {"0": Site(4, 8.0, 150, 0.25), "1": Site(8, 4.0, 100, 7.5)}
    write(tmp_path, [started(num_replicas=3), evaluated(8, 2.0, sites=first)])
    write(tmp_path / "replica-1", [evaluated(8, 4.0, sites=second)])
    (run,) = shown(tmp_path)
    figures = [[row.get(name) for name in ("replica_loss", "replica_tokens", "replica_passes")] for row in run["peers"]]
    assert figures == [[2.0, 300, 0.5], [4.0, 100, 7.5], [None] * 3]
    assert run["header"]["sites_loss"] == 2.5


def test_invalid_and_incomplete_lines(tmp_path: Path) -> None:
    write(tmp_path, [started(), step(1)])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"schema": 1, "ev\xff\n\n' + b"x" * 1_500_000 + b"\n" + b"[" * 99_999 + b"\n")
        file.write(b'{"schema": 2, "event": "Note", "step": 9, "text": ""}\n{"schema": 1, "event": "Note", ')
    followed = FollowedFolder(tmp_path)
    (run,) = shown(followed)
    assert "line(s) that aren't valid event records" in run["problems"][0]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'"step": 1, "text": "hello"}\n')
    assert [note["text"] for note in shown(followed)[0]["notes"]] == ["hello"]


def test_outer_telemetry_is_the_mean_over_fragments_as_one_replica_reports_it(tmp_path: Path) -> None:
    rounds = [committed(m, p, k, mean_norm=float(10 * k + p)) for k in range(3) for p in (0, 1) for m in (0, 1)]
    run = run_of(tmp_path, *rounds)
    assert [value for _, value in curve(run, "mean_norm", kind="RoundCommitted")] == [0.0, 0.5, 5.5, 10.5, 15.5, 20.5]
    assert {value for _, value in curve(run, "gain", kind="RoundCommitted")} == {None}


def test_rounds_and_the_best_loss_of_a_run_that_goes_on_in_another_folder_count(tmp_path: Path) -> None:
    begin = started(100, rounds_committed=40, rounds_void=2, best_heldout_loss=1.5)
    header = shown(write(tmp_path, [begin, step(101), committed(0, 0, 10, step=110), evaluated(110, 2.0)]))[0]["header"]
    assert (header["rounds_committed"], header["rounds_void"], header["best_heldout_loss"]) == (41, 2, 1.5)


def test_rounds_count_once_if_a_run_goes_back_further_than_the_grid_reaches(tmp_path: Path) -> None:
    before = [committed(0, 0, number, step=number + 1) for number in range(200)]
    followed = FollowedFolder(write(tmp_path, [started(), *before]))
    assert shown(followed)[0]["header"]["rounds_committed"] == 200
    write(tmp_path, [started(100, rounds_committed=100), committed(0, 0, 100, step=101)])
    assert shown(followed)[0]["header"]["rounds_committed"] == 101


def test_folder_of_a_machine_that_has_only_some_replicas(tmp_path: Path) -> None:
    write(tmp_path / "replica-1", [started(), step(1)])
    (tmp_path / "replica-1" / "config.toml").write_text("seed = 2")
    (run,) = shown(tmp_path)
    assert (run["header"]["step"], run["settings"], [*run["lines"]]) == (1, {"seed": "2"}, ["replica 1"])
