"""The output of a run for people: a live progress display on a terminal, or plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderHook, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from diloco import events
from diloco.monitor import wording
from diloco.monitor.progress import RunProgress
from diloco.terminal import plain, show_visibly
from diloco.units import format_bytes, format_count, format_duration, format_perplexity, perplexity, visible_lines

__all__ = ["LiveConsole", "PlainConsole", "VisibleConsole"]

_HEADER_EVERY = 30


class PlainConsole:
    """Plain lines for a log: the facts of the run, a row every ``every_steps`` steps, and a line per notable event.

    The output contains no control characters, and lines have at most 80 columns unless a path or a message is longer.
    Every line is flushed. Characters that the stream cannot encode are written as escapes.

    Args:
        stream: the stream to write to; by default, standard output at the time of the call.
        every_steps: steps between two rows, at least 1. The last step always has a row.
    """

    def __init__(
        self, stream: TextIO | None = None, *, every_steps: int = 10, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._every_steps = every_steps
        self._clock = clock
        self._progress = RunProgress()
        self._rows = 0
        self._row_step = -1

    def handle(self, event: events.Event) -> None:
        """Write the lines for ``event``, if there are any."""
        progress = self._progress
        news = progress.take(event, self._clock())
        match event:
            case events.RunStarted():
                self._write(wording.title(event))
                self._write(wording.table(wording.facts(event)) + "\n")
                self._header()
            case events.StepFinished():
                if news:
                    self._note(event)
                if event.step % self._every_steps == 0 or event.step == progress.total_steps:
                    self._row()
            case events.SampleGenerated():
                at = "" if event.final else f" at step {event.step:,}"
                self._write(f"\nsample{at}, prompt {event.prompt!r}")
                sample = visible_lines(event.prompt + event.text).strip("\n")
                self._write("\n".join(f"  {text}" for text in sample.split("\n")) + ("" if event.final else "\n"))
            case events.RunFinished():
                self._row()
                self._write("\n" + wording.ending(progress))
                self._write(wording.table(wording.summary(event.summary)))
            case _:
                if isinstance(event, events.Evaluated | events.Interrupted):
                    self._row()
                if news:
                    self._note(event)

    def close(self) -> None:
        """Do nothing: every line has been flushed, and the stream stays open."""

    def _note(self, event: events.Event) -> None:
        width = _width(self._progress)
        text = visible_lines(wording.line(event, self._progress)).replace("\n", "\n" + " " * (width + 2))
        self._write(f"{_done(event.step, self._progress):>{width}}  {text}")

    def _header(self) -> None:
        used = f" {'MFU':>6}" if self._progress.peak_known else ""
        heads = f"{'loss':>7} {'perplexity':>10} {'tokens/s':>8}{used} {'sent':>8} {'compute':>7} {'time left':>9}"
        self._write(f"{'step':>{_width(self._progress)}}  {heads}")

    def _row(self) -> None:
        """Write the row of the last step, unless it has been written."""
        progress, last = self._progress, self._progress.last
        if last is None or progress.loss is None or last.step == self._row_step:
            return
        self._row_step = last.step
        if self._rows and self._rows % _HEADER_EVERY == 0:
            self._header()
        self._rows += 1
        exp_loss = format_perplexity(perplexity(progress.loss))
        used = f" {_utilization(progress):>6}" if progress.peak_known else ""
        self._write(
            f"{_done(last.step, progress):>{_width(progress)}}  {progress.loss:7.4f} {exp_loss:>10} "
            f"{_speed(progress):>8}{used} {format_bytes(last.sent_bytes):>8} {100 * last.compute_utilization:5.1f} % "
            f"{_time_left(progress):>9}"
        )

    def _write(self, text: str) -> None:
        if not text:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()


class VisibleConsole(Console):
    """A console that shows control characters in what it prints, and draws with its own.

    Args:
        stderr: print to standard error instead of standard output.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(file=plain(sys.stderr if stderr else sys.stdout), highlight=False)

    def push_render_hook(self, hook: RenderHook) -> None:
        super().push_render_hook(hook)
        show_visibly()  # a display passes on what others print, and would obey it

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            each if each.control else Segment(visible_lines(each.text), each.style) for each in buffer
        )


