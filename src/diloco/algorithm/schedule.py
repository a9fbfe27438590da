"""The schedule of sends and merges, a pure function of the step, and the steps that a slow replica trains.

Schedule: Streaming DiLoCo, Algorithm 2, lines 6 and 9.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, get_args

from msgspec import Meta

from diloco.algorithm.checks import check_choice, check_ranges, check_whole
from diloco.errors import ConfigurationError

_STANDING = 0.03  # share of the time for which training may stand still


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
    fragment 1 at 150, 250, ..., as in the paper's example; the condition alone, which is line 6 of Algorithm 2, also
    holds at ``t = t_p``. torchft first sends fragment p after step ``(p + 1) H / P - tau``, so its first windows are
    shorter. ``H - H // P + tau`` calls of `DiLoCo.step` with 0.0 before training give these rounds; they learn no
    better on the whole (benchmarks/parity/starts.md). P need not divide H, and any 0 <= tau <= H is allowed.
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
        object.__setattr__(self, "inner_steps", check_whole("inner_steps", self.inner_steps, 1))
        # no two fragments may need the same step, and each is merged before it is sent again
        for name, least in (("num_fragments", 1), ("overlap_steps", 0)):
            words = f"{name} with inner_steps={self.inner_steps}"
            object.__setattr__(self, name, check_whole(words, getattr(self, name), least, self.inner_steps))
        spread = (p * self.inner_steps // self.num_fragments for p in range(self.num_fragments))
        values = spread if self.offsets is None else self.offsets
        object.__setattr__(self, "offsets", tuple(check_whole("an offset", value) for value in values))
        offsets = self.fragment_offsets
        if len(offsets) != self.num_fragments or any(not 0 <= offset < self.inner_steps for offset in offsets):
            raise ConfigurationError(
                f"offsets must be {self.num_fragments} values from 0 to {self.inner_steps - 1}, one for each fragment, "
                f"got {offsets}."
            )

    def __str__(self) -> str:
        return f"H {self.inner_steps}, tau {self.overlap_steps}, offsets {list(self.fragment_offsets)}"

    @property
    def fragment_offsets(self) -> tuple[int, ...]:
        """The offset t_p of each fragment."""
        assert self.offsets is not None
        return self.offsets

    @property
    def whole_round_late(self) -> bool:
        """Whether tau = H, so that a round is merged when the next round of the same fragment is sent."""
        return self.overlap_steps == self.inner_steps

    @property
    def transfer_steps(self) -> float:
        """How many inner steps a round may take before training stands still for more than 3 % of the time."""
        apart = self.inner_steps / self.num_fragments
        return min(self.overlap_steps, apart) + _STANDING * apart

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
        return self.sent_at(fragment, 0) if outer_step == 0 else self.inner_steps

    def _sent(self, step: int) -> list[tuple[int, int]]:
        """Return the fragments sent after ``step``, each with its round."""
        cycles, offset = divmod(step, self.inner_steps)
        if cycles < 1:
            return []
        return [(p, cycles - 1) for p in self._fragments_at.get(offset, ())]

    @cached_property
    def _fragments_at(self) -> dict[int, tuple[int, ...]]:
        """The fragments by offset."""
        at: dict[int, tuple[int, ...]] = {}
        for fragment, offset in enumerate(self.fragment_offsets):
            at[offset] = (*at.get(offset, ()), fragment)
        return at


_MAX_SPEEDUP = 8  # the fastest replica counts as at most this many times as fast as the second fastest


def steps_to_train(replica: int, steps_per_s: Mapping[int, float], inner_steps: int) -> int:
    """Return ``k = floor(v / max v * H)``, at least 1: the scheduled steps of H that a replica trains (DyLU).

    It is H for the fastest replica, and for one whose speed is not in ``steps_per_s``.

    >>> speeds = {0: 4.0, 1: 2.0, 2: 0.9, 3: 0.001}
    >>> [steps_to_train(replica, speeds, inner_steps=10) for replica in (0, 1, 2, 3, 4)]
    [10, 5, 2, 1, 10]

    Replicas report their own speeds, so the fastest counts as at most eight times as fast as the second fastest:

    >>> steps_to_train(0, {0: 4.0, 1: 4.0, 2: 1e308}, inner_steps=80)
    10
    """
    if replica not in steps_per_s:
        return inner_steps
    mine, speeds = steps_per_s[replica], sorted(steps_per_s.values())
    fastest = speeds[-1]
    if len(speeds) > 1:
        fastest = min(fastest, _MAX_SPEEDUP * speeds[-2])
    if mine >= fastest:
        return inner_steps
    return max(1, math.floor(mine / fastest * inner_steps))


def trains_at(step: int, steps: int, inner_steps: int) -> bool:
    """Return whether the scheduled step ``step`` (t, from 0) is trained: ``floor((t + 1) k / H) > floor(t k / H)``.

    Exactly ``steps`` (k, from 1 to H) of any ``inner_steps`` (H) consecutive steps are trained, spread as evenly as
    possible.

    >>> ["." if not trains_at(step, 3, inner_steps=8) else "x" for step in range(8)]
    ['.', '.', 'x', '.', '.', 'x', '.', 'x']
    """
    return (step + 1) * steps // inner_steps > step * steps // inner_steps


class StepRate:
    """The smoothed inner steps per second of a replica: the inverse of the mean time of about its last ten steps.

    The first step does not count, since it may include compilation. The rate is known from the sixth step on.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sum_s = self._weight = 0.0

    def add(self, compute_s: float) -> None:
        """Count a step with this compute time, which excludes waiting for others. Ignore impossible times."""
        if not 1e-9 <= compute_s <= 1e9:
            return
        self._steps += 1
        if self._steps > 1:
            self._sum_s = 0.9 * self._sum_s + compute_s
            self._weight = 0.9 * self._weight + 1

    @property
    def steps_per_s(self) -> float | None:
        """The inner steps per second, or None before enough steps were counted."""
        return self._weight / self._sum_s if self._steps >= 6 else None


