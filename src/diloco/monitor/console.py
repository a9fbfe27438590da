"""The output of a run for people: a live progress display on a terminal, or plain lines."""

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from textwrap import indent
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderHook, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

from diloco import events
from diloco.events import METRICS
from diloco.metrics import Metric, metrics_of
from diloco.monitor.progress import RunProgress, counted
from diloco.terminal import plain, show_visibly
from diloco.units import (
    facts_table,
    format_bytes,
    format_count,
    format_duration,
    format_perplexity,
    format_ratio,
    perplexity,
    visible_lines,
)
from diloco.waiting import say

ROW_EVERY = 10  # steps between two rows; the last step always has one
_HEADER_EVERY = 30
_STYLES = {
    events.Evaluated: "green",
    events.RoundVoid: "yellow",
    events.ViewChanged: "cyan",
    events.Interrupted: "bold yellow",
}


class _Console:
    """What both consoles print: the facts of a run, notable events, samples and the summary."""

    encoding = "utf-8"

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._progress = clock, RunProgress()

    def _print(self, text: str, style: str = "") -> None:
        raise NotImplementedError

    def _tell(self, event: events.Event) -> float:
        """Print what ``event`` is worth, and return the time."""
        now_s, progress = self._clock(), self._progress
        line = progress.take(event, now_s)
        match event:
            case events.RunStarted():
                self._print(_title(event), "bold")
                self._table(event.facts)
            case events.SampleGenerated():
                at = "" if event.final else f" at step {event.step:,}"
                self._print(f"\nsample{at}, prompt {event.prompt!r}", "bold")
                sample = (event.prompt + event.text).strip("\n").replace("\n", "\n  ")
                self._print(f"  {sample}" if event.final else f"  {sample}\n")
            case events.RunFinished():
                done, total = progress.step, progress.total_steps
                self._print("\nfinished" if done >= total else f"\nstopped after step {done} of {total}", "bold")
                self._table(_summary(event.summary))
            case _ if line:
                at = f"{_done(event.step, progress)}  "
                self._print(at + line.replace("\n", "\n" + " " * len(at)), _STYLES.get(type(event), ""))
        return now_s

    def _table(self, facts: Mapping[str, str]) -> None:
        self._print(indent(facts_table(facts), "  "))

    def _shown(self, text: str) -> str:
        """Show control characters, and write what the stream can't encode as escapes."""
        return visible_lines(text).encode(self.encoding, "backslashreplace").decode(self.encoding)


