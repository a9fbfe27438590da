"""The schedule of sends and merges, a pure function of the step (Streaming DiLoCo, Algorithm 2, lines 6 and 9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from diloco.algorithm.numbers import check_type, check_whole
from diloco.errors import ConfigurationError

__all__ = ["Merge", "Send", "SyncSchedule"]


@dataclass(frozen=True)
class Send:
    """The action of sending the pseudo-gradient of ``fragment`` (p) in round ``outer_step`` of the fragment, from 0."""

    fragment: int
    outer_step: int


@dataclass(frozen=True)
class Merge:
    """The action of taking the outer step with the average of a round and merging it into the local parameters."""

    fragment: int
    outer_step: int


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """A schedule that sends fragment p after the inner steps t with ``(t - t_p) mod H == 0`` and merges it tau later.

    Fragment p is first sent after step ``H + t_p``. With H=100 and P=2, fragment 0 is sent at 100, 200, ... and
    fragment 1 at 150, 250, ..., as in the paper's example. P need not divide H, and any 0 <= tau <= H is allowed.
    Several fragments can be in flight at once, but each fragment at most once. With tau = H a fragment is merged a
    whole round late, in the step in which it is sent again and just before that send.

    Args:
        inner_steps: The inner steps between two synchronisations of a fragment (H).
        num_fragments: The number of fragments (P), at most H.
        overlap_steps: The inner steps between sending and merging a fragment (tau), at most H.
        offsets: The step at which each fragment's cycle begins (t_p), with 0 <= t_p < H. Default: spread evenly,
            ``t_p = floor(p * H / P)``.

    Raises:
        ConfigurationError: if a value is out of range.

    >>> schedule = SyncSchedule(inner_steps=100, num_fragments=2, overlap_steps=5)
    >>> [(step, schedule.actions(step)) for step in range(1, 156) if schedule.actions(step)]
    [(100, (Send(fragment=0, outer_step=0),)),
     (105, (Merge(fragment=0, outer_step=0),)),
     (150, (Send(fragment=1, outer_step=0),)),
     (155, (Merge(fragment=1, outer_step=0),))]
    """

    inner_steps: int
    num_fragments: int = 1
    overlap_steps: int = 0
    offsets: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # object.__setattr__ is how a frozen dataclass sets derived fields
        for name in ("inner_steps", "num_fragments", "overlap_steps"):
            object.__setattr__(self, name, check_whole(name, getattr(self, name)))
        inner_steps, num_fragments = self.inner_steps, self.num_fragments
        if inner_steps < 1:
            raise ConfigurationError(f"inner_steps must be at least 1, got {inner_steps}.")
        if not 1 <= num_fragments <= inner_steps:
            raise ConfigurationError(
                f"num_fragments must be from 1 to {inner_steps} with inner_steps={inner_steps}, so that no two "
                f"fragments need the same step; got {num_fragments}."
            )
        if not 0 <= self.overlap_steps <= inner_steps:
            raise ConfigurationError(
                f"overlap_steps must be from 0 to {inner_steps} with inner_steps={inner_steps}, because a fragment "
                f"must be merged before it is sent again; got {self.overlap_steps}."
            )
        spread = (p * inner_steps // num_fragments for p in range(num_fragments))
        given = spread if self.offsets is None else self.offsets
        check_type("offsets", given, Iterable, f"{num_fragments} whole numbers, one for each fragment")
        object.__setattr__(self, "offsets", tuple(check_whole("an offset", offset) for offset in given))
        offsets = self.fragment_offsets
        if len(offsets) != num_fragments or any(not 0 <= offset < inner_steps for offset in offsets):
            raise ConfigurationError(
                f"offsets must be {num_fragments} values from 0 to {inner_steps - 1}, one for each fragment, "
                f"got {offsets}."
            )

    @property
    def fragment_offsets(self) -> tuple[int, ...]:
        """The offset t_p of each fragment."""
        assert self.offsets is not None
        return self.offsets

    @property
    def whole_round_late(self) -> bool:
        """Whether tau = H, so that a round is merged when the next round of the same fragment is sent."""
        return self.overlap_steps == self.inner_steps

    def actions(self, step: int) -> tuple[Send | Merge, ...]:
        """Return the actions after inner step ``step``, counted from 1.

        Sends come first, so that transmission starts early. With tau = H merges come first, since each of them belongs
        to a fragment that is sent again in this step.

        >>> SyncSchedule(inner_steps=10, overlap_steps=10).actions(20)
        (Merge(fragment=0, outer_step=0), Send(fragment=0, outer_step=1))
        """
        sends = [Send(p, k) for p, k in self._sent(step)]
        merges = [Merge(p, k) for p, k in self._sent(step - self.overlap_steps)]
        return (*merges, *sends) if self.whole_round_late else (*sends, *merges)

    def busy_steps(self, steps: int) -> tuple[int, ...]:
        """Return the steps in 1..``steps`` that have actions, ascending.

        >>> SyncSchedule(inner_steps=100, num_fragments=2, overlap_steps=5).busy_steps(250)
        (100, 105, 150, 155, 200, 205, 250)
        """
        busy: set[int] = set()
        for offset in self.fragment_offsets:
            sent = range(offset + self.inner_steps, steps + 1, self.inner_steps)
            busy.update(sent, (step + self.overlap_steps for step in sent))
        return tuple(sorted(step for step in busy if step <= steps))

    def rounds(self, steps: int) -> int:
        """Return the number of sends of all fragments in steps 1..``steps``.

        >>> SyncSchedule(inner_steps=100, num_fragments=2).rounds(200)
        3
        """
        return sum(self.rounds_of(fragment, steps) for fragment in range(self.num_fragments))

    def rounds_of(self, fragment: int, steps: int) -> int:
        """Return the number of sends of one fragment in steps 1..``steps``."""
        return max(0, (steps - self.fragment_offsets[fragment]) // self.inner_steps)

    def sent_at(self, fragment: int, outer_step: int) -> int:
        """Return the step after which a fragment's round is sent.

        >>> SyncSchedule(inner_steps=100, num_fragments=2).sent_at(1, outer_step=0)
        150
        """
        return self.inner_steps * (outer_step + 1) + self.fragment_offsets[fragment]

    def window_steps(self, fragment: int, outer_step: int) -> int:
        """Return the inner steps between the fragment's previous round, or the start of training, and this round.

        >>> schedule = SyncSchedule(inner_steps=100, num_fragments=2)
        >>> schedule.window_steps(1, outer_step=0), schedule.window_steps(1, outer_step=1)
        (150, 100)
        """
        return self.inner_steps + (self.fragment_offsets[fragment] if outer_step == 0 else 0)

    def _sent(self, step: int) -> list[tuple[int, int]]:
        """Return the fragments sent after ``step``, each with its round."""
        begun, offset = divmod(step, self.inner_steps)
        return [(p, begun - 1) for p in self._fragments_at.get(offset, ())] if begun >= 1 else []

    @cached_property
    def _fragments_at(self) -> dict[int, tuple[int, ...]]:
        """The fragments by offset."""
        offsets = self.fragment_offsets
        return {at: tuple(p for p, offset in enumerate(offsets) if offset == at) for at in set(offsets)}
