"""The current state of a run, gathered from its events. Nothing here does I/O; times are arguments."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping

from diloco import events

__all__ = ["RunProgress"]

_DECAY = 0.95  # of the moving averages
_WINDOW = 100  # steps over which the speed is measured


class _Ema:
    """An exponential moving average with bias correction for its start at zero (Adam, section 3, equation 3)."""

    sum = weight = 0.0

    def update(self, value: float) -> float:
        """Add ``value`` and return the average. A non-finite value is returned as it is and not added."""
        if not math.isfinite(value):
            return value
        self.sum = _DECAY * self.sum + (1 - _DECAY) * value
        self.weight = _DECAY * self.weight + (1 - _DECAY)
        return self.sum / self.weight


class RunProgress:
    """The state of the run, as a display shows it.

    A round counts once, however many replicas report it: as committed as soon as one replica reports that it applied
    the round, and as void as soon as one reports that the round was void.

    Args:
        verbose: whether details deserve a line, too.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.names: Mapping[str, str] = {}  # the names of replicas that have one, by number
        self.step = 0  # inner steps finished
        self.total_steps = 0  # inner steps to train
        self.last: events.StepFinished | None = None  # the last finished step
        # smoothed training loss in nats per token; non-finite if the last loss was, None before the first step
        self.loss: float | None = None
        self.heldout_loss: float | None = None  # the last held-out loss
        self.best_heldout_loss: float | None = None  # the lowest held-out loss of the run
        self.best_step = 0  # the step of the lowest held-out loss
        self.peak_known = False  # whether the peak rate of the device is known
        # smoothed fraction of the device's peak that the model uses; None if the peak is unknown
        self.utilization: float | None = None
        self.committed = self.void = 0  # rounds of the run
        self._loss, self._utilization = _Ema(), _Ema()
        self._window: deque[tuple[float, events.StepFinished]] = deque(maxlen=_WINDOW)  # (when it was received, step)
        # (outcome, fragment) -> the outer step of the last round with it, and the replicas that reported it
        self._reported: dict[tuple[type[events.Event], int], tuple[int, set[int]]] = {}
        self._void_reason = self._round_note = ""
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
                self.total_steps, self.names = event.total_steps, event.names
                self.best_heldout_loss = event.best_heldout_loss
                self.committed, self.void = event.rounds_committed, event.rounds_void
                self.peak_known = event.peak_flops_per_s is not None
            case events.StepFinished():
                self.last = event
                self.loss = self._loss.update(event.loss)
                self._window.append((now_s, event))
                if event.model_flops_utilization is not None:
                    self.utilization = self._utilization.update(event.model_flops_utilization)
                news, self._skipped = event.skipped_replicas > 0 and not self._skipped, event.skipped_replicas > 0
                return news
            case events.RoundSent():
                news = event.saturated and event.fragment not in self._saturated
                self._saturated |= {event.fragment} if event.saturated else set()
                return news
            case events.RoundCommitted():
                self.committed += self._is_new(event)
                news = bool(event.note) and event.note != self._round_note
                self._round_note = event.note or self._round_note
                return news
            case events.RoundVoid():
                reason = event.reason.replace(f"fragment {event.fragment}, outer step {event.outer_step}", "")
                first = self._is_new(event)
                self.void += first
                # a change of the members has a line of its own
                told = not self.verbose and re.search(r"; [^;]* continues?\.?$", reason)
                news = first and reason != self._void_reason and not told
                self._void_reason = reason if news else self._void_reason
                return news
            case events.ViewChanged():
                self.names = event.names
            case events.Note():
                return self.verbose or not event.detail
            case events.StateFetched():  # `diloco.waiting` reports this progress to the user
                return False
            case events.Evaluated():
                best, self.heldout_loss = self.best_heldout_loss, event.heldout_loss
                if math.isfinite(event.heldout_loss) and (best is None or event.heldout_loss < best):
                    self.best_heldout_loss, self.best_step = event.heldout_loss, event.step
        return True

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the last steps, without evaluations and checkpoints; None before the second step.

        The first step of a run does not count, as it includes compilation and cold caches.
        """
        steps = [step for _, step in self._window]
        spent_s = sum(step.step_s for step in steps[1:])
        return ((steps[-1].tokens or 0) - (steps[0].tokens or 0)) / spent_s if spent_s else None

    @property
    def left_s(self) -> float | None:
        """The seconds until the run ends at the pace of the last steps, pauses included; None before the second
        step."""
        if len(self._window) < 2:
            return None
        (began_s, first), (now_s, last) = self._window[0], self._window[-1]
        return (now_s - began_s) / max(1, last.step - first.step) * max(0, self.total_steps - last.step)

    def _is_new(self, event: events.RoundCommitted | events.RoundVoid) -> bool:
        """Return whether no other replica has reported this outcome of the round."""
        outcome = (type(event), event.fragment)
        outer_step, replicas = self._reported.get(outcome, (-1, set()))
        # a second report from the same replica is a new round: a void round is repeated under its outer step
        if outer_step == event.outer_step and event.replica not in replicas:
            replicas.add(event.replica)
            return False
        self._reported[outcome] = (event.outer_step, {event.replica})
        return True
