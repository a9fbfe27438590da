"""What a replica reports of its rounds and steps, and the warnings that stand in for a listener."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from torch.optim import Optimizer

from diloco.algorithm import check_whole
from diloco.errors import ConfigurationError
from diloco.events import Event, Note, RoundCommitted, RoundVoid, StepFinished
from diloco.transport import Transport

__all__ = ["Reports"]


class Reports:
    """Passes the events of a replica on to its listener, and measures its steps.

    The first inner optimizer has the reported learning rate. ``on_event`` None warns of failures, once for each reason.
    """

    def __init__(self, inner: Optimizer | Sequence[Optimizer], on_event: Callable[[Event], None] | None) -> None:
        self._optimizer = inner[0] if isinstance(inner, Sequence) else inner
        self._listen = on_event or self._warn
        self._warned: set[str] = set()  # reasons, without their numbers
        self.wait_s = 0.0  # waited for averages
        self.contributors = 0  # of the last committed round
        self._began_s: float | None = None
        self._last = 0, 0.0  # the step of the last report, and when it was made

    def begin(self, step: int) -> None:
        """Note that a step begins after ``step`` finished ones; the first one starts the clock."""
        if self._began_s is None:
            self._began_s = time.monotonic()
            self._last = step, self._began_s

    def pass_on(self, event: Event) -> None:
        if isinstance(event, RoundCommitted):
            self.wait_s += event.wait_s
            self.contributors = len(event.contributors)
        self._listen(event)

    def step(self, step: int, transport: Transport, *, loss: Any, tokens: Any, gradient_norm: Any) -> StepFinished:
        """Return the event of ``step``, with what was measured since the last one."""
        now_s, (last_step, last_s) = time.monotonic(), self._last
        elapsed_s = max(1e-9, now_s - (self._began_s or now_s))
        self._last = step, now_s
        return StepFinished(
            step=step,
            loss=_number("loss", loss),
            learning_rate=float(self._optimizer.param_groups[0].get("lr") or 0.0),
            gradient_norm=None if gradient_norm is None else _number("gradient_norm", gradient_norm),
            tokens=None if tokens is None else check_whole("tokens", tokens, 0),
            step_s=(now_s - last_s) / max(1, step - last_step),
            sent_bytes=transport.sent_bytes,
            received_bytes=transport.received_bytes,
            compute_utilization=max(0.0, 1 - self.wait_s / elapsed_s),
        )

    def _warn(self, event: Event) -> None:
        match event:
            case RoundVoid():
                words = (
                    f"A round failed: {event.reason.rstrip('.')}. No replica applied it, and its work is sent again "
                    "with the next one. If every round fails, the replicas train apart: remove the cause."
                )
            case RoundCommitted(note=note) if note:
                words = f"A round was merged with a fault: {note}."
            case RoundCommitted(choice=choice) if choice:
                words = f"Rounds have changed: {choice}."
            case Note():
                words = event.text
            case _:
                return
        if (kind := re.sub(r"[\d.]+", "#", words)) not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"{words.rstrip('.')}. (After step {event.step}; told once for each reason. Pass an on_event to learn "
                "of every round; rounds_void and rounds_committed count them.)",
                stacklevel=6,
            )


def _number(name: str, value: Any) -> float:
    try:
        number = value.item() if hasattr(value, "item") else value  # of torch or NumPy
    except (RuntimeError, ValueError):
        number = None
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ConfigurationError(f"{name} must be a number or a tensor of one value, got {value!r}.")
    return float(number)
