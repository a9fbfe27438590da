"""The sinks of a run, combined so that an error in one of them affects neither the run nor the other sinks.

``metrics.jsonl`` has one JSON object per event, in the order in which the events happened. In schema 1, every record
has ``schema`` (1), ``event`` (the name of a class in `diloco.events`), ``step`` (inner steps finished), ``time_s``
(when it was written, in seconds since 1970 by this machine's clock) and the fields of its event. The text is ASCII, so
that the file never ends in half a character. The file is append-only. A run that resumes from step s writes a new
``RunStarted`` with ``step`` = s, which supersedes every earlier record with a greater step. A run that is killed while
it writes leaves an incomplete line at the end. Readers skip it, and the next run removes it.

Trackers are sinks that pass the curves of a run to a program that draws them.
"""

import contextlib
import json
import operator
import os
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco import events
from diloco.errors import ConfigurationError, DataError, from_extra, nearest
from diloco.events import Event, Sink
from diloco.monitor.console import JsonConsole, LiveConsole, PlainConsole
from diloco.monitor.settings import MonitorSettings
from diloco.plugins import call, is_own
from diloco.private_files import check_regular, read_regular
from diloco.waiting import say


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
        if path.exists():
            check_regular(path, sys.maxsize)  # a FIFO would be waited for without end
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8", newline="\n", buffering=1)

    def handle(self, event: events.Event) -> None:
        """Append ``event``."""
        record = events.to_record(event) | {"time_s": round(time.time(), 3)}
        self._file.write(events.to_json(record) + "\n")

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
    lines = read_regular(path, sys.maxsize).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is incomplete or empty
        try:
            record = json.loads(line)
            schema, name, step = record["schema"], record["event"], operator.index(record["step"])
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            why = f"Line {number} of {path} is not a valid event record ({error!r}): {line[:80]!r}."
            raise DataError(f"{why} Remove that line to read the rest.") from error
        if schema != events.SCHEMA_VERSION:
            why = f"Line {number} of {path} has schema {schema}, not {events.SCHEMA_VERSION}."
            raise DataError(f"{why} Read the file with the version of diloco that wrote it.")
        if name == "RunStarted":
            records = [earlier for earlier in records if earlier["step"] <= step]
        records.append(record)
    if event is None:
        return records
    return [record for record in records if record["event"] == event]


def _curves(measurements: events.Measurements, event: events.Event) -> dict[str, float]:
    """Return name -> value of the curves of a tracker that ``event`` continues, at its step.

    There is none for each peer, which would be many: Prometheus has them.
    """
    values = {}
    for metric, value, label, which in measurements.of(event):
        if label != "peer":
            values[f"{metric.name}/{label} {which}" if label else metric.name] = value
    return values


class TensorBoardSink:
    """Writes curves, and samples as text, to ``folder``/tensorboard.

    `RunStarted` must be the first event. A resumed run adds a new file, which makes TensorBoard hide everything after
    the step that the run resumed from.
    """

    def __init__(self, folder: Path) -> None:
        with from_extra("monitor", "monitor.sinks='tensorboard' needs tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._make_writer = SummaryWriter
        self._writer: Any = None
        self._folder, self._measurements = folder / "tensorboard", events.Measurements()

    def handle(self, event: events.Event) -> None:
        """Process ``event``. TensorBoard's own thread writes the file."""
        values = _curves(self._measurements, event)
        match event:
            case events.RunStarted():
                self._writer = self._make_writer(str(self._folder), purge_step=event.step + 1, flush_secs=10)
            case events.SampleGenerated():  # as a code block, so that markup in it is shown
                lines = (event.prompt + event.text).split("\n")
                self._writer.add_text("sample", "\n".join(f"    {line}" for line in lines), event.step)
            case events.RunFinished():
                self._writer.flush()
            case _:
                for name, value in values.items():
                    self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        """End TensorBoard's thread."""
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """Sends curves, samples, the summary and the settings to Weights & Biases, whose own variables configure it:
    ``WANDB_MODE``, ``WANDB_PROJECT``, ``WANDB_ENTITY``, ``WANDB_NAME``, ``WANDB_RUN_GROUP``, ``WANDB_TAGS``.

    The x axis is the inner step. A resumed run continues the same W&B run, which the identifier in ``folder``/wandb/id
    names; W&B already has the steps that it repeats and skips them.

    Args:
        folder: the run folder; wandb writes its files to the subfolder wandb.
        config: the settings of the run by section, without addresses.
        name: the name of this process's run, unless ``WANDB_NAME`` gives one.
        group: the group of the run's processes, unless ``WANDB_RUN_GROUP`` gives one.

    Raises:
        ConfigurationError: if wandb can't be imported, has no API key, or can't reach its server.
    """

    def __init__(self, folder: Path, *, config: Mapping[str, Any], name: str, group: str | None) -> None:
        with from_extra("monitor", "monitor.sinks='wandb' needs wandb"):
            import wandb
        if wandb.setup().settings.mode in (None, "online") and not wandb.login(prompt=False, verify=False):
            raise ConfigurationError(
                "monitor.sinks='wandb' needs an API key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline."
            )
        self._wandb, self._measurements = wandb, events.Measurements()
        self._exit_code = 1  # until `RunFinished` arrives
        path = folder / "wandb" / "id"
        identifier = (path.read_text("utf-8").strip() if path.exists() else "") or secrets.token_hex(6)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{identifier}\n", "utf-8")
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "diloco"),
                name=os.environ.get("WANDB_NAME", name),
                group=os.environ.get("WANDB_RUN_GROUP", group),
                dir=str(folder),
                id=identifier,
                resume="allow",
                config=events.json_ready(config),
                allow_val_change=True,  # some settings may change when a run is resumed
                reinit="create_new",  # leaves a W&B run of the surrounding program alone
                settings=wandb.Settings(console="off", silent=True, finish_timeout=60.0),
            )
        except Exception as error:  # wandb's errors have no common base class
            ways = f"With WANDB_MODE=offline the run is written to {folder / 'wandb'}, for `wandb sync`."
            raise ConfigurationError(f"W&B can't be reached ({str(error).partition(chr(10))[0]}). {ways}") from error

    def handle(self, event: events.Event) -> None:
        """Pass ``event`` to wandb's own process, which sends it."""
        values: dict[str, Any] = dict(_curves(self._measurements, event))
        match event:
            case events.RunStarted():
                # the details have addresses of all replicas
                self._run.config.update({"facts": dict(event.facts)}, allow_val_change=True)
            case events.SampleGenerated():
                row = [event.step, event.prompt, event.text]
                values["sample"] = self._wandb.Table(["step", "prompt", "text"], [row])
            case events.RunFinished():
                self._exit_code = 130 if event.summary.get("interrupted") else 0
                self._run.summary.update(dict(event.summary))
        if values:
            self._run.log(values, step=event.step)

    def close(self) -> None:
        """Finish the W&B run, waiting at most a minute. Unsent data stays in the run folder, for ``wandb sync``."""
        self._run.finish(exit_code=self._exit_code)


