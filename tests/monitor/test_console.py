"""The consoles: plain lines, and a display that is redrawn with lines for notable events above it."""

import io
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from diloco import events
from diloco.monitor import LiveConsole, MonitorSettings, PlainConsole, make_sinks
from diloco.waiting import log_to_stderr, say
from tests.monitor.made_events import committed, evaluated, sent, started, step, void

REASON = "1 of 2 contributions are usable, 2 are needed"


def story() -> Iterator[tuple[float, events.Event]]:
    """Yield (seconds since the previous event, event) of a run of 20 steps, two replicas and two fragments."""
    facts = {"rounds": "2 fragments every 10 steps"}
    fields = {"algorithm": "streaming", "parameters": 1_086_720, "tokens_per_step": 2048}
    yield 0.0, started(total_steps=20, facts=facts, details={"codec": "fp4"}, **fields)
    for number in range(1, 21):
        yield 0.5, told(number, 3.0 - 0.05 * number)
        for replica in (0, 1):
            if number in (5, 15):
                yield 0.0, sent(replica, 1, number // 10, step=number)
            if number == 6:
                yield 0.0, void(replica, 1, 0, REASON, step=number)
            if number == 16:
                yield 0.0, committed(replica, 1, 1, step=number)
        if number == 8:
            yield 0.3, events.CheckpointSaved(step=8, path="runs/heron/step-8", size_bytes=52_345_678, save_s=0.3)
        if number in (10, 20):
            yield 2.0, evaluated(number, 2.5, final=number == 20)
    yield (
        0.0,
        events.SampleGenerated(step=20, prompt="def ", text="[bold]f[/bold](x):\n\treturn \x1b[31mx\r\n", final=True),
    )
    summary = {"heldout_loss": 2.5, "perplexity": 12.18, "tokens": 40_960, "steps": 20, "wall_s": 14.3}
    summary |= {"sent_bytes_per_replica": 12_000_000, "data_parallel_bytes_per_replica": 4_944_000_000}
    summary |= {"rounds_committed": 1, "rounds_void": 1, "global_params_digest": "a1b2c3d4", "out": "runs/my heron"}
    yield 0.0, events.RunFinished(step=20, summary=summary)


def told(number: int, loss: float = 3.0, **fields: object) -> events.StepFinished:
    usual = {
        "learning_rate": 4e-4,
        "tokens": 2048 * number,
        "sent_bytes": 600_000 * number,
        "tokens_per_s": 4096.0,
        "epoch": 1 + number // 9,
    }
    return step(number, loss, **{**usual, "compute_utilization": 0.991, **fields})


class Clock:
    """A clock that a test advances."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def tell(sink: PlainConsole | LiveConsole, clock: Clock, until: int = 100) -> None:
    for seconds, event in story():
        if event.step > until:
            return
        clock.now_s += seconds
        sink.handle(event)


PLAIN = f"""\
streaming, 2 replicas, 1.1M parameters, 20 steps of 2,048 tokens
  rounds  2 fragments every 10 steps
 step     loss perplexity epoch tokens/s     sent compute   left
 6/20  round void: fragment 1, outer step 0: {REASON}
 8/20  checkpoint runs/heron/step-8 (52.3 MB in 300ms)
10/20   2.7250      15.26     2     4.1K   6.0 MB  99.1 %   5.3s
10/20  held-out loss 2.5000  perplexity 12.18  3.6067 bits per byte  (best)
20/20   2.4750      11.88     3     4.1K  12.0 MB  99.1 %     0s
20/20  held-out loss 2.5000  perplexity 12.18  3.6067 bits per byte  (final)

sample, prompt 'def '
  def [bold]f[/bold](x):
  \treturn \\x1b[31mx\\r

finished
  held-out loss  2.5000 nats per token, perplexity 12.18
  trained        20 steps, 41.0K tokens, in 14s
  sent           12.0 MB per replica; data-parallel: 4.9 GB, 412x as much
  rounds         1 committed, 1 void
  digest         a1b2c3d4
  run folder     runs/my heron
  curves         diloco watch 'runs/my heron'
  TensorBoard    --sinks tensorboard (pip install 'diloco[monitor]')
"""


def test_plain_output_of_a_whole_run() -> None:
    assert max(len(line) for line in PLAIN.splitlines() if REASON not in line) <= 80
    stream, clock = io.StringIO(), Clock()
    tell(PlainConsole(stream, clock=clock), clock)
    assert stream.getvalue() == PLAIN


def test_json_lines_have_time_level_and_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logging._levelToName, logging.WARNING, "WARN")  # as hivemind does
    sinks = make_sinks(MonitorSettings(console="json"), tmp_path / "heron", is_terminal=True)
    log_to_stderr(as_json=True)
    try:
        for _, event in story():
            sinks.handle(event)
        sinks.handle(events.Lost(step=20, reason="replica 1 is gone."))
        sinks.handle(told(21, math.nan))
        say("a message of the command", "warning")
        logging.getLogger("diloco.checkpoint.disk").warning("no locks")
        warnings.showwarning("old", UserWarning, "library.py", 3)
    finally:
        log_to_stderr()
        sinks.close()
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in err.splitlines()]
    assert out == ""
    assert [(line["level"], line.get("event"), line.get("step")) for line in lines] == [
        ("info", "RunStarted", 0),
        ("warning", "RoundVoid", 6),
        ("info", "CheckpointSaved", 8),
        ("info", "StepFinished", 10),
        ("info", "Evaluated", 10),
        ("info", "StepFinished", 20),
        ("info", "Evaluated", 20),
        ("info", "RunFinished", 20),
        ("error", "Lost", 20),
        ("error", "StepFinished", 21),
        *[("warning", None, None)] * 3,
    ]
    assert lines[3]["message"] == "loss 2.5000"
    assert {line.get("process") for line in lines} == {"heron", None}
    assert datetime.fromisoformat(lines[0]["time"]).utcoffset() == timedelta(0)


def test_a_replica_that_joined_late_says_of_which_steps_its_figures_are() -> None:
    """Before, a peer that was stopped four steps after it had joined claimed to have sent 6,253 times less."""
    summary = {
        "steps": 239,
        "joined_at_step": 235,
        "trained_steps": 4,
        "sent_bytes_per_replica": 400,
        "data_parallel_bytes_per_replica": 4000,
        "shared_start_steps": 0,
        "rounds_committed": 0,
        "rounds_void": 1,
    }
    out = io.StringIO()
    PlainConsole(out).handle(events.RunFinished(step=239, summary=summary))
    printed = " ".join(out.getvalue().split())
    assert "joined at step 235: what follows is of the 4 steps that it trained sent 400 B per replica" in printed
    assert "after start" not in printed


def test_an_interrupted_run_tells_where_it_stopped() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = PlainConsole(stream, clock=clock)
    tell(sink, clock, until=4)
    sink.handle(events.Interrupted(step=4, signal="SIGINT"))
    sink.handle(events.RunFinished(step=4, summary={"heldout_loss": None, "sent_bytes_per_replica": 0}))
    *_, row, note, _, stopped, traffic = stream.getvalue().splitlines()
    assert row.startswith(" 4/20   2.8750")
    assert note == " 4/20  SIGINT: the state has been saved and the run stops"
    assert (stopped, traffic) == ("stopped after step 4 of 20", "  sent  0 B per replica")


def terminal(width: int = 80, **options: object) -> tuple[io.StringIO, Clock, LiveConsole]:
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=True, width=width, height=50, color_system=None)
    return stream, clock, LiveConsole(console, clock=clock, **options)


def picture(text: str) -> list[str]:
    """Return the last drawing of the display in the output sent to a terminal."""
    return text[text.rindex("\x1b[2K") + len("\x1b[2K") :].splitlines()[:3]


def test_the_live_display_half_way() -> None:
    stream, clock, sink = terminal()
    tell(sink, clock, until=15)
    sink.close()
    # 39.5 of 53 cells are filled; five steps are left, 14 took 9.3 s
    assert picture(stream.getvalue()) == [
        "15/20   75 %    3.3s left  " + "\u2501" * 39 + "\u2578",
        "loss 2.6000 (perplexity 13.46)  held-out 2.5000 (best 2.5000)  epoch 2",
        "4.1K tokens/s  9.0 MB sent  99.1 % compute  rounds 0, void 1  lr 4.0e-04",
    ]
    kept = stream.getvalue()
    told = "round void: fragment 1, outer step 0: " + REASON
    for words in (told, "checkpoint runs/heron/step-8", "perplexity 12.18", "  rounds  2 fragments"):
        assert kept.count(words) == 1


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e9])
def test_a_run_gone_wrong_is_still_shown(loss: float) -> None:
    stream, _, live = terminal(100, refresh_s=0.0)
    for sink in (live, PlainConsole(plain := io.StringIO())):
        for event in (started(), told(1, loss), evaluated(1, loss, perplexity=math.inf, bits_per_byte=loss)):
            sink.handle(event)
        sink.close()
    for text in (stream.getvalue(), plain.getvalue()):
        assert f"held-out loss {loss:.4f}  perplexity inf" in text
    assert f"loss {loss:.4f} (perplexity" in stream.getvalue()


def test_closing_gives_back_the_cursor_and_the_standard_streams() -> None:
    stdout, stderr = sys.stdout, sys.stderr
    stream, clock, sink = terminal()
    tell(sink, clock, until=3)
    assert sys.stdout is not stdout
    assert stream.getvalue().rindex("\x1b[?25l") > stream.getvalue().rfind("\x1b[?25h")
    sink.close()
    sink.close()
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")
