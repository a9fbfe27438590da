"""What is known of a run at this moment, gathered from its events. Pure: time is an argument."""

from __future__ import annotations

import math

from diloco import events
from diloco.monitor.meters import Ema, Throughput

__all__ = ["Progress", "Rounds"]


class Rounds:
    """Counts rounds, however many replicas tell of each, and knows which are under way.

    A round counts as committed when the first replica tells that it applied it, and as void when the first tells
    that it did not; where replicas disagree it counts as both, as it should.

    >>> rounds = Rounds()
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
        self._told: dict[tuple[type[events.Event], int], tuple[int, set[int]]] = {}

    @property
    def in_flight(self) -> tuple[tuple[int, int], ...]:
        """(fragment, outer step) of every round that some replica has sent and not seen committed or void."""
        return tuple(sorted({(fragment, outer_step) for (_, fragment), outer_step in self._flying.items()}))

    def sent(self, event: events.RoundSent) -> None:
        """A replica waits for this round."""
        self._flying[event.replica, event.fragment] = event.outer_step

    def settled(self, event: events.RoundCommitted | events.RoundVoid) -> bool:
        """A replica no longer waits for this round; True when it is the first to tell this outcome."""
        self._flying.pop((event.replica, event.fragment), None)
        key = (type(event), event.fragment)
        outer_step, replicas = self._told.get(key, (-1, set()))
        # the same replica telling of the same outer step again: a void round is repeated under its number
        if outer_step == event.outer_step and event.replica not in replicas:
            replicas.add(event.replica)
            return False
        self._told[key] = (event.outer_step, {event.replica})
        if isinstance(event, events.RoundVoid):
            self.void += 1
        else:
            self.committed += 1
        return True


class Progress:
    """The run as its events tell it; every attribute is what a display would show.

    Attributes:
        step, total_steps: inner steps done and to do.
        peak_known: whether the run says how much of its device it makes use of.
        last: the last finished step, or None.
        loss: smoothed training loss in nats per token; not finite when the last one was not, None before the first.
        heldout_loss, best_heldout_loss, best_step: the last and the lowest held-out loss since this process began,
            and the step of the lowest.
        speed: throughput, evaluations and checkpoints not counted.
        utilization: smoothed fraction of the device's peak that the model makes use of; None where it is not known.
        rounds: committed, void and in flight since this process began.
    """

    def __init__(self, *, loss_decay: float = 0.95, window_s: float = 30.0) -> None:
        self.step = 0
        self.total_steps = 0
        self.last: events.StepFinished | None = None
        self.loss: float | None = None
        self.heldout_loss: float | None = None
        self.best_heldout_loss: float | None = None
        self.best_step = 0
        self.speed = Throughput(window_s)
        self.peak_known = False
        self.utilization: float | None = None
        self.rounds = Rounds()
        self._smooth = Ema(loss_decay)
        self._smooth_utilization = Ema(loss_decay)
        self._void_reason = ""
        self._round_note = ""
        self._saturated: set[int] = set()
        self._skipped = False

    def take(self, event: events.Event, now_s: float) -> bool:
        """Take in ``event``, heard at ``now_s``; True when it is worth a line of its own.

        Not worth one are steps (a display shows them in its own way), rounds that go well, a void round, or one that
        went on without somebody, for the same reason as the last, and the second replica that tells of the same.
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
