import dataclasses
import io
import math
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from diloco import events
from diloco.monitor.console import LiveConsole, PlainConsole

REASON = "fragment 1, outer step 0 is void: 1 of 2 contributions, 2 needed."


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def step(number: int, loss: float = 3.0) -> events.StepFinished:
    return events.StepFinished(
        step=number,
        loss=loss,
        learning_rate=4e-4,
        gradient_norm=1.0,
        tokens=2048 * number,
        step_s=0.5,
        sent_bytes=600_000 * number,
        received_bytes=0,
        compute_utilization=0.991,
    )


def test_the_use_of_the_devices_peak_is_shown_where_it_is_known() -> None:
    stream, display = io.StringIO(), io.StringIO()
    plain = PlainConsole(stream, every_steps=1)
    live = LiveConsole(Console(file=display, width=100, force_terminal=True), clock=Clock(), refresh_s=0.0)
    started = events.RunStarted(
        step=0, total_steps=2, algorithm="none", num_replicas=1, parameters=1, tokens_per_step=1, peak_flops_per_s=1e15
    )
    summary = {"tokens_per_s": 1234.0, "model_flops_utilization": 0.4567}
    for event in (
        started,
        step(1),
        dataclasses.replace(step(2), model_flops_utilization=0.4567),
        events.RunFinished(step=2, summary=summary),
    ):
        plain.handle(event)
        live.handle(event)
    live.close()
    lines = stream.getvalue().split("\n")
    head, first, second = lines[next(index for index, line in enumerate(lines) if "tokens/s" in line) :][:3]
    column = head.index("MFU") + 3
    assert (first[:column].split()[-1], second[:column].split()[-2:]) == ("-", ["45.7", "%"])
    assert max(len(line) for line in stream.getvalue().split("\n")) <= 80
    assert "speed  1.2K tokens/s, 45.7 % of the device's peak (MFU)" in stream.getvalue()
    assert "tokens/s, MFU" in display.getvalue()
    assert "-, 45.7 %" in display.getvalue()


def story() -> Iterator[tuple[float, events.Event]]:
    """(seconds passed, event) of a run of 20 steps, two replicas and two fragments."""
    facts = {"codec": "fp4, blocks of 256", "schedule": "fragment 1 of 2 sent at steps 5, 15, ..., merged 1 later " * 2}
    yield (
        0.0,
        events.RunStarted(
            step=0,
            total_steps=20,
            algorithm="streaming",
            num_replicas=2,
            parameters=1_086_720,
            tokens_per_step=2048,
            facts=facts,
        ),
    )
    for number in range(1, 21):
        yield 0.5, step(number, loss=3.0 - 0.05 * number)
        for replica in (0, 1):
            if number in (5, 15):
                outer_step = number // 10
                yield (
                    0.0,
                    events.RoundSent(
                        step=number, replica=replica, fragment=1, outer_step=outer_step, payload_bytes=300_000
                    ),
                )
            if number == 6:
                yield 0.0, events.RoundVoid(step=number, replica=replica, fragment=1, outer_step=0, reason=REASON)
            if number == 16:
                yield (
                    0.0,
                    events.RoundCommitted(
                        step=number,
                        replica=replica,
                        fragment=1,
                        outer_step=1,
                        contributors=(0, 1),
                        sent_bytes=1,
                        received_bytes=1,
                        wait_s=0.0,
                    ),
                )
        if number == 8:
            yield 0.3, events.CheckpointSaved(step=8, path="runs/heron/step-8", size_bytes=52_345_678, save_s=0.3)
        if number in (10, 20):
            yield (
                2.0,
                events.Evaluated(
                    step=number,
                    heldout_loss=2.5,
                    perplexity=12.18,
                    bits_per_byte=3.6067,
                    heldout_tokens=4096,
                    final=number == 20,
                ),
            )
    sample = "[bold]f[/bold](x):\n\treturn \x1b[31mx\r\n"
    yield 0.0, events.SampleGenerated(step=20, prompt="def ", text=sample, final=True)
    summary = {
        "heldout_loss": 2.5,
        "perplexity": 12.18,
        "bits_per_byte": 3.6067,
        "tokens": 40_960,
        "steps": 20,
        "sent_bytes_per_replica": 12_000_000,
        "received_bytes_per_replica": 12_000_000,
        "data_parallel_bytes_per_replica": 4_944_000_000,
        "compute_utilization": 0.991,
        "wall_s": 14.3,
        "rounds_committed": 1,
        "rounds_void": 1,
        "global_params_digest": "a1b2c3d4",
        "out": "runs/heron",
    }
    yield 0.0, events.RunFinished(step=20, summary=summary)


