"""The history gathered from records: processes, rounds, views, members."""

from __future__ import annotations

import math

import pytest

from diloco import events
from diloco.events import to_record
from diloco.protocol import Faults, faults_message
from diloco.watch import OUTER_STEPS, Grid, RunHistory, Seen, member_rows
from tests.monitor.made_events import committed, evaluated, fetched, sent, started, step, void
from tests.watch.stories import NOW_S, history


def view(number: int, members: tuple[int, ...], *, at: int = 1, replica: int = 0) -> events.ViewChanged:
    return events.ViewChanged(
        step=at, replica=replica, view=number, members=members, joined=(), left=(), reason="somebody left"
    )


def test_a_round_is_sent_then_merged_or_void() -> None:
    run = history([started(), sent(0, 0, 0), sent(1, 0, 0)])
    assert run.grid.cells[0, 0].state == "sent"
    history([committed(0, 0, 0), sent(0, 1, 0), void(0, 1, 0, "replica 1 was late")], into=run)
    assert (run.grid.cells[0, 0].state, run.grid.cells[0, 0].contributors) == ("merged", (0, 1))
    assert (run.grid.cells[1, 0].state, run.grid.cells[1, 0].void) == ("void", "replica 1 was late")
    assert (run.grid.merged, run.grid.void) == (1, 1)


@pytest.mark.parametrize("first", ["commit", "void"])
def test_a_round_that_one_merged_and_another_missed_is_merged(first: str) -> None:
    told = [committed(0, 0, 0), void(1, 0, 0, "no commit was heard of")]
    run = history([started(), *(told if first == "commit" else reversed(told))])
    cell = run.grid.cells[0, 0]
    assert (cell.state, cell.note, run.grid.merged, run.grid.void) == ("merged", "no commit was heard of", 1, 0)


def test_a_void_round_that_is_repeated_under_its_number_is_under_way_again() -> None:
    run = history([started(), sent(0, 0, 3), void(0, 0, 3), sent(0, 0, 3)])
    assert run.grid.cells[0, 3].state == "sent"


def test_who_is_missing_from_rounds_is_counted_until_it_is_back() -> None:
    run = history([started(num_replicas=3), *(committed(m, 0, k) for k in range(4) for m in (0, 1, 2))])
    assert run.grid.parts[2].missed == 4
    assert (run.grid.parts[0].missed, run.grid.parts[0].counted) == (0, 4)
    assert run.grid.cells[0, 0].absent == (2,)
    history([committed(0, 0, 4, contributors=(0, 1, 2))], into=run)
    assert run.grid.parts[2].missed == 0


def test_void_rounds_in_a_row_end_with_one_that_is_merged() -> None:
    run = history([started(), *(void(m, 1, k) for k in range(3) for m in (0, 1))])
    assert run.grid.void_in_a_row == {1: 3}
    history([committed(0, 1, 3)], into=run)
    assert run.grid.void_in_a_row == {1: 0}


def test_digests_that_differ_name_the_minority() -> None:
    run = history([started(), *(sent(m, 0, 0, digest="ab" if m != 1 else "cd") for m in range(3))])
    assert run.grid.cells[0, 0].minority() == (1,)
    assert history([sent(0, 0, 0, digest="a"), sent(1, 0, 0, digest="b")]).grid.cells[0, 0].minority() == (1,)
    assert history([sent(0, 0, 0), sent(1, 0, 0, digest="b")]).grid.cells[0, 0].minority() == ()


def test_old_rounds_are_forgotten_and_their_numbers_counted() -> None:
    rounds = 3 * OUTER_STEPS
    run = history([started(), *(committed(0, p, k) for k in range(rounds) for p in (0, 1))])
    assert len(run.grid.cells) == 2 * OUTER_STEPS
    assert min(k for _, k in run.grid.cells) == rounds - OUTER_STEPS
    assert run.grid.merged == 2 * rounds
    history([void(0, 0, 1)], into=run)
    assert (0, 1) not in run.grid.cells


def test_a_stranger_can_not_fill_the_memory() -> None:
    grid = Grid()
    for number in range(3_000):
        grid.take(to_record(sent(number, number, 0)), ())
    assert len(grid.cells) <= 256
    assert len(grid.parts) <= 1_024


def test_members_are_those_of_the_newest_view() -> None:
    run = history([started(num_replicas=3)])
    assert run.expected == (0, 1, 2)
    history([view(2, (0, 2)), view(1, (0, 1, 2))], into=run)
    assert run.expected == (0, 2)
    assert [record["view"] for record in run.views] == [2]
    assert history([started(num_replicas=4), sent(178120399, 0, 0)]).expected == (178120399,)


def test_time_stops_between_an_end_and_a_resumption() -> None:
    run = RunHistory()
    for at_s, event in ((0, started()), (10, step(1)), (1000, started(1)), (1005, step(2))):
        run.take("", {**to_record(event), "time_s": at_s})
    assert run.first.elapsed_s == 15
    assert [row[2] for row in run.first.steps.rows()] == [10, 15]


def test_a_gradient_norm_far_above_the_median_is_kept_and_one_that_is_no_number_too() -> None:
    norms = [1.0] * 20 + [7.0, math.nan, 1.0]
    run = history([started(), *(step(n, gradient_norm=norm) for n, norm in enumerate(norms, start=1))])
    assert [(spike.step, spike.norm, spike.median) for spike in run.first.spikes] == [(21, 7.0, 1.0)]
    assert [number for number, _ in run.first.not_finite] == [22]


def test_the_best_evaluation_stays() -> None:
    run = history([started(), evaluated(1, 3.0), evaluated(2, 2.0), evaluated(3, math.nan), evaluated(4, 2.5)])
    assert run.first.best == 2.0


