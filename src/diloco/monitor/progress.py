"""What is known of a run at this moment, gathered from its events. Pure: time is an argument."""

from __future__ import annotations

import math
from collections import deque

from diloco import events

__all__ = ["Ema", "RoundCounts", "RunProgress", "Throughput"]


class Ema:
    """Exponential moving average, corrected for its start at zero (Adam, equation 3 of section 3).

    ``s_n = decay * s_(n-1) + (1 - decay) * x_n``, and the value is ``s_n / (1 - decay^n)``.

    Args:
        decay: in [0, 1); 0 follows the last value.

    >>> loss = Ema(0.5)
    >>> loss.update(4.0), round(loss.update(1.0), 6)
    (4.0, 2.0)
    >>> loss.update(float("nan")), loss.value
    (nan, 2.0)
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} is out of range: 0 <= decay < 1.")
        self.decay = decay
        self._sum = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float:
        """The average so far; NaN before the first value."""
        return self._sum / self._weight if self._weight else math.nan

    def update(self, value: float) -> float:
        """Take in ``value`` and return the average; a value that is not finite is returned and not taken in."""
        if not math.isfinite(value):
            return value
        self._sum = self.decay * self._sum + (1 - self.decay) * value
        self._weight = self.decay * self._weight + (1 - self.decay)
        return self.value


class Throughput:
    """Steps and tokens per second over a sliding window of training time, and the time left.

    The time from the last `update` to a `skip` (an evaluation, a checkpoint) is not training time. The first update
    only sets a mark, so that no rate contains the costs of the first step (compilation, caches).

    Args:
        window_s: training time that the rates look back on, in seconds.

    >>> speed = Throughput(window_s=10.0)
    >>> for step in range(1, 4):
    ...     speed.update(100.0 + step, steps=step, tokens=500 * step)
    >>> speed.tokens_per_s, speed.eta_s(total_steps=10)
    (500.0, 7.0)
    >>> speed.skip(105.0)
    >>> speed.update(106.0, steps=4, tokens=2000)
    >>> speed.tokens_per_s
    500.0

    The time left includes pauses to come, in proportion to those so far: here 2 s in 3 s of training.

    >>> speed.eta_s(total_steps=10)
    10.0
    """

    def __init__(self, window_s: float = 30.0) -> None:
        self.window_s = window_s
        self._marks: deque[tuple[float, int, int]] = deque()  # (training time, steps, tokens)
        self._now_s: float | None = None
        self._trained_s = 0.0
        self._skipped_s = 0.0

    def update(self, now_s: float, *, steps: int, tokens: int) -> None:
        """``steps`` and ``tokens``, counted from any fixed moment, are done at ``now_s``."""
        if self._now_s is not None:
            self._trained_s += now_s - self._now_s
        self._now_s = now_s
        self._marks.append((self._trained_s, steps, tokens))
        while len(self._marks) > 2 and self._marks[1][0] <= self._trained_s - self.window_s:
            self._marks.popleft()

    def skip(self, now_s: float) -> None:
        """The time since the last `update` or `skip` was not spent on training."""
        if self._now_s is not None:
            self._skipped_s += now_s - self._now_s
            self._now_s = now_s

    @property
    def tokens_per_s(self) -> float | None:
        """None until two updates are some time apart."""
        span_s = self._span_s()
        return (self._marks[-1][2] - self._marks[0][2]) / span_s if span_s else None

    def eta_s(self, total_steps: int) -> float | None:
        """Seconds until ``total_steps`` are done, pauses included; None until there is a rate."""
        span_s = self._span_s()
        done = self._marks[-1][1] - self._marks[0][1] if span_s else 0
        if not done:
            return None
        paused = 1 + self._skipped_s / self._trained_s
        return max(0, total_steps - self._marks[-1][1]) * span_s / done * paused

    def _span_s(self) -> float:
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0


class RoundCounts:
    """Counts rounds, however many replicas report each of them, and knows which are in flight.

    A round counts as committed when the first replica reports that it applied it, and as void when the first reports
    that it did not; where replicas disagree it counts as both.

    >>> rounds = RoundCounts()
    >>> for replica in (0, 1):
    ...     rounds.sent(events.RoundSent(step=5, replica=replica, fragment=2, outer_step=14, payload_bytes=9))
    >>> rounds.in_flight
    ((2, 14),)
    >>> for replica in (0, 1):
    ...     _ = rounds.settled(events.RoundVoid(step=6, replica=replica, fragment=2, outer_step=14, reason="late"))
    >>> rounds.in_flight, rounds.committed, rounds.void
    ((), 0, 1)
    """

    def __init__(self) -> None:
        self.committed = 0
        self.void = 0
        self._flying: dict[tuple[int, int], int] = {}  # (replica, fragment) -> outer step
        self._reported: dict[tuple[type[events.Event], int], tuple[int, set[int]]] = {}

    @property
    def in_flight(self) -> tuple[tuple[int, int], ...]:
        """(fragment, outer step) of every round that some replica has sent and not seen committed or void."""
        return tuple(sorted({(fragment, outer_step) for (_, fragment), outer_step in self._flying.items()}))

    def sent(self, event: events.RoundSent) -> None:
        """A replica waits for this round."""
        self._flying[event.replica, event.fragment] = event.outer_step

    def settled(self, event: events.RoundCommitted | events.RoundVoid) -> bool:
        """A replica no longer waits for this round; True when it is the first to report this outcome."""
        self._flying.pop((event.replica, event.fragment), None)
        key = (type(event), event.fragment)
        outer_step, replicas = self._reported.get(key, (-1, set()))
        # the same replica reports the same outer step again: a void round is repeated under its number
        if outer_step == event.outer_step and event.replica not in replicas:
            replicas.add(event.replica)
            return False
        self._reported[key] = (event.outer_step, {event.replica})
        match event:
            case events.RoundVoid():
                self.void += 1
            case events.RoundCommitted():
                self.committed += 1
        return True


class RunProgress:
    """The run as its events report it; every attribute is what a display would show."""

    def __init__(self) -> None:
        self.step = 0  # inner steps done
        self.total_steps = 0  # inner steps to do
        self.last: events.StepFinished | None = None  # the last finished step, or None
        # smoothed training loss in nats per token; not finite when the last one was not, None before the first
        self.loss: float | None = None
        # the last held-out loss, and the lowest since this process began with its step
        self.heldout_loss: float | None = None
        self.best_heldout_loss: float | None = None
        self.best_step = 0
        self.speed = Throughput()  # throughput, without evaluations and checkpoints
        self.peak_known = False  # whether the run knows the peak of its device
        # smoothed fraction of the device's peak that the model uses; None where the peak is not known
        self.utilization: float | None = None
        self.rounds = RoundCounts()  # committed, void and in flight since this process began
        self._smooth, self._smooth_utilization = Ema(0.95), Ema(0.95)
        self._void_reason = ""
        self._round_note = ""
        self._saturated: set[int] = set()
        self._skipped = False

    def take(self, event: events.Event, now_s: float) -> bool:
        """Take in ``event``, heard at ``now_s``; True when it is worth a line of its own.

        Not worth one are steps (a display shows them in its own way), rounds that go well, a round that is void or went
        on without a replica for the same reason as the last one, and the second replica that reports the same.
        """
        self.step = max(self.step, event.step)
        match event:
            case events.RunStarted():
                self.total_steps = event.total_steps
                self.peak_known = event.peak_flops_per_s is not None
            case events.StepFinished():
                self.last = event
                self.loss = self._smooth.update(event.loss)
                self.speed.update(now_s, steps=event.step, tokens=event.tokens)
                if event.model_flops_utilization is not None:
                    self.utilization = self._smooth_utilization.update(event.model_flops_utilization)
                news, self._skipped = event.skipped_replicas > 0 and not self._skipped, event.skipped_replicas > 0
                return news
            case events.RoundSent():
                self.rounds.sent(event)
                news = event.saturated and event.fragment not in self._saturated
                if news:
                    self._saturated.add(event.fragment)
                return news
            case events.RoundCommitted():
                self.rounds.settled(event)
                news = bool(event.note) and event.note != self._round_note
                self._round_note = event.note or self._round_note
                return news
            case events.RoundVoid():
                reason = event.reason.replace(f"fragment {event.fragment}, outer step {event.outer_step}", "")
                news = self.rounds.settled(event) and reason != self._void_reason
                self._void_reason = reason if news else self._void_reason
                return news
            case events.StateFetched():  # whoever waits for it is told in another way (`diloco.waiting`)
                self.speed.skip(now_s)
                return False
            case events.Evaluated():
                self._evaluated(event)
                self.speed.skip(now_s)
            case events.CheckpointSaved() | events.SampleGenerated():
                self.speed.skip(now_s)
            case _:
                pass
        return True

    def _evaluated(self, event: events.Evaluated) -> None:
        self.heldout_loss = event.heldout_loss
        best = self.best_heldout_loss
        if math.isfinite(event.heldout_loss) and (best is None or event.heldout_loss < best):
            self.best_heldout_loss, self.best_step = event.heldout_loss, event.step