PLAIN = f"""\
streaming, 2 replicas, 1.1M parameters, 20 steps
  codec     fp4, blocks of 256
  schedule  fragment 1 of 2 sent at steps 5, 15, ..., merged 1 later fragment 1
            of 2 sent at steps 5, 15, ..., merged 1 later

 step     loss perplexity tokens/s     sent compute time left
 6/20  round void: {REASON}
 8/20   2.7616      15.82     4.1K   4.8 MB  99.1 %      6.0s
 8/20  checkpoint runs/heron/step-8 (52.3 MB in 300ms)
10/20   2.7039      14.94     4.1K   6.0 MB  99.1 %      7.6s
10/20  held-out loss 2.5000  perplexity 12.18  3.6067 bits per byte  (best)
16/20   2.5211      12.44     4.1K   9.6 MB  99.1 %      2.6s
20/20   2.3912      10.93     4.1K  12.0 MB  99.1 %        0s
20/20  held-out loss 2.5000  perplexity 12.18  3.6067 bits per byte  (final)

sample, going on from 'def '
  def [bold]f[/bold](x):
  \treturn \\x1b[31mx\\r

finished
  held-out loss  2.5000 nats per token
  perplexity     12.18
  bits per byte  3.6067
  trained        20 steps, 41.0K tokens, in 14s
  sent           12.0 MB per replica, 412x less than data-parallel (4.9 GB)
  received       12.0 MB per replica
  utilisation    99.1 % compute
  rounds         1 committed, 1 void
  digest         a1b2c3d4
  run folder     runs/heron
"""


def tell(sink: PlainConsole | LiveConsole, clock: Clock, until: int = 100) -> None:
    for seconds, event in story():
        if event.step > until:
            return
        clock.now_s += seconds
        sink.handle(event)


def plain(until: int = 100) -> str:
    stream, clock = io.StringIO(), Clock()
    tell(PlainConsole(stream, every_steps=8, clock=clock), clock, until)
    return stream.getvalue()


def live(until: int = 100, *, width: int = 80, color: bool = False) -> str:
    """Everything a terminal would be sent."""
    stream, clock = io.StringIO(), Clock()
    console = Console(
        file=stream, force_terminal=True, width=width, height=50, color_system="truecolor" if color else None
    )
    sink = LiveConsole(console, clock=clock)
    tell(sink, clock, until)
    sink.close()
    return stream.getvalue()


def picture(text: str, lines: int = 5) -> list[str]:
    """The last drawing of the display in what a terminal was sent."""
    start = text.rindex("\x1b[2K") + len("\x1b[2K")
    return text[start:].splitlines()[:lines]


def test_plain_output_of_a_whole_run() -> None:
    assert plain() == PLAIN


def test_plain_output_has_no_control_characters_but_newlines_and_tabs() -> None:
    assert {letter for letter in plain() if not letter.isprintable()} == {"\n", "\t"}


def test_plain_output_fits_in_80_columns() -> None:
    assert max(len(line) for line in plain().splitlines() if REASON not in line) <= 80


def test_every_plain_line_is_flushed() -> None:
    raw, clock = io.BytesIO(), Clock()
    sink = PlainConsole(io.TextIOWrapper(raw, encoding="utf-8"), every_steps=1, clock=clock)
    sink.handle(events.Note(step=3, text="hello"))
    assert raw.getvalue() == b"3/0  hello\n"


