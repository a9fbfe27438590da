import dataclasses
import json
import math
import re
import time
from pathlib import Path

import pytest

from diloco import events
from diloco.errors import DataError
from diloco.monitor import MetricsFile, TensorBoardSink, files, read_metrics
from tests.monitor.made_events import committed, evaluated, started, step


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


def test_a_line_is_in_the_file_as_soon_as_it_is_handled(tmp_path: Path) -> None:
    sink = MetricsFile(tmp_path / "metrics.jsonl")
    sink.handle(note(1))
    assert read_metrics(sink.path, "Note")[0]["step"] == 1
    sink.close()


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    summary = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "out": Path("runs/x"), "d": None}
    path = written(tmp_path / "m.jsonl", step(1, loss=math.nan), events.RunFinished(step=1, summary=summary))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    first, last = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert math.isnan(float(first["loss"]))
    assert last["summary"] == {"a": "NaN", "b": ["Infinity", {"c": "-Infinity"}], "out": "runs/x", "d": None}
    assert float(last["summary"]["b"][1]["c"]) == -math.inf


@pytest.mark.parametrize("half", ['{"schema": 1, "event": "No', "x" * 65_535, "x" * 65_536, "é" * 100_000])
def test_half_a_line_is_passed_over_by_readers_and_cut_off_by_the_next_run(tmp_path: Path, half: str) -> None:
    path = written(tmp_path / "m.jsonl", note(1), note(2))
    whole = path.read_bytes()
    path.write_bytes(whole + half.encode())
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    written(path, note(3))
    assert path.read_bytes().startswith(whole)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 200_000])
def test_a_file_without_one_whole_line_begins_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    written(path, note(3))
    assert [record["step"] for record in read_metrics(path)] == [3]


def test_every_cut_of_the_last_line_leaves_the_lines_before_it(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", note(1), note(2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        written(path)
        assert path.read_bytes() == whole[:first]


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


@pytest.mark.parametrize("damage", ["{", "[]", "3", '{"event": "Note", "step": 1}'])
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path / "m.jsonl", note(1))
    path.write_text(path.read_text() + damage + "\n" + path.read_text())
    with pytest.raises(DataError, match=r"Line 2 of .* is not a valid event record"):
        read_metrics(path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", note(1))
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(DataError, match=r"Line 1 of \S+ has schema 2"):
        read_metrics(path)


def test_the_documented_schema_is_that_of_the_events() -> None:
    assert files.__doc__
    body = files.__doc__.split("=\n")[2]
    documented: dict[str, list[str]] = {}
    name = ""
    for line in body.splitlines():
        if match := re.match(r"(\w*) +(\w.*)", line):
            name = match[1] or name  # a continuation line has no event name
            documented.setdefault(name, []).extend(re.findall(r"\w+", match[2]))
    assert documented == {
        kind.__name__: [field.name for field in dataclasses.fields(kind) if field.name != "step"]
        for kind in events.Event.__subclasses__()
    }


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(p.step, p.value) for p in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_back_what_was_measured(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, every_steps=2)
    for event in (
        started(0),
        step(1, loss=4.0, model_flops_utilization=0.75),
        committed(0, 1, 0, step=1, wait_s=0.25),
        committed(0, 1, 0, step=1, wait_s=0.75, gain=0.5),
        committed(0, 2, 0, step=2, wait_s=0.5, gain=0.75, mean_norm=2.0, mean_cosine=None),
        step(2, loss=2.0, step_s=1.0, model_flops_utilization=0.375),
        evaluated(2, 3.5),
        step(3, loss=1.0, step_s=1.5),
    ):
        sink.handle(event)
    sink.close()
    assert curves(tmp_path) == {
        "loss/train(nats)": [(2, 3.0), (3, 1.0)],
        "time/step(s)": [(2, 0.75), (3, 1.5)],
        "time/throughput(tokens per s)": [(2, 6.0), (3, pytest.approx(1 / 1.5))],
        "time/model_flops_utilization(%)": [(2, 50.0)],
        "time/compute_utilization(%)": [(2, 75.0), (3, 75.0)],
        "transport/sent(bytes)": [(2, 2000.0), (3, 3000.0)],
        "transport/wait(s)": [(2, 0.5)],
        "fragment 1/gain": [(2, 0.5)],
        "fragment 2/gain": [(2, 0.75)],
        "fragment 2/mean_norm": [(2, 2.0)],
        "optimizer/learning_rate": [(2, 0.25), (3, 0.25)],
        "optimizer/gradient_norm": [(2, 2.0), (3, 2.0)],
        "loss/heldout(nats)": [(2, 3.5)],
    }


def test_tensorboard_hides_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    for events_of_a_run in (
        (started(0), step(1), evaluated(1, 7.0), step(2), step(3, loss=9.0), evaluated(3, 9.0)),
        (started(2), step(3, loss=5.0), evaluated(3, 5.0)),
    ):
        sink = TensorBoardSink(tmp_path, every_steps=1)
        for event in events_of_a_run:
            sink.handle(event)
        sink.close()
    seen = curves(tmp_path)
    assert seen["loss/train(nats)"] == [(1, 1.0), (2, 1.0), (3, 5.0)]
    assert seen["loss/heldout(nats)"] == [(1, 7.0), (3, 5.0)]


def test_tensorboard_shows_a_sample_literally(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path, every_steps=1)
    sink.handle(started(0))
    sink.handle(events.SampleGenerated(step=4, prompt="# a", text="<b>\nc"))
    sink.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (sample,) = accumulator.Tensors("sample/text_summary")
    assert (sample.step, sample.tensor_proto.string_val[0]) == (4, b"    # a<b>\n    c")


def test_a_tensorboard_sink_of_a_run_that_never_started_leaves_nothing(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path, every_steps=1).close()
    assert list(tmp_path.iterdir()) == []