def test_the_table_of_peers_has_what_is_known_and_none_for_the_rest() -> None:
    run = history([started(num_replicas=2), sent(0, 0, 0, digest="a", weight=0.5), sent(1, 0, 0, digest="a")])
    rows = member_rows(run, (), NOW_S)
    assert [row["state"] for row in rows.values()] == ["running", "running"]
    assert (rows["0"]["weight"], rows["0"]["digest"], rows["0"]["round_trip_s"]) == (0.5, "agrees", None)
    assert rows["0"]["sent_bytes"] is None
    history([view(1, (0,))], into=run)
    assert [row["state"] for row in member_rows(run, (), NOW_S).values()] == ["running", "gone"]


def test_state_that_comes_is_shown_until_the_replica_trains() -> None:
    run = history([fetched(0, 100, 100, here=True), fetched(1, 50, 150)], process="replica 3")
    seen = [Seen("replica 3", 3, "Qm3", "joining")]
    of_all = {"received_bytes": 150, "expected_bytes": 200}
    of_fragment = {"fragment": 1, "fragment_received_bytes": 50, "fragment_expected_bytes": 100}
    assert member_rows(run, seen, NOW_S)["3"]["fetched"] == {**of_all, **of_fragment}
    history([started()], process="replica 3", into=run)
    assert member_rows(run, seen, NOW_S)["3"]["fetched"] is None
    history([fetched(0, 5, 5, step=7)], process="replica 3", into=run)
    assert member_rows(run, seen, NOW_S)["3"]["fetched"]["received_bytes"] == 5, "it has rejoined"
    history([step(8)], process="replica 3", into=run)
    assert member_rows(run, seen, NOW_S)["3"]["fetched"] is None


def test_of_a_swarm_the_table_has_what_peers_say_and_a_lie_is_no_number() -> None:
    status = {"step": 9, "sent_bytes": "<b>", "codec": ["no text"], "link_bits_per_s": float("nan"), "pace": 0.5}
    seen = [Seen("replica 4", 4, "Qm4", "training", NOW_S - 2, "direct", 0.25, status)]
    row = member_rows(RunHistory(), seen, NOW_S)["4"]
    assert (row["step"], row["heard_s"], row["round_trip_s"], row["pace"]) == (9, 2.0, 0.25, 0.5)
    assert (row["sent_bytes"], row["codec"], row["link_bits_per_s"]) == (None, "", None)


def test_of_a_peers_faults_the_table_has_what_more_of_the_others_say_than_could_lie() -> None:
    said = {
        0: faults_message({2: Faults(late=3), 1: Faults(against=2)}, me=0),
        1: faults_message({0: Faults(spoilt=1 << 50)}, me=1),
        2: {"spoilt": "\x1b[2J", "missed": [[[]]]},
        3: faults_message({2: Faults(late=5, missed=1), 1: Faults(against=2)}, me=3),
    }
    seen = [
        Seen(f"replica {m}", m, f"Qm{m}", "training", status={"members": [0, 1, 2, 3], "faults": faults})
        for m, faults in said.items()
    ]
    rows = member_rows(RunHistory(), [*seen, Seen("replica 4", 4, "Qm4", "training")], NOW_S)
    assert [rows[str(m)]["faults"] for m in range(5)] == ["none", "2 against", "3 late", "none", ""]
    assert member_rows(RunHistory(), [], NOW_S) == {}


def test_outer_telemetry_is_the_mean_over_fragments_as_one_replica_tells_it() -> None:
    rounds = [
        committed(m, p, k, mean_norm=float(10 * k + p), spread=None) for k in range(3) for p in (0, 1) for m in (0, 1)
    ]
    run = history([started(), *rounds])
    columns = run.first.outer.columns
    rows = run.first.outer.rows()
    assert [row[columns.index("mean_norm")] for row in rows] == [0.5, 10.5], "the third outer step is incomplete"
    assert {row[columns.index("spread")] for row in rows} == {None}
    assert len(history([started(), committed(0, 0, 0), committed(0, 0, 1)]).first.outer) == 0


def test_who_was_last_and_by_how_much_as_the_one_says_that_waited_longest() -> None:
    run = history([started(), committed(0, 0, 0, late_s=(0.0, 0.2)), committed(1, 0, 0, late_s=(0.5, 0.0))])
    cell = run.grid.cells[0, 0]
    assert (cell.last, cell.last_after_s) == (0, 0.5)
    assert [run.grid.parts[replica].late_s for replica in (0, 1)] == [0.5, 0.0]
    assert history([started(), committed(0, 0, 0)]).grid.cells[0, 0].last is None


@pytest.mark.parametrize("late_s", ["soon", [None, "x"], [math.nan], [[]], 7])
def test_lateness_of_a_stranger_is_a_number_or_nothing(late_s: object) -> None:
    run = history([started(), committed(0, 0, 0, late_s=late_s)])
    assert run.grid.cells[0, 0].last is None


def test_the_lowest_replica_that_is_not_far_behind_speaks_for_the_run() -> None:
    run = history([started(), step(10)], process="replica 0")
    history([started(), step(990)], process="replica 2", into=run)
    history([started(), step(1_000)], process="replica 10", into=run)
    assert run.first is run.processes["replica 2"]
    assert run.names == ["replica 0", "replica 2", "replica 10"]


def test_the_newest_evaluation_counts_whoever_made_it() -> None:
    run = history([started(), evaluated(1, 3.0)], process="replica 0")
    history([started(), evaluated(2, 2.0)], process="replica 1", into=run)
    history([started(), step(3)], process="replica 2", into=run)
    assert run.evaluated == [run.processes["replica 1"], run.processes["replica 0"]]