_Kind = Literal["constant", "linear", "cosine", "wsd"]
_Steps = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class ValueSchedule:
    """A linear warm-up to ``peak``, followed by a decay to ``final_ratio * peak`` at ``total_steps``.

    The decay has one of four shapes:

    - ``constant``: stays at the peak.
    - ``linear``: decreases linearly.
    - ``cosine``: ``final + (peak - final) * (1 + cos(pi * x)) / 2`` with x from 0 at the end of the warm-up to 1.
    - ``wsd``: stays at the peak, then decreases linearly over the last ``decay_steps``.

    After ``total_steps`` the value stays constant; it never rises again.

    Args:
        peak: The value after the warm-up.
        kind: The shape of the decay.
        total_steps: The step at which the final value is reached.
        warmup_steps: The length of the warm-up. Step s < warmup_steps gives ``peak * (s + 1) / warmup_steps``.
        final_ratio: The final value divided by the peak.
        decay_steps: The length of the decay of ``wsd``.

    >>> rate = ValueSchedule(peak=1.0, kind="cosine", total_steps=10, warmup_steps=2, final_ratio=0.0)
    >>> [round(rate(step), 3) for step in (0, 1, 2, 6, 10, 11)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    peak: Annotated[float, Meta()]  # finite
    kind: _Kind = "constant"
    total_steps: _Steps = 0
    warmup_steps: _Steps = 0
    final_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    decay_steps: _Steps = 0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(_Kind))
        check_ranges(self)
        if self.kind != "constant" and self.warmup_steps > self.total_steps:
            raise ConfigurationError(
                f"The warm-up can't be longer than the run, got warmup_steps={self.warmup_steps} with "
                f"total_steps={self.total_steps}."
            )
        if self.kind == "wsd" and not 0 < self.decay_steps <= self.total_steps - self.warmup_steps:
            raise ConfigurationError(
                f"decay_steps must be from 1 to {self.total_steps - self.warmup_steps}, the steps after the warm-up, "
                f"got {self.decay_steps}."
            )

    def __call__(self, step: int) -> float:
        """Return the value for the step that follows ``step`` finished steps."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.peak * (self.final_ratio + (1 - self.final_ratio) * self._shape(step))

    def _shape(self, step: int) -> float:
        """Return the progress of the decay: 1 at the end of the warm-up, 0 from ``total_steps`` on."""
        if self.kind == "constant":
            return 1.0
        if step >= self.total_steps:
            return 0.0
        if self.kind == "wsd":
            return min(1.0, (self.total_steps - step) / self.decay_steps)
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
