import dataclasses
import json
import math
import os
import time
from pathlib import Path

import pytest

from diloco import events
from diloco.errors import DataError
from diloco.monitor import MetricsFile, read_metrics
from tests.monitor.made_events import committed, started, step


def note(step: int, text: str = "hello") -> events.Note:
    return events.Note(step=step, text=text)


def written(path: Path, *facts: events.Event) -> Path:
    sink = MetricsFile(path)
    for event in facts:
        sink.handle(event)
    sink.close()
    return path


def test_every_event_is_one_line_that_reads_back(tmp_path: Path) -> None:
    facts = [
        started(0),
        step(1),
        committed(0, 1, 0, step=1, wait_s=0.5),
        note(2, 'line\nbreak "quoted" \u2028 é \ud800'),
    ]
    began_s = time.time()
    path = written(tmp_path / "new" / "metrics.jsonl", *facts)
    assert len(path.read_bytes().splitlines()) == len(facts)
    records = read_metrics(path)
    times_s = [record.pop("time_s") for record in records]
    assert records == [json.loads(json.dumps(events.to_record(event))) for event in facts]
    assert [began_s - 0.001, *times_s] == sorted([began_s - 0.001, *times_s])
    assert times_s[-1] <= time.time() + 0.001
    assert [record["wait_s"] for record in read_metrics(path, "RoundCommitted")] == [0.5]
    assert read_metrics(path, "Evaluated") == []


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    summary = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "out": Path("runs/x"), "d": None}
    path = written(tmp_path / "m.jsonl", step(1, loss=math.nan), events.RunFinished(step=1, summary=summary))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    first, last = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert math.isnan(float(first["loss"]))
    assert last["summary"] == {"a": "NaN", "b": ["Infinity", {"c": "-Infinity"}], "out": "runs/x", "d": None}
    assert float(last["summary"]["b"][1]["c"]) == -math.inf


def test_a_fifo_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        MetricsFile(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("half", ["", '{"schema": 1, "event": "No', "é" * 100_000])
def test_an_incomplete_last_line_is_ignored_and_removed_by_the_next_run(tmp_path: Path, half: str) -> None:
    path = written(tmp_path / "m.jsonl", note(1), note(2))
    whole = path.read_bytes()
    path.write_bytes(whole + half.encode())
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    written(path, note(3))
    assert path.read_bytes().startswith(whole)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


def test_what_a_resumed_run_does_again_is_superseded(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", started(0), step(1), step(2), step(3, loss=9.0), note(3, "lost"))
    before = path.read_bytes()
    written(path, started(2), step(3, loss=1.0))
    assert path.read_bytes().startswith(before)
    assert [(record["event"], record["step"]) for record in read_metrics(path)] == [
        ("RunStarted", 0),
        ("StepFinished", 1),
        ("StepFinished", 2),
        ("RunStarted", 2),
        ("StepFinished", 3),
    ]
    assert read_metrics(path, "StepFinished")[-1]["loss"] == 1.0
    assert read_metrics(path, "Note") == []


@pytest.mark.parametrize(
    "damage",
    [
        *("[]", "[" * 99_999, '{"event": "Note", "step": 1}', '{"schema": 1, "event": "Note", "step": "1"}'),
        '{"schema": 2, "event": "Note", "step": 1}',
    ],
    ids=["list", "nested", "no schema", "no step", "another schema"],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path / "m.jsonl", note(1))
    path.write_text(path.read_text() + damage + "\n" + path.read_text())
    with pytest.raises(DataError, match=r"Line 2 of .* (is not a valid event record|has schema 2)"):
        read_metrics(path)


SCHEMA_1 = """
RunStarted total_steps algorithm num_replicas parameters tokens_per_step resumed_from flops_per_token peak_flops_per_s
 data_parallel_bytes_per_step facts
StepFinished loss learning_rate gradient_norm tokens step_s sent_bytes received_bytes compute_utilization
 skipped_replicas trained pace model_flops_utilization
RoundSent replica fragment outer_step payload_bytes saturated digest weight
RoundCommitted replica fragment outer_step contributors sent_bytes received_bytes wait_s clipped note mean_norm
 mean_cosine momentum_cosine gain late_s
RoundVoid replica fragment outer_step reason
ViewChanged replica view members joined left lost reason
StateFetched fragment fragment_received_bytes fragment_expected_bytes received_bytes expected_bytes here
Evaluated heldout_loss perplexity bits_per_byte heldout_tokens final
CheckpointSaved path size_bytes save_s free_bytes
Interrupted signal
SampleGenerated prompt text final
Note text
RunFinished summary
"""


def test_fields_of_a_schema_are_added_and_never_renamed_or_removed() -> None:
    kinds = {
        kind.__name__: {field.name for field in dataclasses.fields(kind)} for kind in events.Event.__subclasses__()
    }
    for line in SCHEMA_1.replace("\n ", " ").strip().splitlines():
        name, *fields = line.split()
        assert {*fields, "step"} <= kinds[name]
