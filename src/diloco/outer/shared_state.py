"""What a replica shows of its global parameters and outer state to those who take them over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diloco.algorithm.outer_loop import OuterLoop

__all__ = ["SharedState"]


class SharedState:
    """Snapshots of an outer loop, never in the middle of a change; for any thread.

    Attributes:
        finished_rounds: by fragment: its rounds that this replica is through with, committed or void.
        data_order: how the replicas share the data out, where a joiner can't know (see `Batches.order`).
    """

    def __init__(self, outer_loop: OuterLoop) -> None:
        self.outer_loop = outer_loop
        self.finished_rounds = [0] * len(outer_loop.fragments)
        self.data_order = ""
        self._changes = [0] * len(outer_loop.fragments)
        self._lock = threading.Lock()

    @contextmanager
    def changing(self, fragment: int) -> Iterator[None]:
        """Around a change of a fragment; snapshots wait."""
        with self._lock:
            self._changes[fragment] += 1
            yield

    def version(self, fragment: int) -> int:
        """Another number once the fragment has changed."""
        return self._changes[fragment]

    def snapshot(self, fragment: int) -> dict[str, Any]:
        """A copy of the fragment's state and its ``finished_rounds``."""
        with self._lock:
            state = self.outer_loop.fragment_state(fragment)
            return {
                "global_params": state["global_params"].clone(),
                "outer_step": state["outer_step"],
                "slots": {name: values.clone() for name, values in state["slots"].items()},
                "finished_rounds": self.finished_rounds[fragment],
                **({"data_order": self.data_order} if self.data_order else {}),
            }
