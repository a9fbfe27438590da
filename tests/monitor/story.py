"""The events of a run with 20 steps, two replicas and two fragments, for the console tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diloco import events
from diloco.monitor import LiveConsole, PlainConsole
from tests.monitor.made_events import committed, evaluated, sent, started, step, void

REASON = "fragment 1, outer step 0 is void: 1 of 2 contributions are usable, 2 are needed."


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def told_step(number: int, loss: float = 3.0, **given: Any) -> events.StepFinished:
    fields = {"learning_rate": 4e-4, "tokens": 2048 * number, "sent_bytes": 600_000 * number}
    return step(number, loss, **{**fields, "compute_utilization": 0.991, **given})


def story() -> Iterator[tuple[float, events.Event]]:
    """Yield (seconds since the previous event, event)."""
    facts = {"codec": "fp4, blocks of 256", "schedule": "fragment 1 of 2 sent at steps 5, 15, ..., merged 1 later " * 2}
    yield (
        0.0,
        started(total_steps=20, algorithm="streaming", parameters=1_086_720, tokens_per_step=2048, facts=facts),
    )
    for number in range(1, 21):
        yield 0.5, told_step(number, loss=3.0 - 0.05 * number)
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
            yield 2.0, evaluated(number, 2.5, perplexity=12.18, bits_per_byte=3.6067, final=number == 20)
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


def tell(sink: PlainConsole | LiveConsole, clock: Clock, until: int = 100) -> None:
    for seconds, event in story():
        if event.step > until:
            return
        clock.now_s += seconds
        sink.handle(event)