def test_what_a_stream_cannot_encode_is_written_as_an_escape() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    PlainConsole(stream).handle(events.Note(step=3, text="naïve \ud800"))
    assert raw.getvalue() == b"3/0  na\\xefve \\ud800\n"


def test_plain_output_of_an_interrupted_run_tells_where_it_stopped() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = PlainConsole(stream, every_steps=8, clock=clock)
    tell(sink, clock, until=4)
    sink.handle(events.Interrupted(step=4, signal="SIGINT"))
    sink.handle(events.RunFinished(step=4, summary={"heldout_loss": None, "sent_bytes_per_replica": 0}))
    assert stream.getvalue().split("\n\n")[1:] == [
        " step     loss perplexity tokens/s     sent compute time left\n"
        " 4/20   2.8718      17.67     4.1K   2.4 MB  99.1 %      8.0s\n"
        " 4/20  SIGINT: the state is saved, the run stops here",
        "stopped after step 4 of 20\n  sent  0 B per replica\n",
    ]


def test_a_resumed_run_says_from_where() -> None:
    stream = io.StringIO()
    PlainConsole(stream).handle(
        events.RunStarted(
            step=12,
            total_steps=20,
            algorithm="diloco",
            num_replicas=1,
            parameters=900,
            tokens_per_step=1,
            resumed_from="runs/heron/checkpoints/step-12",
        )
    )
    assert stream.getvalue() == (
        "diloco, 1 replica, 900 parameters, 20 steps, going on after step 12\n"
        "  resumed from  runs/heron/checkpoints/step-12\n\n"
        " step     loss perplexity tokens/s     sent compute time left\n"
    )


def test_the_header_comes_again_before_it_is_out_of_sight() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = PlainConsole(stream, every_steps=1, clock=clock)
    tell(sink, clock, until=0)
    for number in range(1, 62):
        sink.handle(step(number))
    lines = stream.getvalue().split("\n\n")[1].splitlines()
    assert [index for index, line in enumerate(lines) if "tokens/s" in line] == [0, 31, 62]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e9])
def test_a_run_gone_wrong_is_still_shown(loss: float) -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    shown = LiveConsole(console, clock=clock)
    try:
        for sink in (PlainConsole(stream, every_steps=1, clock=clock), shown):
            sink.handle(step(1, loss=loss))
            sink.handle(
                events.Evaluated(step=1, heldout_loss=loss, perplexity=math.inf, bits_per_byte=loss, heldout_tokens=1)
            )
    finally:
        shown.close()
    assert f"{loss:.4f}" in stream.getvalue()


def test_the_live_display_half_way() -> None:
    head, *readings = picture(live(until=15))
    # 53 cells of bar, 39 of them done; five steps of 0.5 s to go, and 2.3 s of pause for every 7 s of training
    assert head == "\u2501" * 39 + "\u2500" * 14 + "  15/20   75 %    3.3s left"
    assert readings == [
        "loss           2.5526 (perplexity 12.84)      speed          4.1K tokens/s",
        "held-out loss  2.5000 (best 2.5000)           learning rate  4.00e-04",
        "rounds         0 committed, 1 void            sent           9.0 MB per replica",
        "in flight      fragment 1 (outer step 1)      utilisation    99.1 % compute",
    ]


def test_a_terminal_of_ascii_gets_nothing_else() -> None:
    raw, clock = io.BytesIO(), Clock()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    sink = LiveConsole(Console(file=stream, force_terminal=True, width=80, color_system=None), clock=clock)
    tell(sink, clock, until=15)
    sink.handle(events.Note(step=15, text="naïve"))
    sink.close()
    assert b"=" * 39 + b"-" * 14 in raw.getvalue()
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
        sink.handle(step(number))
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
        events.RoundVoid(step=1, replica=0, fragment=0, outer_step=0, reason="[red]no[/red] [/]\x1b]0;title\x07"),
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
