"""The curves of a run, for whatever draws them: events in, points out."""

from __future__ import annotations

from diloco import events

__all__ = ["Curves", "Point"]

_MEASURES = ("mean_norm", "mean_cosine", "momentum_cosine", "gain", "spread")

Point = tuple[int, dict[str, float]]  # a step and the values at it, by the name of the curve, with its unit


class Curves:
    """Thins steps out to points.

    A point every ``every_steps`` steps, and at the last one. Over the steps since the point before: the means
    ``loss/train(nats)`` and ``time/step(s)``; ``time/throughput(tokens per s)`` of all replicas;
    ``time/model_flops_utilization(%)`` where the device's peak is known; and ``transport/wait(s)``, one replica's mean
    wait for a committed round. As they are: ``transport/sent(bytes)`` by one replica so far,
    ``time/compute_utilization(%)``, ``optimizer/learning_rate`` and ``optimizer/gradient_norm``. At each evaluation:
    ``loss/heldout(nats)``. Of the last round of each fragment, where rounds are measured: ``fragment 0/mean_norm``,
    ``/mean_cosine``, ``/momentum_cosine``, ``/gain`` and ``/spread``.

    Args:
        every_steps: steps between two points, at least 1.
    """

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps
        self._last: events.StepFinished | None = None
        self._losses: list[float] = []
        self._step_s: list[float] = []
        self._utilizations: list[tuple[float, float]] = []  # (fraction, seconds)
        self._tokens: list[int] = []  # seen at the last point, and at the steps since then
        self._tokens_per_step = 0
        self._wait_s: list[float] = []
        self._measures: dict[str, float] = {}

    def take(self, event: events.Event) -> Point | None:
        """Take in ``event``; returns the point that it completes, if any."""
        match event:
            case events.RunStarted():
                self._tokens_per_step = event.tokens_per_step
            case events.StepFinished():
                self._last = event
                self._losses.append(event.loss)
                self._step_s.append(event.step_s)
                self._tokens = [*(self._tokens or [event.tokens - self._tokens_per_step]), event.tokens]
                if event.model_flops_utilization is not None:
                    self._utilizations.append((event.model_flops_utilization, event.step_s))
                if event.step % self._every_steps == 0:
                    return self.rest()
            case events.RoundCommitted():
                self._wait_s.append(event.wait_s)
                measured = {name: getattr(event, name) for name in _MEASURES}
                named = {f"fragment {event.fragment}/{name}": value for name, value in measured.items()}
                self._measures |= {name: value for name, value in named.items() if value is not None}
            case events.Evaluated():
                return event.step, {"loss/heldout(nats)": event.heldout_loss}
            case events.RunFinished():
                return self.rest()
        return None

    def rest(self) -> Point | None:
        """A point of the steps since the last point; None if there are none."""
        last = self._last
        if last is None or not self._losses:
            return None
        values = {
            "loss/train(nats)": _mean(self._losses),
            "time/step(s)": _mean(self._step_s),
            "time/throughput(tokens per s)": (self._tokens[-1] - self._tokens[0]) / max(1e-9, sum(self._step_s)),
            "time/compute_utilization(%)": 100 * last.compute_utilization,
            "transport/sent(bytes)": float(last.sent_bytes),
            "optimizer/learning_rate": last.learning_rate,
            "optimizer/gradient_norm": last.gradient_norm,
        }
        if self._wait_s:
            values["transport/wait(s)"] = _mean(self._wait_s)
        if self._utilizations:
            useful_s = sum(fraction * step_s for fraction, step_s in self._utilizations)
            spent_s = sum(step_s for _, step_s in self._utilizations)
            values["time/model_flops_utilization(%)"] = 100 * useful_s / spent_s
        values |= self._measures
        self._losses, self._step_s, self._wait_s, self._utilizations, self._measures = [], [], [], [], {}
        self._tokens = self._tokens[-1:]
        return last.step, values


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
