"""Reading records that are being written, damaged, superseded, or from an untrusted peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.events import to_record
from diloco.monitor import MetricsFile, read_metrics
from diloco.watch import Record, Tail, number, numbers, parse, text, whole
from tests.monitor import made_events as made


def lines(*events: Any) -> bytes:
    return b"".join(json.dumps(to_record(event)).encode() + b"\n" for event in events)


def read_all(tail: Tail, most_bytes: int = 1 << 20) -> list[Record]:
    """Read as a follower of the file does: earlier records count until they are invalidated."""
    known: list[Record] = []
    while True:
        afresh, records = tail.read(most_bytes)
        known = [*([] if afresh else known), *records]
        if not tail.behind_bytes:
            return known


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30), st.integers(400, 2_000))
def test_it_reads_what_read_metrics_reads(tmp_path_factory: pytest.TempPathFactory, what: Any, piece: int) -> None:
    """Property: runs that resume repeatedly, read in pieces of any size that holds a line."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(lines(*(made.started(step) if start else made.step(step) for start, step in what)))
    assert read_all(Tail(path), piece) == read_metrics(path)


def test_it_follows_a_file_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail, whole_line = Tail(path), lines(made.step(2))
    assert tail.read() == (False, []), "the file does not exist yet"
    path.write_bytes(lines(made.started(), made.step(1)) + whole_line[:50])
    assert [record["step"] for record in tail.read()[1]] == [0, 1]
    assert tail.read() == (False, [])
    with path.open("ab") as file:
        file.write(whole_line[50:])
    assert [record["step"] for record in tail.read()[1]] == [2]
    assert tail.damaged == 0


def test_a_damaged_line_is_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(made.step(1)) + b'{"schema": 1, "ev\xff\n\n[1]\n' + lines(made.step(2)))
    tail = Tail(path)
    assert [record["step"] for record in tail.read()[1]] == [1, 2]
    assert (tail.damaged, tail.first_damaged) == (3, 2)


def test_a_line_longer_than_anybody_writes_does_not_stop_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 5_000 + b"\n" + lines(made.step(1)))
    tail = Tail(path)
    found = [record for _ in range(8) for record in tail.read(1_000)[1]]
    assert [record["step"] for record in found] == [1]
    assert tail.damaged > 0


def test_a_run_that_goes_back_makes_all_void(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(made.started(), *(made.step(step) for step in range(1, 6))))
    tail = Tail(path)
    tail.read()
    with path.open("ab") as file:
        file.write(lines(made.started(3), made.step(4)))
    afresh, records = tail.read()
    assert afresh
    assert [record["step"] for record in records] == [0, 1, 2, 3, 3, 4]
    assert tail.read() == (False, [])


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(made.started(), made.step(1), made.step(2)))
    tail = Tail(path)
    tail.read()
    path.write_bytes(lines(made.step(7)))
    assert tail.read() == (True, [to_record(made.step(7))])


def test_it_reads_what_a_run_writes(tmp_path: Path) -> None:
    sink = MetricsFile(tmp_path / "metrics.jsonl")
    sink.handle(made.step(1, loss=float("nan"), gradient_norm=float("inf")))
    sink.close()
    (record,) = Tail(sink.path).read()[1]
    assert str(number(record, "loss")) == "nan"
    assert number(record, "gradient_norm") == float("inf")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema": 2, "event": "Note", "step": 1}',
        b'{"schema": 1, "event": 5, "step": 1}',
        b'{"schema": 1, "event": "Note", "step": -1}',
        b'{"schema": 1, "event": "Note", "step": 1.5}',
        b'{"schema": 1, "event": "Note", "step": true}',
        b'{"schema": 1, "event": "Note", "step": 99999999999999999999}',
    ],
)
def test_what_is_no_record(line: bytes) -> None:
    assert parse(line) is None


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_a_field_of_any_kind_is_a_value_or_none(value: Any) -> None:
    record = {"field": value}
    assert number(record, "field") is None or isinstance(number(record, "field"), float)
    assert whole(record, "field") is None or isinstance(value, int)
    assert all(isinstance(each, int) for each in numbers(record, "field"))
    assert isinstance(text(record, "field"), str)
