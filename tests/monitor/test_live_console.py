"""The live console: a display that is redrawn, with lines for notable events above it."""

from __future__ import annotations

import io
import math
import sys

import pytest
from rich.console import Console

from diloco import events
from diloco.monitor import LiveConsole
from tests.monitor.made_events import evaluated, started, void
from tests.monitor.story import REASON, Clock, tell, told_step


def live(until: int = 100, *, width: int = 80, color: bool = False) -> str:
    """Collects all output that would be sent to a terminal."""
    stream, clock = io.StringIO(), Clock()
    console = Console(
        file=stream, force_terminal=True, width=width, height=50, color_system="truecolor" if color else None
    )
    sink = LiveConsole(console, clock=clock)
    tell(sink, clock, until)
    sink.close()
    return stream.getvalue()


def picture(text: str, lines: int = 5) -> list[str]:
    """Return the last drawing of the display in the output sent to a terminal."""
    start = text.rindex("\x1b[2K") + len("\x1b[2K")
    return text[start:].splitlines()[:lines]


def test_the_live_display_half_way() -> None:
    head, *readings = picture(live(until=15))
    # 39.5 of 53 cells are filled; five steps of 0.5 s are left, with 2.3 s of pauses per 7 s of training
    assert head == "15/20   75 %    3.3s left  " + "\u2501" * 39 + "\u2578"
    assert readings == [
        "loss           2.5526 (perplexity 12.84)      speed          4.1K tokens/s",
        "held-out loss  2.5000 (best 2.5000)           learning rate  4.00e-04",
        "rounds         0 committed, 1 void            sent           9.0 MB per replica",
        "in flight      fragment 1 (outer step 1)      utilisation    99.1 % compute",
    ]


def test_the_use_of_the_devices_peak_stands_behind_the_speed_where_it_is_known() -> None:
    stream = io.StringIO()
    sink = LiveConsole(Console(file=stream, width=100, force_terminal=True), clock=Clock(), refresh_s=0.0)
    sink.handle(started(peak_flops_per_s=1e15))
    sink.handle(told_step(1))
    sink.handle(told_step(2, model_flops_utilization=0.4567))
    sink.close()
    assert "tokens/s, MFU" in stream.getvalue()
    assert "-, 45.7 %" in stream.getvalue()


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e9])
def test_a_run_gone_wrong_is_still_shown(loss: float) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    sink = LiveConsole(console, clock=Clock(), refresh_s=0.0)
    sink.handle(started())
    sink.handle(told_step(1, loss))
    sink.handle(evaluated(1, loss, perplexity=math.inf, bits_per_byte=loss))
    sink.close()
    assert f"loss           {loss:.4f} (" in stream.getvalue()
    assert f"held-out loss  {loss:.4f}" in stream.getvalue()


def test_a_terminal_of_ascii_gets_nothing_else() -> None:
    raw, clock = io.BytesIO(), Clock()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    sink = LiveConsole(Console(file=stream, force_terminal=True, width=80, color_system=None), clock=clock)
    tell(sink, clock, until=15)
    sink.handle(events.Note(step=15, text="naïve"))
    sink.close()
    assert b"15/20   75 %    3.3s left  " + b"-" * 39 + b" \n" in raw.getvalue()
    assert b"na\\xefve" in raw.getvalue()


def test_the_live_display_before_the_first_step() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = LiveConsole(Console(file=stream, force_terminal=True, width=80, color_system=None), clock=clock)
    tell(sink, clock, until=0)
    sink.close()
    assert "in flight      none                           utilisation    -\n" in stream.getvalue()


@pytest.mark.parametrize("width", [20, 40, 79])
def test_the_live_display_stays_within_a_narrow_terminal(width: int) -> None:
    lines = picture(live(until=15, width=width), lines=9)
    assert len(lines) == 9
    assert max(len(line) for line in lines) <= width
    assert lines[2].startswith("speed"[:width])


def test_what_is_worth_keeping_stands_above_the_live_display() -> None:
    lines = live(until=15).splitlines()
    text = "\n".join(lines)
    last_picture = text.rindex("held-out loss  2.5000 (best")
    for kept in ("round void: " + REASON[:40], "checkpoint runs/heron/step-8", "perplexity 12.18", "codec     fp4"):
        assert text.count(kept) == 1
        assert text.index(kept) < last_picture


def test_the_live_display_draws_no_more_often_than_it_should() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = LiveConsole(Console(file=stream, force_terminal=True, width=80, color_system=None), clock=clock)
    tell(sink, clock, until=0)
    drawn = []
    for number in range(1, 21):
        clock.now_s += 0.05
        before = len(stream.getvalue())
        sink.handle(told_step(number))
        drawn.append(len(stream.getvalue()) > before)
    sink.close()
    assert 4 <= sum(drawn) <= 6


def test_the_summary_and_the_sample_follow_the_last_picture() -> None:
    text = live()
    end = text[text.rindex("learning rate") :]
    assert "(final)" in end
    assert end.index("(final)") < end.index("\nsample\n") < end.index("\nfinished\n")
    assert "  sent           12.0 MB per replica, 412x less than data-parallel (4.9 GB)" in end


def test_markup_and_control_characters_in_generated_text_are_shown_not_obeyed() -> None:
    end = live(color=True)
    end = end[end.index("sample") :]
    assert "[bold]f[/bold](x):" in end
    assert "return \\x1b[31mx\\r" in end
    assert "\x1b[31m" not in end


@pytest.mark.parametrize(
    "event",
    [
        events.Note(step=1, text="[red]no[/red] [/]\x1b]0;title\x07"),
        void(0, 0, 0, "[red]no[/red] [/]\x1b]0;title\x07"),
        events.CheckpointSaved(step=1, path="[red]no[/red] [/]\x1b]0;title\x07", size_bytes=1, save_s=1.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_no_other_text_is_obeyed_either(event: events.Event) -> None:
    stream = io.StringIO()
    LiveConsole(Console(file=stream, force_terminal=True, width=100)).handle(event)
    assert "[red]no[/red] [/]\\x1b]0;title\\x07" in stream.getvalue()


def test_closing_gives_back_the_cursor_and_the_standard_streams() -> None:
    stdout, stderr = sys.stdout, sys.stderr
    stream, clock = io.StringIO(), Clock()
    sink = LiveConsole(Console(file=stream, force_terminal=True, width=80), clock=clock)
    tell(sink, clock, until=3)
    assert sys.stdout is not stdout
    assert stream.getvalue().rindex("\x1b[?25l") > stream.getvalue().rfind("\x1b[?25h")
    sink.close()
    sink.close()
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")