class PlainConsole(_Console):
    """Plain lines for a log: the facts of the run, a row every ten steps, and a line per notable event.

    Lines have at most 80 columns unless a path or a message is longer, and every line is flushed.

    Args:
        stream: the stream to write to; by default, standard output at the time of the call.
        options: as for `_Console`.
    """

    def __init__(self, stream: TextIO | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._stream = sys.stdout if stream is None else stream
        self.encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._rows, self._row_step = 0, -1  # the number of rows, and the step of the last one

    def handle(self, event: events.Event) -> None:
        """Write the lines for ``event``, if there are any."""
        if isinstance(event, events.Evaluated | events.Interrupted | events.RunFinished):
            self._row()
        self._tell(event)
        match event:
            case events.RunStarted():
                self._heads()
            case events.StepFinished(step=step) if step % ROW_EVERY == 0 or step == self._progress.total_steps:
                self._row()

    def close(self) -> None:
        """Do nothing: every line has been flushed, and the stream stays open."""

    def _print(self, text: str, style: str = "") -> None:
        self._stream.write(self._shown(text) + "\n")
        self._stream.flush()

    def _heads(self) -> None:
        titles = ["step".rjust(len(_done(0, self._progress))) + " "]
        for field, metric in _columns(self._progress):
            titles.append(metric.column.rjust(metric.width))
            titles += ["perplexity", "epoch"] if field == "loss" else []
        self._print(" ".join([*titles, "  left"]))

    def _row(self) -> None:
        """Write the row of the last step, unless it has been written."""
        progress, last = self._progress, self._progress.last
        if last is None or progress.loss is None or last.step == self._row_step:
            return
        self._row_step = last.step
        if self._rows and self._rows % _HEADER_EVERY == 0:
            self._heads()
        self._rows += 1
        cells = [_done(last.step, progress) + " "]
        for field, metric in _columns(progress):
            cells.append(metric.show(progress.recent(field)).rjust(metric.width))
            if field == "loss":
                cells += [f"{format_perplexity(perplexity(progress.loss)):>10}", f"{last.epoch:5}"]
        self._print(" ".join([*cells, f"{_known(format_duration, progress.left_s):>6}"]))


class JsonConsole:
    """One JSON object a line on standard error: `diloco.waiting.say` with the fields of the event.

    Every tenth step has a line, and each event of which a console tells; ``process`` is the name of this process.
    """

    def __init__(self, process: str) -> None:
        self._process, self._progress = process, RunProgress()

    def handle(self, event: events.Event) -> None:
        """Write the line for ``event``, if there is one."""
        line, level = self._progress.take(event, time.monotonic()), "info"
        match event:
            case events.StepFinished():
                diverged = not math.isfinite(event.loss)
                if not (line or diverged or event.step % ROW_EVERY == 0 or event.step == self._progress.total_steps):
                    return
                line, level = line or f"loss {event.loss:.4f}", "error" if diverged else level
            case events.RunStarted():
                line = _title(event)
            case events.RunFinished():
                line = "the run has ended"
            case events.Lost():
                level = "error"
            case events.RoundVoid() | events.Interrupted():
                level = "warning"
            case events.ViewChanged() if event.lost:
                level = "warning"
        if line:
            say(line, level, process=self._process, **events.json_ready(events.to_record(event)))

    def close(self) -> None:
        """Do nothing: every line has been flushed."""


class VisibleConsole(Console):
    """A console on standard output that shows control characters in what it prints, and draws with its own."""

    def __init__(self) -> None:
        super().__init__(file=plain(sys.stdout), highlight=False)

    def push_render_hook(self, hook: RenderHook) -> None:
        super().push_render_hook(hook)
        show_visibly()  # a display passes on what others print, and would obey it

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            part if part.control else Segment(visible_lines(part.text), part.style) for part in buffer
        )


class LiveConsole(_Console):
    """A progress display at the bottom of the terminal. Lines for notable events scroll above it.

    The display is redrawn when an event arrives, at most every ``refresh_s`` seconds, so it needs no thread. `close`
    restores the terminal (its cursor and the standard streams) and must be called even after errors.

    Args:
        console: the console to draw on; by default, one on standard output.
        refresh_s: the minimum time between two redraws, in seconds.
        options: as for `_Console`.
    """

    def __init__(self, console: Console | None = None, *, refresh_s: float = 0.2, **options: Any) -> None:
        super().__init__(**options)
        self._console = console or VisibleConsole()
        self.encoding = self._console.encoding
        self._refresh_s = refresh_s
        self._live = Live(self, console=self._console, auto_refresh=False)
        self._drawn_s = -float("inf")

    def handle(self, event: events.Event) -> None:
        """Process ``event``: print its lines above the display, and redraw the display if it is due."""
        if isinstance(event, events.RunFinished) or getattr(event, "final", False):
            self._live.stop()  # training has ended: the display stays as it is, and further lines go below it
        now_s = self._tell(event)
        if isinstance(event, events.RunStarted):
            self._print("")
            self._live.start()
        if self._live.is_started and now_s - self._drawn_s >= self._refresh_s:
            self._drawn_s = now_s
            self._live.refresh()

    def close(self) -> None:
        """Draw the display a last time and restore the terminal."""
        self._live.stop()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(self._shown(text), style), soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw a progress bar and two lines, cut to the width of the terminal."""
        progress, width = self._progress, options.max_width
        total = max(1, progress.total_steps)
        left = _known(format_duration, progress.left_s)
        done = f"{_done(progress.step, progress)}  {100 * progress.step // total:3d} %  {left:>6} left  "
        yield Segment(done[:width])
        if len(done) < width:
            bar = ProgressBar(total, progress.step, width - len(done), complete_style="cyan", finished_style="green")
            yield from console.render(bar, options)
        last, loss, heldout, best = progress.last, progress.loss, progress.heldout_loss, progress.best_heldout_loss
        if last is not None and loss is not None:
            lowest = "" if best is None else f" (best {best:.4f})"
            tried = "" if heldout is None else f"held-out {heldout:.4f}{lowest}  "
            exp_loss = format_perplexity(perplexity(loss))
            yield Segment(f"\nloss {loss:.4f} (perplexity {exp_loss})  {tried}epoch {last.epoch}"[: width + 1])
            rounds = f"rounds {progress.committed}, void {progress.void}"
            figures = [f"{metric.show(progress.recent(field))} {metric.column}" for field, metric in _columns(progress)]
            yield Segment(f"\n{'  '.join(figures[1:])}  {rounds}  lr {last.learning_rate:.1e}"[: width + 1])
        yield Segment.line()


def _done(step: int, progress: RunProgress) -> str:
    total = str(progress.total_steps)
    return f"{step}/{total}".rjust(2 * len(total) + 1)


def _known(form: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else form(value)


def _columns(progress: RunProgress) -> list[tuple[str, Metric]]:
    """Return field and metric of the columns about steps. That of the device's use needs its peak, if that is known."""
    columns = [(field, metric) for field, metric in metrics_of(events.StepFinished).items() if metric.column]
    return [column for column in columns if progress.peak_known or column[0] != "model_flops_utilization"]


