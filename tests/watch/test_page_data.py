"""The content of the page, and the differences that are sent."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from diloco import events
from diloco.watch import CHUNK_ROWS, MOST_LINES, OUTER_STEPS, RunHistory, Thresholds, Watched, difference, page_data
from tests.monitor.made_events import committed, evaluated, fetched, sent, started, step
from tests.watch.stories import NOW_S, history


def shown(*runs: Watched) -> dict[str, Any]:
    return page_data(runs, Thresholds(), NOW_S)


def merge(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch as in RFC 7396, section 2."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        else:
            target[key] = value
    return target


VALUES = st.recursive(
    st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.text("ab", max_size=2), inner, max_size=4),
)
MAPS = st.dictionaries(st.text("ab", max_size=2), VALUES, max_size=4)


@given(MAPS, MAPS)
def test_a_difference_makes_the_new_one_of_the_old_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert merge(copy.deepcopy(old), difference(old, new)) == new
    assert difference(new, new) == {}


def test_what_is_not_known_is_none_and_never_zero() -> None:
    header = shown(Watched("run", "there"))["runs"]["0"]["header"]
    assert {name: value for name, value in header.items() if value not in (None, "")} == {"state": "not started"}


def test_who_takes_over_the_state_of_others_is_joining() -> None:
    header = shown(Watched("run", "there", history([fetched(1, 50, 150)])))["runs"]["0"]["header"]
    assert header["state"] == "joining"
    assert header["fetched"]["received_bytes"] == 150


def test_the_header() -> None:
    told = [
        started(total_steps=100, tokens_per_step=8, data_parallel_bytes_per_step=100_000),
        *(step(number, tokens=8 * number, step_s=0.5) for number in range(1, 11)),
        evaluated(10, 2.5),
        committed(0, 0, 0),
    ]
    header = shown(Watched("run", "there", history(told)))["runs"]["0"]["header"]
    assert (header["state"], header["step"], header["total_steps"], header["tokens"]) == ("running", 10, 100, 80)
    assert header["left_s"] == 90, "one step was written per second"
    assert header["tokens_per_s"] == 16
    assert header["data_parallel_bytes"] == 1_000_000
    assert (header["heldout_loss"], header["best_heldout_loss"], header["merged"], header["void"]) == (2.5, 2.5, 1, 0)
    assert header["mfu"] is None


def test_the_summary_counts_once_a_run_is_over() -> None:
    summary = {"sent_bytes_per_replica": 5, "data_parallel_bytes_per_replica": 50, "heldout_loss": 1.5}
    run = history([started(), step(9), events.RunFinished(step=9, summary=summary)])
    header = shown(Watched("run", "there", run))["runs"]["0"]["header"]
    assert (header["state"], header["sent_bytes"], header["data_parallel_bytes"], header["left_s"]) == (
        "finished",
        5,
        50,
        None,
    )
    assert header["heldout_loss"] == 1.5


def test_settings_in_which_runs_differ() -> None:
    runs = [
        Watched("a", "a", settings={"seed": "0", "sync.codec": "fp4", "out": "a"}),
        Watched(
            "b", "b", settings={"seed": "0", "sync.codec": "int8", "out": "b", "sync.arguments.average.max_norm": "1"}
        ),
    ]
    assert shown(*runs)["settings"] == [["sync.codec", ["fp4", "int8"]], ["sync.arguments.average.max_norm", ["", "1"]]]
    assert shown(runs[0])["settings"] == []


def test_numbers_that_are_not_finite_become_gaps_that_json_has() -> None:
    run = history([started(), step(1, math.nan, gradient_norm=math.inf), evaluated(1, math.nan)])
    json.dumps(shown(Watched("run", "there", run)), allow_nan=False)


def test_a_step_more_is_little_to_send() -> None:
    run = Watched("run", "there", history([started(total_steps=9_999), *(step(n) for n in range(1, 10_001))]))
    before = json.loads(json.dumps(shown(run)))
    history([step(10_001)], into=run.history)
    patch = difference(before, json.loads(json.dumps(shown(run))))
    assert list(patch["runs"]["0"]["lines"][""]) == ["chunks"]
    assert len(json.dumps(patch)) < 200 * CHUNK_ROWS < len(json.dumps(before))


def test_of_many_processes_some_are_drawn_and_all_listed() -> None:
    run = RunHistory()
    for replica in range(64):
        history([started(num_replicas=64), step(1)], process=f"replica {replica}", into=run)
    data = shown(Watched("run", "there", run))["runs"]["0"]
    assert (len(data["lines"]), data["undrawn"], len(data["peers"])) == (MOST_LINES, 64 - MOST_LINES, 64)


def test_64_peers_are_a_small_page_and_little_memory() -> None:
    """Checked by size, because times depend on the machine. The run has more rounds than are kept."""
    everybody = tuple(range(64))
    run = history([started(num_replicas=64), *(step(number) for number in range(1, 1_001))])
    rounds = [(replica, fragment, k) for k in range(OUTER_STEPS + 16) for fragment in range(2) for replica in everybody]
    history((sent(*each, digest="a" * 32) for each in rounds), into=run)
    history((committed(*each, contributors=everybody) for each in rounds), into=run)
    assert len(json.dumps(shown(Watched("run", "there", run)))) < 400_000
    assert len(pickle.dumps(run)) < 2_000_000


def test_a_longer_run_takes_no_more_room() -> None:
    sizes = []
    for count in (1_000, 20_000):
        run = Watched("run", "there", history([started(), *(step(number) for number in range(1, count + 1))]))
        sizes.append(len(json.dumps(shown(run))))
    assert sizes[1] < 1.3 * sizes[0]
