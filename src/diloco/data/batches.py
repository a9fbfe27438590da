"""What training needs of whoever draws the batches of a replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from diloco.data.assignment import Assignment

__all__ = ["Batch", "Batches", "Cursor"]

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets, each ``(batch_size, sequence_length)`` int64 on the CPU."""

Cursor: TypeAlias = Mapping[str, Any]
"""What `Batches.state_dict` gave, fit for JSON."""


class Batches(Protocol):
    """The batches of one replica, in an order whose place can be saved as a few numbers."""

    @property
    def epochs(self) -> Mapping[str, float]:
        """Source -> how often all of it has been drawn by now, by all replicas together."""

    def next_batch(self) -> Batch:
        """The next batch; moves the cursor by one."""

    def skip_batch(self) -> None:
        """Move the cursor by one without drawing."""

    def assign(self, assignment: Assignment) -> None:
        """Draw by this from its first step on."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor: after the last batch that `next_batch` gave."""

    def load_state_dict(self, state: Cursor) -> None:
        """Go on after the batch that ``state`` was taken after."""

    def go_on_from(self, cursor_of: Callable[[int], Cursor], before: int) -> None:
        """Go on where another number of replicas stopped, all of them after the same number of batches.

        What they drew is not drawn again in this epoch, and what they left is drawn by those there are now.

        Args:
            cursor_of: replica, below ``before`` -> its cursor; asked only for what is needed.
            before: replicas that drew until then.

        Raises:
            CheckpointError: the cursors are of other data, or of a way of drawing that can't be shared out anew.
        """

    @property
    def order(self) -> str:
        """What a joiner must be told to draw what nobody else draws, as text; "" where the settings say it all."""

    def join_at(self, step: int, order: str) -> None:
        """Draw from inner step ``step`` on, as one who joins those who are there.

        Args:
            step: inner steps that they have done.
            order: `order` of any of them.

        Raises:
            CheckpointError: ``order`` can't be read.
            ConfigurationError: nobody can join those who draw this way.
        """

    def close(self) -> None:
        """End what runs beside the training; nothing can be drawn afterwards."""
