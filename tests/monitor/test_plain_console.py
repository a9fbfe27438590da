"""The plain console: a row every few steps, lines for notable events between them, and a summary."""

from __future__ import annotations

import io
import math

import pytest

from diloco import events
from diloco.monitor import PlainConsole
from tests.monitor.made_events import evaluated, started
from tests.monitor.story import REASON, Clock, tell, told_step


def test_the_use_of_the_devices_peak_has_a_column_where_it_is_known() -> None:
    stream = io.StringIO()
    sink = PlainConsole(stream, every_steps=1)
    sink.handle(started(peak_flops_per_s=1e15))
    sink.handle(told_step(1))
    sink.handle(told_step(2, model_flops_utilization=0.4567))
    sink.handle(events.RunFinished(step=2, summary={"tokens_per_s": 1234.0, "model_flops_utilization": 0.4567}))
    lines = stream.getvalue().split("\n")
    head, first, second = lines[next(index for index, line in enumerate(lines) if "tokens/s" in line) :][:3]
    column = head.index("MFU") + 3
    assert (first[:column].split()[-1], second[:column].split()[-2:]) == ("-", ["45.7", "%"])
    assert max(len(line) for line in stream.getvalue().split("\n")) <= 80
    assert "speed  1.2K tokens/s, 45.7 % of the device's peak (MFU)" in stream.getvalue()


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

sample, prompt 'def '
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


def test_plain_output_of_a_whole_run() -> None:
    assert {letter for letter in PLAIN if not letter.isprintable()} == {"\n", "\t"}, "no control characters"
    assert max(len(line) for line in PLAIN.splitlines() if REASON not in line) <= 80
    stream, clock = io.StringIO(), Clock()
    tell(PlainConsole(stream, every_steps=8, clock=clock), clock)
    assert stream.getvalue() == PLAIN


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
        " 4/20  SIGINT: the state has been saved and the run stops",
        "stopped after step 4 of 20\n  sent  0 B per replica\n",
    ]


def test_a_resumed_run_says_from_where() -> None:
    stream = io.StringIO()
    resumed_from = "runs/heron/checkpoints/step-12"
    PlainConsole(stream).handle(
        started(12, total_steps=20, num_replicas=1, parameters=900, facts={}, resumed_from=resumed_from)
    )
    assert stream.getvalue() == (
        "diloco, 1 replica, 900 parameters, 20 steps, resuming after step 12\n"
        "  resumed from  runs/heron/checkpoints/step-12\n\n"
        " step     loss perplexity tokens/s     sent compute time left\n"
    )


def test_the_header_comes_again_before_it_is_out_of_sight() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = PlainConsole(stream, every_steps=1, clock=clock)
    tell(sink, clock, until=0)
    for number in range(1, 62):
        sink.handle(told_step(number))
    lines = stream.getvalue().split("\n\n")[1].splitlines()
    assert [index for index, line in enumerate(lines) if "tokens/s" in line] == [0, 31, 62]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e9])
def test_a_run_gone_wrong_is_still_shown(loss: float) -> None:
    stream = io.StringIO()
    sink = PlainConsole(stream, every_steps=1, clock=Clock())
    sink.handle(told_step(1, loss))
    sink.handle(evaluated(1, loss, perplexity=math.inf, bits_per_byte=loss))
    *_, row, note = stream.getvalue().splitlines()
    assert row.split()[1] == f"{loss:.4f}"
    assert f"held-out loss {loss:.4f}  perplexity inf  {loss:.4f} bits per byte" in note
