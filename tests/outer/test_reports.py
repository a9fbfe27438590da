"""A loop of one's own learns of what goes wrong, and can report its losses to those who watch it."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco import ConfigurationError, DiLoCo, Fault, InProcessTransport, RoundId, SyncSchedule
from diloco.events import Event, Note, RoundCommitted, RoundVoid, StepFinished
from diloco.integrations import Figures
from diloco.monitor import Curves, MetricsFile, Sinks
from diloco.outer import Warnings
from diloco.watch import FollowedFolder, page_data
from tests.replicas import Vectors

EVERY_STEP = SyncSchedule(inner_steps=1)


LOST = [Fault(kind="drop", replica=1, round=RoundId(0, outer_step)) for outer_step in range(9)]


def loops(num_replicas: int, *, faults: Sequence[Fault] = (), **arguments: Any) -> list[tuple[Any, Any, DiLoCo]]:
    hub = InProcessTransport(num_replicas, faults=faults)
    made = []
    for number in range(num_replicas):
        model = Vectors()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        made.append(
            (
                model,
                optimizer,
                DiLoCo(model, optimizer, transport=hub.endpoint(number), schedule=EVERY_STEP, **arguments),
            )
        )
    return made


def run(replicas: list[tuple[Any, Any, DiLoCo]], steps: int) -> None:
    for _ in range(steps):
        for model, optimizer, diloco in replicas:
            model.vector().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.begin()
        for _, _, diloco in replicas:
            diloco.finish()


def void(reason: str, outer_step: int = 0) -> RoundVoid:
    return RoundVoid(step=3, replica=0, fragment=0, outer_step=outer_step, reason=reason)


def test_void_rounds_warn_once_with_the_reason_and_what_to_do() -> None:
    replicas = loops(2, faults=LOST)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(replicas, 6)
    told = [str(each.message) for each in caught]
    assert len(told) == len(replicas), "each replica once, in six rounds"
    for words in told:
        assert words.startswith("A round failed: fragment 0, outer step 0 is void: 1 of 2 contributions are usable"), (
            words
        )
        assert "remove the cause" in words
        assert "on_event" in words
    assert replicas[0][2].rounds_void == 6


def test_a_listener_is_not_warned_and_undisturbed_rounds_warn_of_nothing() -> None:
    run(loops(1), 3)
    run(loops(2), 3)
    heard: list[Event] = []
    run(loops(2, faults=LOST, on_event=heard.append), 3)
    assert [type(event) for event in heard].count(RoundVoid) == 6


@pytest.mark.parametrize(
    ("events", "number"),
    [
        ([void("replica 1 was late by 2.5 s", n) for n in range(5)], 1),
        ([void("replica 1 was late by 0.5 s"), void("replica 2 was late by 71.25 s")], 1),
        ([void("replica 1 was late"), void("replica 1 is lost")], 2),
        ([Note(step=0, text="The state could not be fetched.")] * 2, 1),
        ([RoundVoid(step=0, replica=0, fragment=f, outer_step=f, reason=f"fragment {f}: x") for f in range(3)], 1),
    ],
)
def test_each_kind_of_reason_is_told_once(events: list[Event], number: int) -> None:
    listener = Warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for event in events:
            listener.handle(event)
    assert len(caught) == number


def test_a_fault_in_a_merged_round_is_told() -> None:
    event = RoundCommitted(
        step=1,
        replica=0,
        fragment=0,
        outer_step=0,
        contributors=(0,),
        sent_bytes=1,
        received_bytes=1,
        wait_s=0.0,
        note="the contribution of replica 1 was refused: it is too short",
    )
    with pytest.warns(UserWarning, match="with a fault: the contribution of replica 1 was refused: it is too short"):
        Warnings().handle(event)


def test_so_do_the_frameworks_loops() -> None:
    with pytest.warns(UserWarning, match="A round failed: replica 1 is lost"):
        Figures(None).handle(void("replica 1 is lost"))


def test_logged_losses_are_records_as_those_of_train_and_watch_shows_them(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    sinks = Sinks({"metrics.jsonl": MetricsFile(folder / "metrics.jsonl")})
    replicas = loops(1, on_event=sinks.handle)
    (diloco,) = (each[2] for each in replicas)
    for step in range(4):
        run(replicas, 1)
        diloco.log(loss=torch.tensor(2.0 - step / 4, requires_grad=True), tokens=100 * (step + 1), gradient_norm=0.5)
    run(replicas, 2)
    diloco.log(loss=math.nan)
    sinks.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "StepFinished"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 6]
    assert [line["loss"] for line in steps] == [2.0, 1.75, 1.5, 1.25, "NaN"]
    assert {*steps[0]} == {field.name for field in fields(StepFinished)} | {"schema", "event", "time_s"}
    assert [(line["tokens"], line["gradient_norm"]) for line in steps[-2:]] == [(400, 0.5), (None, None)]
    assert steps[0]["learning_rate"] == 0.25
    assert steps[0]["sent_bytes"] == diloco.transport.sent_bytes == 0
    assert all(0 <= line["compute_utilization"] <= 1 and 0 < line["step_s"] < 60 for line in steps)
    followed = FollowedFolder(folder)
    while followed.read():
        pass
    (shown,) = json.loads(page_data([followed.run], time.time()))["runs"]
    assert (shown["header"]["state"], shown["header"]["step"]) == ("running", 6)
    (line,) = shown["lines"].values()
    place = line["steps"]["columns"].index("loss")
    assert [row[place] for row in line["steps"]["rows"]][:4] == [2.0, 1.75, 1.5, 1.25]


def test_without_a_listener_a_loss_goes_nowhere() -> None:
    (each,) = loops(1)
    for loss in (1.0, 1, np.float32(1), np.array([1.0]), torch.ones(1, 1).bfloat16()):
        each[2].log(loss=loss)


@pytest.mark.parametrize("arguments", [{"loss": 1.0}, {"loss": 1.0, "tokens": 50, "gradient_norm": 2.0}])
def test_curves_have_what_was_logged_and_no_more(arguments: dict[str, Any]) -> None:
    points: list[Any] = []
    curves = Curves(1)
    replicas = loops(1, on_event=lambda event: points.append(curves.take(event)))
    run(replicas, 1)
    replicas[0][2].log(**arguments)
    step, values = points[-1]
    assert (step, values["loss/train(nats)"]) == (1, 1.0)
    assert ("optimizer/gradient_norm" in values) == ("gradient_norm" in arguments)
    assert ("time/throughput(tokens per s)" in values) == ("tokens" in arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss": "2.0"},
        {"loss": None},
        {"loss": torch.ones(2)},
        {"loss": torch.tensor(1j)},
        {"loss": torch.ones((), device="meta")},
        {"loss": True},
        {"loss": 1.0, "gradient_norm": "x"},
        {"loss": 1.0, "tokens": 1.5},
    ],
)
def test_what_is_no_number_is_not_logged(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{[*arguments][-1]} must be a"):
        loops(1)[0][2].log(**arguments)
