"""The current state of a run, gathered from its events. Nothing here does I/O; times are arguments."""

from __future__ import annotations

import math
from collections import deque

from diloco import events

__all__ = ["Ema", "RoundCounts", "RunProgress", "Throughput"]


class Ema:
    """An exponential moving average with bias correction for its start at zero (Adam, section 3, equation 3).

    ``s_n = decay * s_(n-1) + (1 - decay) * x_n``, and the value is ``s_n / (1 - decay^n)``.

    Args:
        decay: the decay rate in [0, 1); with 0, the average is the last value.

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
        """The current average; NaN before the first value."""
        return self._sum / self._weight if self._weight else math.nan

    def update(self, value: float) -> float:
        """Add ``value`` and return the average. A non-finite value is returned as it is and not added."""
        if not math.isfinite(value):
            return value
        self._sum = self.decay * self._sum + (1 - self.decay) * value
        self._weight = self.decay * self._weight + (1 - self.decay)
        return self.value


class Throughput:
    """The training speed over a sliding window of training time, and the time left.

    The time from the last `update` to a `skip` (an evaluation, a checkpoint) does not count as training time. Rates are
    measured from the first update on, so that they exclude the cost of the first step (compilation, cold caches).

    Args:
        window_s: the length of the window, in seconds of training time.

    >>> speed = Throughput(window_s=10.0)
    >>> for step in range(1, 4):
    ...     speed.update(100.0 + step, steps=step, tokens=500 * step)
    >>> speed.tokens_per_s, speed.eta_s(total_steps=10)
    (500.0, 7.0)
    >>> speed.skip(105.0)
    >>> speed.update(106.0, steps=4, tokens=2000)
    >>> speed.tokens_per_s
    500.0

    The time left includes future pauses in proportion to those so far: here 2 s per 3 s of training.

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
        """Record that ``steps`` and ``tokens``, counted from any fixed moment, are finished at ``now_s``."""
        if self._now_s is not None:
            self._trained_s += now_s - self._now_s
        self._now_s = now_s
        self._marks.append((self._trained_s, steps, tokens))
        while len(self._marks) > 2 and self._marks[1][0] <= self._trained_s - self.window_s:
            self._marks.popleft()

    def skip(self, now_s: float) -> None:
        """Record that the time since the last `update` or `skip` was not spent on training."""
        if self._now_s is not None:
            self._skipped_s += now_s - self._now_s
            self._now_s = now_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of training; None until two updates have different times."""
        span_s = self._span_s()
        return (self._marks[-1][2] - self._marks[0][2]) / span_s if span_s else None

    def eta_s(self, total_steps: int) -> float | None:
        """Return the seconds until ``total_steps`` are finished, pauses included, or None if no rate is known yet."""
        span_s = self._span_s()
        done = self._marks[-1][1] - self._marks[0][1] if span_s else 0
        if not done:
            return None
        paused = 1 + self._skipped_s / self._trained_s
        return max(0, total_steps - self._marks[-1][1]) * span_s / done * paused

    def _span_s(self) -> float:
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0


class RoundCounts:
    """Counts each round once, however many replicas report it, and tracks the rounds in flight.

    A round counts as committed as soon as one replica reports that it applied the round, and as void as soon as one
    reports that the round was void. If replicas disagree, it counts as both.

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
        """(fragment, outer step) of every round whose outcome a replica that sent its contribution still waits for."""
        return tuple(sorted({(fragment, outer_step) for (_, fragment), outer_step in self._flying.items()}))

    def sent(self, event: events.RoundSent) -> None:
        """Record that a replica waits for this round."""
        self._flying[event.replica, event.fragment] = event.outer_step

    def settled(self, event: events.RoundCommitted | events.RoundVoid) -> bool:
        """Record that a replica no longer waits for this round.

        Returns:
            True if it is the first replica to report this outcome.
        """
        self._flying.pop((event.replica, event.fragment), None)
        key = (type(event), event.fragment)
        outer_step, replicas = self._reported.get(key, (-1, set()))
        # a second report from the same replica is a new round: a void round is repeated under its outer step
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
    """The state of the run, as a display shows it."""

    def __init__(self) -> None:
        self.step = 0  # inner steps finished
        self.total_steps = 0  # inner steps to train
        self.last: events.StepFinished | None = None  # the last finished step
        # smoothed training loss in nats per token; non-finite if the last loss was, None before the first step
        self.loss: float | None = None
        self.heldout_loss: float | None = None  # the last held-out loss
        self.best_heldout_loss: float | None = None  # the lowest held-out loss since this process started
        self.best_step = 0  # the step of the lowest held-out loss
        self.speed = Throughput()  # throughput, not counting evaluations and checkpoints
        self.peak_known = False  # whether the peak rate of the device is known
        # smoothed fraction of the device's peak that the model uses; None if the peak is unknown
        self.utilization: float | None = None
        self.rounds = RoundCounts()  # rounds committed, void and in flight since this process started
        self._smooth, self._smooth_utilization = Ema(0.95), Ema(0.95)
        self._void_reason = ""
        self._round_note = ""
        self._saturated: set[int] = set()
        self._skipped = False

    def take(self, event: events.Event, now_s: float) -> bool:
        """Process ``event``, received at ``now_s``, and return whether it deserves a line of its own.

        These do not: steps, which displays show in their own way; undisturbed rounds; a round that is void or omits a
        replica for the same reason as the previous one; and further replicas that report the same outcome.
        """
        self.step = max(self.step, event.step)
        match event:
            case events.RunStarted():
                self.total_steps = event.total_steps
                self.peak_known = event.peak_flops_per_s is not None
            case events.StepFinished():
                self.last = event
                self.loss = self._smooth.update(event.loss)
                self.speed.update(now_s, steps=event.step, tokens=event.tokens or 0)
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
            case events.StateFetched():  # `diloco.waiting` reports this progress to the user
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
