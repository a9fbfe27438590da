"""Each alert appears at its threshold and not below it, and names the culprit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from diloco import events
from diloco.errors import ConfigurationError
from diloco.events import Event
from diloco.watch import Alert, RunHistory, Seen, Thresholds, find_alerts
from tests.monitor.made_events import committed, sent, started, step, void
from tests.watch.stories import NOW_S, history


def alerts(
    run: RunHistory, seen: Sequence[Seen] = (), *, after_s: float = 0.0, free_bytes: int | None = None, **given: float
) -> list[Alert]:
    return find_alerts(run, seen, Thresholds(**given), NOW_S + after_s, free_bytes)  # type: ignore[arg-type]


def steps(count: int, **given: float) -> list[Event]:
    return [step(number, **given) for number in range(1, count + 1)]


def saved(size_bytes: int, free_bytes: int | None) -> events.CheckpointSaved:
    return events.CheckpointSaved(step=4, path="there", size_bytes=size_bytes, save_s=0.1, free_bytes=free_bytes)


def over() -> events.RunFinished:
    return events.RunFinished(step=9, summary={"steps": 9})


def test_a_run_in_which_all_is_well_has_none() -> None:
    run = history([started(), *steps(30), sent(0, 0, 0, digest="a"), sent(1, 0, 0, digest="a"), committed(0, 0, 0)])
    assert alerts(run, free_bytes=10**12) == []


def test_silence() -> None:
    run = history([started(), *steps(3)])
    assert alerts(run, after_s=60) == []
    (alert,) = alerts(run, after_s=61)
    assert (alert.level, alert.kind, alert.who, alert.step) == ("error", "silent", "the run", 3)


def test_slow_steps_are_no_silence_and_neither_is_an_end() -> None:
    assert alerts(history([started(), *steps(20, step_s=10.0)]), after_s=99) == []
    assert alerts(history([started(), *steps(20, step_s=10.0)]), after_s=101) != []
    assert alerts(history([started(), *steps(3), over()]), after_s=9_999) == []


@pytest.mark.parametrize(("state", "expected"), [("no answer", ["silent"]), ("gone", []), ("finished", [])])
def test_a_peer_that_does_not_answer(state: str, expected: list[str]) -> None:
    run = history([started(), *steps(3)], process="replica 5")
    found = alerts(run, [Seen("replica 5", 5, "Qm5", state, NOW_S - 61)])
    assert [alert.kind for alert in found] == expected
    assert all(alert.who == "replica 5" for alert in found)


def view(number: int, members: tuple[int, ...], *, at: int, **given: Any) -> events.ViewChanged:
    fields = {"replica": 0, "joined": (), "left": (), "reason": "nothing came for 8 s"}
    return events.ViewChanged(step=at, view=number, members=members, **{**fields, **given})


LOSES_2 = view(1, (0, 1), at=10, left=(2,), lost=(2,))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([LOSES_2, *(step(number) for number in range(150, 211))], ["replica 2"]),
        ([LOSES_2, *(step(number) for number in range(152, 212))], ["replica 2"]),  # many steps, but little time
        ([LOSES_2, *(step(number) for number in range(151, 212))], []),  # long ago
        ([LOSES_2, view(2, (0, 1, 2), at=20, joined=(2,))], []),  # it has rejoined
        ([LOSES_2, view(2, (0, 1, 7), at=20, joined=(7,))], []),  # another replica has taken its place
        ([LOSES_2, view(2, (0,), at=11, left=(1,), lost=(1,)), view(3, (0, 7), at=20, joined=(7,))], ["replica 2"]),
        ([view(1, (0,), at=10, left=(1, 2), lost=(1, 2))], ["replicas 1, 2"]),
        ([LOSES_2, over()], []),
        ([view(1, (0, 1), at=10, left=(2,))], []),  # it announced its departure
        ([view(1, (), at=10, left=(0, 1, 2), lost=(0, 1, 2))], []),  # without a view it does not report on others
    ],
)
def test_who_is_gone_without_a_word(told: list[Event], expected: list[str]) -> None:
    found = alerts(history([started(num_replicas=3), *told]))
    assert [alert.who for alert in found] == expected
    assert all(alert.kind == "lost" and alert.words.endswith("announcing it: nothing came for 8 s.") for alert in found)


def test_of_a_process_without_which_the_others_go_on_nothing_more_is_expected() -> None:
    """Its folder still exists, but its last records don't raise alerts forever: it is neither silent nor slow."""
    run = history([started(num_replicas=3), *steps(20)], process="replica 0")
    history([started(), *steps(20)], process="replica 1", into=run)
    told = [started(), *steps(20, step_s=9.0), step(21, math.nan), saved(100, 99)]
    history(told, process="replica 2", into=run, time_s=NOW_S - 61)
    kinds = ["silent", "silent", "silent", "not finite", "disk", "slow"]
    assert [alert.kind for alert in alerts(run, after_s=99)] == kinds
    history([LOSES_2, step(211)], process="replica 0", into=run, time_s=NOW_S - 61)
    assert [(alert.kind, alert.who) for alert in alerts(run, after_s=99)] == [
        ("silent", "replica 0"),
        ("silent", "replica 1"),
        ("not finite", "replica 2"),
    ]
    history([step(222)], process="replica 0", into=run)
    assert [alert.who for alert in alerts(run, after_s=99)] == ["replica 0", "replica 1"]


