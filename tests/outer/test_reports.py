"""A loop of one's own learns of what goes wrong, and can report its losses to those who watch it."""

import json
import math
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from diloco import AlphaMerge, ConfigurationError, DiLoCo, RoundId, SyncSchedule
from diloco.events import StepFinished
from diloco.monitor import MetricsFile, Sinks
from tests.faults import Fault, FaultyTransport
from tests.replicas import Vectors


def test_void_rounds_warn_once_with_the_reason_and_what_to_do() -> None:
    lost = [Fault(kind="drop", replica=1, round=RoundId(0, outer_step)) for outer_step in range(9)]
    hub, models = FaultyTransport(2, faults=lost), [Vectors(), Vectors()]
    replicas = [
        DiLoCo(
            model,
            torch.optim.SGD(model.parameters()),
            transport=hub.endpoint(number),
            schedule=SyncSchedule(inner_steps=1),
            merge=AlphaMerge(),
        )
        for number, model in enumerate(models)
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            for diloco in replicas:
                diloco.begin()
            for diloco in replicas:
                diloco.finish()
    told = [str(each.message) for each in caught]
    assert len(told) == len(replicas), "each replica once, in six rounds"
    start = "A round failed: fragment 0, outer step 0 is void: 1 of 2 contributions are usable"
    assert all(words.startswith(start) and "remove the cause" in words and "on_event" in words for words in told)
    assert replicas[0].rounds_void == 6


def test_logged_losses_are_records_as_those_of_train_and_watch_shows_them(tmp_path: Path) -> None:
    folder, model = tmp_path / "mine", Vectors()
    sinks = Sinks({"metrics.jsonl": MetricsFile(folder / "metrics.jsonl")})
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    diloco = DiLoCo(model, inner, schedule=SyncSchedule(inner_steps=1), on_event=sinks.handle)
    for step in range(4):
        diloco.step()
        diloco.log(loss=torch.tensor(2.0 - step / 4, requires_grad=True), tokens=100 * (step + 1), gradient_norm=0.5)
    diloco.step()
    diloco.step()
    diloco.log(loss=math.nan)
    with pytest.raises(ConfigurationError, match="loss must be a number or a tensor of one value, got 'low'"):
        diloco.log(loss="low")  # type: ignore[arg-type]  # the point
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