class Sinks:
    """Passes every event to every sink. A sink that raises is dropped with a message, and the others continue.

    Args:
        sinks: name -> sink; messages use the name. A sink that fails is removed.
    """

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self.sinks = dict(sinks)

    def handle(self, event: Event) -> None:
        """Pass ``event`` to every sink. Only exceptions that stop the process, such as KeyboardInterrupt, propagate."""
        for name, sink in list(self.sinks.items()):
            try:
                sink.handle(event)
            except Exception as error:
                del self.sinks[name]
                with contextlib.suppress(Exception):  # it has just failed, and would report the same error again
                    sink.close()
                _print(f"{name} failed at step {event.step} and is no longer written", error, "training continues.")

    def close(self) -> None:
        """Close every sink, even if closing one of them fails. A second call does nothing."""
        while self.sinks:
            name, sink = self.sinks.popitem()
            try:
                sink.close()
            except Exception as error:
                _print(f"{name} could not be closed", error, "its last lines may be missing.")


def make_sinks(
    settings: MonitorSettings,
    folder: Path,
    *,
    is_terminal: bool,
    config: Mapping[str, Any] | None = None,
    name: str = "",
    group: str | None = None,
) -> Sinks:
    """Create the sinks that ``settings`` ask for: a console, ``metrics.jsonl``, trackers and the user's own.

    Args:
        folder: the run folder, which is created if it does not exist.
        is_terminal: whether standard output is a terminal with cursor movement.
        config: the settings of the run by section, for trackers.
        name: what a tracker calls this process. Default: the name of the folder.
        group: what a tracker calls all processes of the run, if there are several.

    Raises:
        ConfigurationError: if a setting cannot work. Nothing has been written then.
    """
    kind = settings.console
    offered = {"config": config or {}, "name": name or folder.resolve().name, "group": group}
    try:
        sinks = {text: _make_sink(text, folder, offered) for text in settings.sinks}
        sinks["metrics.jsonl"] = MetricsFile(folder / "metrics.jsonl")
    except OSError as error:
        raise ConfigurationError(f"What a sink writes in {folder} can't be written: {error}.") from error
    if kind == "auto" and is_terminal:
        sinks["the progress display"] = LiveConsole()
    elif kind == "json":
        sinks["the log"] = JsonConsole(name or folder.resolve().name)
    elif kind != "quiet":
        sinks["the plain output"] = PlainConsole()
    return Sinks(sinks)


def _make_sink(text: str, folder: Path, offered: Mapping[str, Any]) -> Sink:
    if is_own(text):
        sink: Sink = call("monitor.sinks", text, folder, kind=Sink, arguments={}, offered=offered)
        return sink
    if text == "tensorboard":
        return TensorBoardSink(folder)
    if text == "wandb":
        return WandbSink(folder, **offered)
    known = nearest(text, ("tensorboard", "wandb"))
    raise ConfigurationError(f"monitor.sinks={text!r} is unknown; {known} Your own is MODULE:NAME or FILE.py:NAME.")


def _print(what: str, error: Exception, then: str) -> None:
    """Print a message on standard error. It never raises, unlike `warnings` under ``-W error``."""
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    with contextlib.suppress(Exception):
        say(f"{what} ({why}); {then}", "error")
