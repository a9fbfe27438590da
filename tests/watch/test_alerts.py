"""Each alert appears at its threshold and not below it, and names the culprit."""

import math
from pathlib import Path
from typing import Any

import pytest

from diloco import events
from diloco.events import Event
from tests.monitor.made_events import committed, sent, started, step, view, void
from tests.watch.runs import NOW_S, shown, write


def alerts(folder: Path, *, after_s: float = 0.0) -> list[tuple[str, str]]:
    return [(alert["kind"], alert["who"]) for alert in shown(folder, now_s=NOW_S + after_s)[0]["alerts"]]


def steps(count: int, **given: Any) -> list[Event]:
    return [step(number, **given) for number in range(1, count + 1)]


def saved(free_bytes: int | None) -> Event:
    return events.CheckpointSaved(step=4, path="there", size_bytes=100, save_s=0.1, free_bytes=free_bytes)


START, OVER = started(num_replicas=3), events.RunFinished(step=9, summary={})
LOSES_2 = view(1, (0, 1), step=10, left=(2,), lost=(2,))
MISSED, ALL = [committed(0, 0, k) for k in range(3)], committed(0, 0, 9, contributors=(0, 1, 2))
SPIKES = [step(number, gradient_norm=100.0) for number in range(41, 51)]


@pytest.mark.parametrize(
    ("told", "after_s", "expected"),
    [
        ([*steps(30), *(sent(m, 0, 0, digest="a") for m in range(3)), ALL], 0, []),
        (steps(3), 60, []),
        (steps(3), 61, [("silent", "the run")]),
        (steps(20, step_s=10.0), 99, []),  # slow steps are no silence
        (steps(20, step_s=10.0), 101, [("silent", "the run")]),
        ([*steps(3), OVER], 9_999, []),
        (MISSED[:2], 0, []),
        (MISSED, 0, [("missed", "replica 2")]),
        ([void(0, 1, k) for k in range(2)], 0, []),
        ([void(0, 1, k) for k in range(3)], 0, [("void", "fragment 1")]),
        ([*[sent(0, 1, 4), void(0, 1, 4)] * 3, sent(0, 1, 4)], 0, [("void", "fragment 1")]),  # repeated
        ([*(void(0, 0, k) for k in range(3)), ALL], 0, []),
        ([sent(m, 0, 4, digest="ba"[m != 1]) for m in range(3)], 0, [("digest", "replica 1")]),
        ([*(sent(m, 0, 4, digest="ba"[m != 1]) for m in range(3)), ALL], 0, []),
        ([step(1, math.nan)], 0, [("not finite", "the run")]),
        ([step(1, gradient_norm=math.inf)], 0, [("not finite", "the run")]),
        ([step(1, math.nan), *steps(300)], 0, []),  # long ago
        ([*steps(40), *SPIKES[:4]], 0, []),  # a spike alone is ordinary
        ([*steps(40), *SPIKES], 0, [("gradient norm", "the run")]),
        ([saved(300)], 0, []),
        ([saved(299)], 0, [("disk", "the run")]),
        ([saved(99), OVER], 0, []),
        ([*MISSED, step(1, math.nan)], 0, [("not finite", "the run"), ("missed", "replica 2")]),  # errors first
    ],
)  # fmt: skip
def test_alert_at_its_threshold(tmp_path: Path, told: list[Event], after_s: float, expected: list[Any]) -> None:
    assert alerts(write(tmp_path, [START, *told]), after_s=after_s) == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([LOSES_2, *(step(number) for number in range(150, 211))], ["replica 2"]),
        ([LOSES_2, *(step(number) for number in range(152, 212))], ["replica 2"]),  # many steps, but little time
        ([LOSES_2, *(step(number) for number in range(151, 212))], []),  # long ago
        ([LOSES_2, view(2, (0, 1, 2), step=20, joined=(2,))], []),  # it has rejoined
        ([LOSES_2, view(2, (0, 1, 7), step=20, joined=(7,))], []),  # another replica has taken its place
        ([LOSES_2, view(2, (0,), step=11, left=(1,), lost=(1,)), view(3, (0, 7), step=20, joined=(7,))], ["replica 2"]),
        ([view(1, (0,), step=10, left=(1, 2), lost=(1, 2))], ["replicas 1, 2"]),
        ([LOSES_2, OVER], []),
        ([view(1, (0, 1), step=10, left=(2,))], []),  # it announced its departure
        ([view(1, (), step=10, left=(0, 1, 2), lost=(0, 1, 2))], []),  # without a view it does not report on others
    ],
)
def test_lost_replica_until_it_is_replaced(tmp_path: Path, told: list[Event], expected: list[str]) -> None:
    assert alerts(write(tmp_path, [START, *told])) == [("lost", who) for who in expected]


def test_process_that_others_continue_without_is_neither_silent_nor_slow(tmp_path: Path) -> None:
    write(tmp_path, [START, *steps(20)])
    write(tmp_path / "replica-1", [START, *steps(20)])
    write(tmp_path / "replica-2", [START, *steps(20, step_s=9.0), step(21, math.nan), saved(99)])
    culprits = [("silent", f"replica {m}") for m in range(3)]
    rest = [("not finite", "replica 2"), ("disk", "replica 2"), ("slow", "replica 2")]
    assert alerts(tmp_path, after_s=99) == [*culprits, *rest]
    write(tmp_path, [LOSES_2, step(211)], end_s=NOW_S - 61)
    assert alerts(tmp_path, after_s=99) == [*culprits[:2], ("not finite", "replica 2")]


@pytest.mark.parametrize(("step_s", "expected"), [(0.75, []), (0.76, [("slow", "replica 1")])])
def test_replica_slower_than_the_others(tmp_path: Path, step_s: float, expected: list[Any]) -> None:
    for name in ("", "replica-2"):
        write(tmp_path / name, [START, *steps(20)])
    assert alerts(write(tmp_path / "replica-1", [START, *steps(20, step_s=step_s)]).parent) == expected