@pytest.mark.parametrize(("rounds", "expected"), [(2, []), (3, ["replica 2"])])
def test_rounds_without_somebody(rounds: int, expected: list[str]) -> None:
    run = history([started(num_replicas=3), *(committed(0, 0, k) for k in range(rounds))])
    assert [alert.who for alert in alerts(run)] == expected


@pytest.mark.parametrize(("rounds", "expected"), [(2, []), (3, ["fragment 1"])])
def test_void_rounds(rounds: int, expected: list[str]) -> None:
    run = history([started(), *(void(0, 1, k, "replica 1 was late") for k in range(rounds))])
    found = alerts(run)
    assert [alert.who for alert in found] == expected
    assert all("replica 1 was late" in alert.words for alert in found)


def test_a_digest_that_differs_is_told_for_some_rounds() -> None:
    run = history([started(num_replicas=3), *(sent(m, 0, 4, digest="b" if m == 1 else "a") for m in range(3))])
    assert [(alert.level, alert.who) for alert in alerts(run)] == [("error", "replica 1")]
    history([committed(0, 0, 9, contributors=(0, 1, 2))], into=run)
    assert alerts(run) == []


@pytest.mark.parametrize("given", [{"loss": math.nan}, {"gradient_norm": math.inf}])
def test_numbers_that_are_none(given: dict[str, float]) -> None:
    run = history([started(), step(1, **given)], time_s=NOW_S - 61)
    (alert,) = alerts(run, after_s=-61)
    assert (alert.kind, alert.step) == ("not finite", 1)
    history([step(number) for number in range(2, 203)], into=run)
    assert alerts(run) == []


@pytest.mark.parametrize(("norm", "expected"), [(10.0, []), (10.1, ["gradient norm"])])
def test_gradient_norms(norm: float, expected: list[str]) -> None:
    run = history([started(), *steps(20), step(21, gradient_norm=norm)])
    assert [alert.kind for alert in alerts(run)] == expected


@pytest.mark.parametrize(("step_s", "expected"), [(0.75, []), (0.76, ["replica 1"])])
def test_who_is_slower_than_the_others(step_s: float, expected: list[str]) -> None:
    run = history([started(), *steps(20)], process="replica 0")
    history([started(), *steps(20)], process="replica 2", into=run)
    history([started(), *steps(20, step_s=step_s)], process="replica 1", into=run)
    assert [alert.who for alert in alerts(run)] == expected
    assert alerts(run, [Seen("replica 1", 1, "Qm", "gone")]) == []


@pytest.mark.parametrize(("free", "expected"), [(300, []), (299, ["warning"]), (99, ["error"])])
def test_a_disk_that_is_nearly_full(free: int, expected: list[str]) -> None:
    """Free space as measured on this machine, or as reported by the run."""
    assert [each.level for each in alerts(history([started(), saved(100, None)]), free_bytes=free)] == expected
    assert [each.level for each in alerts(history([started(), saved(100, free)]))] == expected
    assert alerts(history([started(), saved(100, free), over()])) == []


def test_errors_come_first() -> None:
    run = history([started(num_replicas=3), *(committed(0, 0, k) for k in range(3)), step(1, math.nan)])
    assert [alert.level for alert in alerts(run)] == ["error", "warning"]


@pytest.mark.parametrize("name", ["silent_s", "missed_rounds", "void_rounds", "slower_factor", "free_checkpoints"])
def test_thresholds_that_make_no_sense(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"alert\.{name} must be .*, got 0\."):
        Thresholds(**{name: 0})  # type: ignore[arg-type]
