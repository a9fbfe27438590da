"""The files that a run writes: ``metrics.jsonl`` with every event, and curves for TensorBoard and other trackers.

``metrics.jsonl`` holds one JSON object per line, in the order in which the events happened. In schema 1, every record
has ``schema`` (1), ``event``, ``step`` (inner steps finished), ``time_s`` (when it was written, in seconds since 1970
by this machine's clock) and the fields of its event:

==================  ===================================================================================================
event               fields
==================  ===================================================================================================
RunStarted          total_steps, algorithm, num_replicas, parameters, tokens_per_step, resumed_from, flops_per_token,
                    peak_flops_per_s, data_parallel_bytes_per_step, facts
StepFinished        loss, learning_rate, gradient_norm, tokens, step_s, sent_bytes, received_bytes, compute_utilization,
                    skipped_replicas, trained, pace, model_flops_utilization
RoundSent           replica, fragment, outer_step, payload_bytes, saturated, digest, weight
RoundCommitted      replica, fragment, outer_step, contributors, sent_bytes, received_bytes, wait_s, clipped,
                    note, mean_norm, mean_cosine, momentum_cosine, gain, spread,
                    late_s
RoundVoid           replica, fragment, outer_step, reason
ViewChanged         replica, view, members, joined, left, lost, reason
StateFetched        fragment, fragment_received_bytes, fragment_expected_bytes, received_bytes, expected_bytes, here
Evaluated           heldout_loss, perplexity, bits_per_byte, heldout_tokens, final
CheckpointSaved     path, size_bytes, save_s, free_bytes
Interrupted         signal
SampleGenerated     prompt, text, final
Note                text
RunFinished         summary
==================  ===================================================================================================

`diloco.events` gives their meanings and units. Within one schema, fields may be added but never renamed or removed. The
text is ASCII, with other characters as ``\\u`` escapes, so that the file never ends in half a character and contains no
exotic line ends.

- JSON has no NaN. A non-finite float is written as the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, so
  ``float(record["loss"])`` works in every case.
- The file is append-only. A run that resumes from step s writes a new ``RunStarted`` with ``step`` = s, which
  supersedes every earlier record with a greater step; `read_metrics` skips those.
- A run that is killed while it writes leaves an incomplete line at the end. Readers skip it, and the next run removes
  it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from diloco import events
from diloco.errors import ConfigurationError, DataError

__all__ = ["Curves", "MetricsFile", "TensorBoardSink", "read_metrics"]

_MEASURES = ("mean_norm", "mean_cosine", "momentum_cosine", "gain", "spread")

Point = tuple[int, dict[str, float]]  # a step, and curve name (with the unit) -> value at that step


class MetricsFile:
    """Appends every event to ``path`` as one line of JSON, which reaches the operating system at once.

    A process that dies loses at most the line that it was writing. An incomplete line at the end of an existing file is
    removed.

    Raises:
        OSError: if the file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_half_line(path)
        self._file = path.open("a", encoding="utf-8", newline="\n", buffering=1)

    def handle(self, event: events.Event) -> None:
        """Append ``event``."""
        record = events.to_record(event) | {"time_s": round(time.time(), 3)}
        self._file.write(json.dumps(events.json_ready(record), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a ``metrics.jsonl`` in order, without those that a resumed run superseded.

    Args:
        path: the file, which the run may still be writing.
        event: the name of an event, such as ``"Evaluated"``, to return only its records.

    Raises:
        DataError: if a line other than an incomplete last one is damaged, or if a record has another schema.
        OSError: if the file cannot be read.
    """
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is incomplete or empty
        try:
            record = json.loads(line)
            schema, name, step = record["schema"], record["event"], record["step"]
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"Line {number} of {path} is not a valid event record ({error!r}): {line[:80]!r}. Remove that line to "
                "read the rest."
            ) from error
        if schema != events.SCHEMA_VERSION:
            raise DataError(
                f"Line {number} of {path} has schema {schema}, but this version of diloco reads only schema "
                f"{events.SCHEMA_VERSION}. Read the file with the version that wrote it."
            )
        if name == "RunStarted":
            records = [earlier for earlier in records if earlier["step"] <= step]
        records.append(record)
    return records if event is None else [record for record in records if record["event"] == event]


class Curves:
    """Reduces the events of a run to points of curves, one every ``every_steps`` steps and one at the last step.

    A point holds:

    - over the steps since the previous point: the means ``loss/train(nats)`` and ``time/step(s)``,
      ``time/throughput(tokens per s)`` of all replicas, ``time/model_flops_utilization(%)`` if the device's peak is
      known, and ``transport/wait(s)``, one replica's mean wait for a committed round;
    - at the step itself: ``transport/sent(bytes)`` by one replica so far, ``time/compute_utilization(%)``,
      ``optimizer/learning_rate`` and ``optimizer/gradient_norm``;
    - for the last round of each fragment, if telemetry is on: ``fragment 0/mean_norm``, ``/mean_cosine``,
      ``/momentum_cosine``, ``/gain`` and ``/spread``.

    An evaluation gives a point of its own with ``loss/heldout(nats)``.

    Args:
        every_steps: steps between two points, at least 1.
    """

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps
        self._last: events.StepFinished | None = None
        self._losses: list[float] = []
        self._step_s: list[float] = []
        self._utilizations: list[tuple[float, float]] = []  # (fraction, seconds)
        self._tokens: list[int] = []  # token counts at the last point and at every step since
        self._tokens_per_step = 0
        self._wait_s: list[float] = []
        self._measures: dict[str, float] = {}

    def take(self, event: events.Event) -> Point | None:
        """Process ``event``, and return the point that it completes, if any."""
        match event:
            case events.RunStarted():
                self._tokens_per_step = event.tokens_per_step
            case events.StepFinished():
                self._last = event
                self._losses.append(event.loss)
                self._step_s.append(event.step_s)
                if event.tokens is not None:
                    self._tokens = [*(self._tokens or [event.tokens - self._tokens_per_step]), event.tokens]
                if event.model_flops_utilization is not None:
                    self._utilizations.append((event.model_flops_utilization, event.step_s))
                if event.step % self._every_steps == 0:
                    return self.rest()
            case events.RoundCommitted():
                self._wait_s.append(event.wait_s)
                measured = {name: getattr(event, name) for name in _MEASURES}
                named = {f"fragment {event.fragment}/{name}": value for name, value in measured.items()}
                self._measures |= {name: value for name, value in named.items() if value is not None}
            case events.Evaluated():
                return event.step, {"loss/heldout(nats)": event.heldout_loss}
            case events.RunFinished():
                return self.rest()
        return None

    def rest(self) -> Point | None:
        """Return a point for the steps since the last point, or None if there are none."""
        last = self._last
        if last is None or not self._losses:
            return None
        values = {
            "loss/train(nats)": _mean(self._losses),
            "time/step(s)": _mean(self._step_s),
            "time/compute_utilization(%)": 100 * last.compute_utilization,
            "transport/sent(bytes)": float(last.sent_bytes),
            "optimizer/learning_rate": last.learning_rate,
        }
        if self._tokens:
            gained = self._tokens[-1] - self._tokens[0]
            values["time/throughput(tokens per s)"] = gained / max(1e-9, sum(self._step_s))
        if last.gradient_norm is not None:
            values["optimizer/gradient_norm"] = last.gradient_norm
        if self._wait_s:
            values["transport/wait(s)"] = _mean(self._wait_s)
        if self._utilizations:
            useful_s = sum(fraction * step_s for fraction, step_s in self._utilizations)
            spent_s = sum(step_s for _, step_s in self._utilizations)
            values["time/model_flops_utilization(%)"] = 100 * useful_s / spent_s
        values |= self._measures
        self._losses, self._step_s, self._wait_s, self._utilizations, self._measures = [], [], [], [], {}
        self._tokens = self._tokens[-1:]
        return last.step, values


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


class TensorBoardSink:
    """Writes the `Curves` of a run, and generated samples as text, for TensorBoard.

    `RunStarted` must be the first event. A resumed run adds a new file, which makes TensorBoard hide everything after
    the step that the run resumed from.

    Args:
        every_steps: steps between two points, at least 1.

    Raises:
        ConfigurationError: if TensorBoard cannot be imported.
    """

    def __init__(self, folder: Path, every_steps: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                f"TensorBoard cannot be imported ({error}). Install it with `pip install tensorboard`, or set "
                "monitor.tensorboard = false."
            ) from error
        self._make_writer = SummaryWriter
        self._writer: Any = None
        self._folder = folder
        self._curves = Curves(every_steps)

    def handle(self, event: events.Event) -> None:
        """Process ``event``. TensorBoard's own thread writes the file."""
        point = self._curves.take(event)
        match event:
            case events.RunStarted():
                self._writer = self._make_writer(str(self._folder), purge_step=event.step + 1, flush_secs=10)
            case events.SampleGenerated():
                self._writer.add_text("sample", _literal(event.prompt + event.text), event.step)
            case events.RunFinished():
                self._draw(point)
                self._writer.flush()
            case _:
                self._draw(point)

    def close(self) -> None:
        """Write the remaining points, and end TensorBoard's thread."""
        if self._writer is not None:
            self._draw(self._curves.rest())
            self._writer.close()

    def _draw(self, point: Point | None) -> None:
        if point is not None:
            step, values = point
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)


def _literal(text: str) -> str:
    """Return ``text`` as a Markdown code block, so that TensorBoard does not render markup in it.

    >>> _literal("# no title\\n<b>")
    '    # no title\\n    <b>'
    """
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _cut_half_line(path: Path) -> None:
    """Truncate the file after its last newline, if the file exists."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep, piece = 0, 65_536
        for start in range(end - piece, -piece, -piece):
            file.seek(max(0, start))
            newline = file.read(min(piece, start + piece)).rfind(b"\n")
            if newline >= 0:
                keep = max(0, start) + newline + 1
                break
        if keep < end:
            file.truncate(keep)
