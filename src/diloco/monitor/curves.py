"""The curves of a run, whoever draws them: events in, points out."""

from __future__ import annotations

from diloco import events

__all__ = ["Curves", "Point"]

Point = tuple[int, dict[str, float]]
"""A step and the values at it, by the name of the curve, with its unit."""


class Curves:
    """Thins steps out to points.

    Every ``every_steps`` steps, and at the last one, a point of: ``loss/train(nats)`` and ``time/step(s)``, means over
    the steps since the point before; ``transport/wait(s)``, the mean over the rounds committed since then of one
    replica's wait for one round; ``transport/sent(bytes)`` by one replica so far; ``time/compute_utilization(%)``,
    ``optimizer/learning_rate`` and ``optimizer/gradient_norm`` as they are. ``loss/heldout(nats)`` at each evaluation.

    Args:
        every_steps: steps between two points, at least 1.
    """

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps
        self._last: events.StepFinished | None = None
        self._losses: list[float] = []
        self._step_s: list[float] = []
        self._wait_s: list[float] = []

    def take(self, event: events.Event) -> Point | None:
        """Take in ``event``; the point that it completes, if it does."""
        match event:
            case events.StepFinished():
                self._last = event
                self._losses.append(event.loss)
                self._step_s.append(event.step_s)
                if event.step % self._every_steps == 0:
                    return self.rest()
            case events.RoundCommitted():
                self._wait_s.append(event.wait_s)
            case events.Evaluated():
                return event.step, {"loss/heldout(nats)": event.heldout_loss}
            case events.RunFinished():
                return self.rest()
        return None

    def rest(self) -> Point | None:
        """A point of the steps since the last one; None if there are none."""
        last = self._last
        if last is None or not self._losses:
            return None
        values = {
            "loss/train(nats)": _mean(self._losses),
            "time/step(s)": _mean(self._step_s),
            "time/compute_utilization(%)": 100 * last.compute_utilization,
            "transport/sent(bytes)": float(last.sent_bytes),
            "optimizer/learning_rate": last.learning_rate,
            "optimizer/gradient_norm": last.gradient_norm,
        }
        if self._wait_s:
            values["transport/wait(s)"] = _mean(self._wait_s)
        self._losses, self._step_s, self._wait_s = [], [], []
        return last.step, values


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