def _title(event: events.RunStarted) -> str:
    tokens = "" if event.names else f" of {event.tokens_per_step:,} tokens"  # the replicas of a swarm come and go
    replicas = "a swarm" if event.names else counted(event.num_replicas)
    size = f"{format_count(event.parameters)} parameters, {event.total_steps} steps{tokens}"
    return f"{event.algorithm}, {replicas}, {size}" + (f", resuming after step {event.step}" if event.step else "")


def _summary(values: Mapping[str, Any]) -> dict[str, str]:
    known: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    sent, baseline = known.get("sent_bytes_per_replica"), known.get("data_parallel_bytes_per_replica", 0)
    start, steps = known.get("shared_start_steps", 0), known.get("trained_steps", known.get("steps", 0))
    if joined := known.get("joined_at_step"):
        known["here"] = f"joined at step {joined}: what follows is of the {steps} steps that it trained"
    if sent is not None:
        known["sent"] = _sent(sent, baseline)
    if 0 < start < steps:
        later = (sent or 0) - known.get("shared_start_sent_bytes_per_replica", 0)
        known["after start"] = _sent(later, baseline * (steps - start) / steps)
    share = METRICS["compute_utilization"].show
    forms: dict[str, dict[str, Callable[[Any], str]]] = {  # name of a row -> key -> its text
        "held-out loss": {
            "heldout_loss": "{:.4f} nats per token".format,
            "perplexity": lambda value: f"perplexity {format_perplexity(value)}",
            "bits_per_byte": "{:.4f} bits per byte".format,
        },
        "by replica": {
            "sites_loss": "{:.4f} by tokens over all replicas' own data".format,
            "local_loss": "{:.4f} here with local parameters".format,
        },
        "trained": {
            "steps": "{} steps".format,
            "tokens": lambda value: f"{format_count(value)} tokens",
            "wall_s": lambda value: f"in {format_duration(value)}",
            "tokens_per_s": lambda value: f"{format_count(value)} tokens/s",
            "model_flops_utilization": lambda value: f"MFU {share(value)}",
        },
        "this replica": {"here": str},
        "sent": {"sent": str},
        "after start": {"after start": str},
        "utilisation": {"compute_utilization": lambda value: f"{share(value)} compute"},
        "rounds": {"rounds_committed": "{} committed".format, "rounds_void": "{} void".format},
        "digest": {"global_params_digest": str},
        "run folder": {"out": str},
        "curves": {"out": lambda value: f"diloco watch {shlex.quote(value)}"},
        "TensorBoard": {"out": lambda value: "--sinks tensorboard (pip install 'diloco[monitor]')"},
    }
    rows = {row: [form(known[key]) for key, form in keys.items() if key in known] for row, keys in forms.items()}
    return {row: ", ".join(parts) for row, parts in rows.items() if parts}


def _sent(sent: float, baseline: float) -> str:
    text = f"{format_bytes(sent)} per replica" + (f"; data-parallel: {format_bytes(baseline)}" if baseline else "")
    return f"{text}, {format_ratio(baseline / sent)} as much" if sent and baseline else text
