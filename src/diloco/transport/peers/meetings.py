"""What ranks agree on beside rounds: numbers that each of them says under a name, and the step after which all stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Meetings"]


class Meetings:
    """Numbers said by the ranks of the present view.

    Args:
        rank: mine.
        tell: sends a message to all other ranks of the view, in the control thread.
        post: calls a function in the control thread.
        present: the ranks of the view that can be reached, and this one.
        step: inner steps that this rank has begun to synchronise.
    """

    def __init__(
        self,
        rank: int,
        tell: Callable[[Mapping[str, Any]], None],
        post: Callable[..., None],
        present: Callable[[], set[int]],
        step: Callable[[], int],
    ) -> None:
        self.changed = threading.Condition()
        self._rank = rank
        self._tell = tell
        self._post = post
        self._present = present
        self._step = step
        self._said: dict[str, dict[int, int]] = {}
        self._stop_asked = threading.Event()

    # In any thread but the control thread.

    def meet(
        self, name: str, value: int, timeout_s: float, *, unless: Callable[[], bool] = lambda: False
    ) -> dict[int, int]:
        """Wait until every rank that can be reached has said its ``value`` under ``name``; once for each name.

        A rank that is lost meanwhile is not waited for, and nobody is once ``unless`` holds, which is asked again at
        every `notice`.
        """
        self._post(self._say, name, value)
        with self.changed:
            self._said.setdefault(name, {})[self._rank] = value
            self.changed.wait_for(lambda: unless() or not self._awaited(name), timeout_s)
            return dict(self._said[name])

    def ask_to_stop(self, timeout_s: float) -> None:
        """Let `stop_step` of every rank agree on a step soon."""
        self._post(self.stop)
        self._stop_asked.wait(timeout_s)

    def stop_step(self, timeout_s: float) -> int | None:
        """After which inner step all ranks stop, once anybody has asked to; None until then.

        The ranks' control threads have told each other how many steps they have begun to synchronise, whatever their
        training threads were waiting for. One more than the greatest is where all can stop.
        """
        if not self._stop_asked.is_set():
            return None
        with self.changed:
            said = self._said.setdefault("stop", {})
            self.changed.wait_for(lambda: self._rank in said and not self._awaited("stop"), timeout_s)
            return max(said.values()) + 1

    # In the control thread.

    def heard(self, sender: int, name: str, value: int) -> None:
        """Another rank says ``value`` under ``name``."""
        with self.changed:
            self._said.setdefault(name, {})[sender] = value
            self.changed.notify_all()
        if name == "stop":
            self.stop()

    def stop(self) -> None:
        """Say after which step this rank could stop, once."""
        if not self._stop_asked.is_set():
            self._stop_asked.set()  # before the step is read: the training thread begins no second one unaware of it
            with self.changed:
                step = self._said.setdefault("stop", {})[self._rank] = self._step()
                self.changed.notify_all()
            self._say("stop", step)

    def notice(self) -> None:
        """Who is present has changed, or something else that somebody may be waiting for."""
        with self.changed:
            self.changed.notify_all()

    def _say(self, name: str, value: int) -> None:
        self._tell({"kind": "meet", "name": name, "value": value})

    def _awaited(self, name: str) -> set[int]:
        return self._present() - self._said.get(name, {}).keys()