class LiveConsole:
    """A progress display at the bottom of the terminal. Lines for notable events scroll above it.

    The display is redrawn when an event arrives, at most every ``refresh_s`` seconds, so it needs no thread. `close`
    restores the terminal (its cursor and the standard streams) and must be called even after errors.

    Args:
        console: the console to draw on; by default, one on standard output.
        refresh_s: the minimum time between two redraws, in seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        refresh_s: float = 0.2,
    ) -> None:
        self._console = console or VisibleConsole()
        self._clock = clock
        self._refresh_s = refresh_s
        self._progress = RunProgress()
        self._live = Live(_Display(self._progress), console=self._console, auto_refresh=False)
        self._drawn_s = -float("inf")

    def handle(self, event: events.Event) -> None:
        """Process ``event``: print its lines above the display, and redraw the display if it is due."""
        now_s = self._clock()
        news = self._progress.take(event, now_s)
        match event:
            case events.RunStarted():
                self._print(Text(wording.title(event), style="bold"))
                self._print(self._rows(wording.facts(event)))
                self._print(Text())
                self._live.start()
            case events.SampleGenerated():
                if event.final:
                    self._live.stop()
                self._print(Text(f"\nsample at step {event.step:,}" if not event.final else "\nsample", style="bold"))
                prompt, text = (self._text(visible_lines(part)) for part in (event.prompt, event.text.rstrip("\n")))
                self._print(Padding(Text.assemble((prompt, "bold cyan"), text), (0, 0, 0, 2)))
            case events.RunFinished():
                self._live.stop()
                self._print(Text("\n" + wording.ending(self._progress), style="bold"))
                self._print(self._rows(wording.summary(event.summary)))
            case events.Evaluated(final=True):
                self._live.stop()  # training has ended: the display stays as it is, and further lines go below it
                self._print(self._line(event))
            case _ if news:
                self._print(self._line(event))
        if self._live.is_started and now_s - self._drawn_s >= self._refresh_s:
            self._drawn_s = now_s
            self._live.refresh()

    def close(self) -> None:
        """Draw the display a last time and restore the terminal."""
        self._live.stop()

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, markup=False, highlight=False)

    def _line(self, event: events.Event) -> Table:
        style = {
            events.Evaluated: "green",
            events.RoundVoid: "yellow",
            events.ViewChanged: "cyan",
            events.Interrupted: "bold yellow",
        }
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right", style="dim", no_wrap=True, width=_width(self._progress))
        grid.add_column(overflow="fold")
        line = self._text(visible_lines(wording.line(event, self._progress)))
        grid.add_row(Text(_done(event.step, self._progress)), Text(line, style=style.get(type(event), "")))
        return grid

    def _rows(self, rows: wording.Rows) -> Padding:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(Text(name), Text(self._text(visible_lines(value))))
        return Padding(grid, (0, 0, 0, 2))

    def _text(self, text: str) -> str:
        return text.encode(self._console.encoding, "backslashreplace").decode(self._console.encoding)


class _Display:
    """The content of the live display: a progress bar and four lines of two readings, or eight lines if it is narrow.

    Column widths are fixed, so that only digits change between redraws. `rich.table` would recompute the widths for
    every redraw, which takes eight times as long (4 ms instead of 0.5 ms).
    """

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        progress, width = self._progress, options.max_width
        total = max(1, progress.total_steps)
        done = f"{_done(progress.step, progress):>{_width(progress)}}"
        done += f"  {100 * progress.step // total:3d} %  {_time_left(progress):>6} left  "
        yield Segment(done[:width])
        if len(done) < width:
            bar = ProgressBar(total, progress.step, width - len(done), complete_style="cyan", finished_style="green")
            yield from console.render(bar, options)
        dim, columns = Style(dim=True), 2 if width >= 80 else 1
        for index, (name, value) in enumerate(_readings(progress)):
            if index % columns == 0:
                yield Segment.line()
            room = min(width, 80 if columns == 1 else (46, 34)[index % 2]) - 15
            shown = value if len(value) <= room else value[: max(0, room - 3)] + "..."
            yield Segment(f"{name:<13}  "[:width], dim)
            yield Segment(f"{shown:<{room}}" if index % columns < columns - 1 else shown)
        yield Segment.line()


def _readings(progress: RunProgress) -> list[tuple[str, str]]:
    """Return eight (name, value) pairs, of which the wide layout puts two on each line."""
    last, loss, heldout, best = progress.last, progress.loss, progress.heldout_loss, progress.best_heldout_loss
    rounds = progress.rounds
    return [
        ("loss", "-" if loss is None else f"{loss:.4f} (perplexity {format_perplexity(perplexity(loss))})"),
        ("tokens/s, MFU", f"{_speed(progress)}, {_utilization(progress)}")
        if progress.peak_known
        else ("speed", f"{_speed(progress)} tokens/s"),
        (
            "held-out loss",
            "-" if heldout is None else f"{heldout:.4f}" + (f" (best {best:.4f})" if best is not None else ""),
        ),
        ("learning rate", f"{last.learning_rate:.2e}" if last else "-"),
        ("rounds", f"{rounds.committed} committed, {rounds.void} void"),
        ("sent", f"{format_bytes(last.sent_bytes)} per replica" if last else "-"),
        ("in flight", wording.fragments_in_flight(rounds.in_flight)),
        ("utilisation", f"{100 * last.compute_utilization:.1f} % compute" if last else "-"),
    ]


def _done(step: int, progress: RunProgress) -> str:
    return f"{step}/{progress.total_steps}"


def _width(progress: RunProgress) -> int:
    """Return the number of characters that `_done` takes at the last step."""
    return 2 * len(str(progress.total_steps)) + 1


def _speed(progress: RunProgress) -> str:
    rate = progress.speed.tokens_per_s
    return "-" if rate is None else format_count(rate)


def _utilization(progress: RunProgress) -> str:
    return "-" if progress.utilization is None else f"{100 * progress.utilization:.1f} %"


def _time_left(progress: RunProgress) -> str:
    left = progress.speed.eta_s(progress.total_steps)
    return "-" if left is None else format_duration(left)
