"""A simulated run as spans of time, and the highest rate that its uplinks carried: what the pictures show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigurationError
from diloco.simulate.cluster import Cluster
from diloco.simulate.utilization import Round, Simulated
from diloco.units import format_bytes

__all__ = ["LANES", "Lane", "Span", "peak_bytes_per_s", "timeline"]

Floats = NDArray[np.float64]

Lane = Literal["compute", "wait", "spent", "send", "receive"]
"""compute: inner steps; wait: for the average of a merge; spent: encoding, outer steps and merging (`Overheads`);
send, receive: payload on the replica's link. The first three take turns."""

LANES: tuple[Lane, ...] = ("compute", "wait", "spent", "send", "receive")


@dataclass(frozen=True)
class Span:
    """One thing that one replica or its link does without a break.

    Attributes:
        replica: m.
        lane: where; spans of one lane of one replica do not overlap.
        start_s: in seconds from the start of the run.
        stop_s: ``start_s`` or later; the same only for payload on a link without limits.
        label: what, for people.
        fragment: p, where it is about one.
    """

    replica: int
    lane: Lane
    start_s: float
    stop_s: float
    label: str
    fragment: int | None = None


@dataclass(frozen=True)
class _Stop:
    """A replica stands still after inner step ``step``: it waits up to ``waited_s``, then is busy up to ``stop_s``."""

    step: int
    start_s: float
    waited_s: float
    stop_s: float
    fragment: int
    round: str
    busy_with: Literal["encodes", "merges"]


def timeline(simulated: Simulated, cluster: Cluster, steps: int, scenario: tuple[int, ...] = ()) -> tuple[Span, ...]:
    """The spans of the first ``steps`` inner steps, by replica and start.

    A replica's spans of compute, wait and spent follow each other without gaps from 0 to the end of the last of the
    steps (and of what is to be done after it). Payload that was sent by then is there up to the end of its transfer,
    which may be later. A parcel that leaves in parts stands where it would be if it left in one piece and was out at
    the same time.

    Args:
        simulated: of these or more steps, with ``history=True``.
        cluster: that it was simulated on.
        steps: inner steps to show, at least 1.
        scenario: which of the scenarios, an index for each of their axes.

    Raises:
        ConfigurationError: without a history, for no steps, and for a scenario that is not there.
    """
    shape = simulated.compute_s.shape
    _check_history(simulated)
    fits = len(scenario) == len(shape) - 1 and all(
        -size <= index < size for index, size in zip(scenario, shape, strict=False)
    )
    if steps < 1 or not fits:
        raise ConfigurationError(
            f"steps={steps} and scenario={scenario} were given; at least one step, and one index for each of the axes "
            f"{shape[:-1]}, would work. Nothing was drawn."
        )
    computed_s = cluster.computed_s(steps)
    spans: list[Span] = []
    for replica in range(shape[-1]):
        where = (*scenario, replica)
        rounds = [_at(each, shape, where) for each in simulated.history if each.send_step <= steps]
        compute_s = computed_s[:, min(replica, computed_s.shape[-1] - 1)]
        own = [*_loop(replica, rounds, compute_s, steps), *_transfers(replica, rounds)]
        spans.extend(sorted(own, key=lambda span: (span.start_s, span.stop_s)))
    return tuple(spans)


@dataclass(frozen=True)
class _OneRound:
    """`Round` of one replica in one scenario."""

    whole: Round
    sent_bytes: float
    received_bytes: float
    up_s: tuple[float, float]
    down_s: tuple[float, float]
    send_s: tuple[float, float]
    merge_s: tuple[float, float, float]

    @property
    def name(self) -> str:
        return f"fragment {self.whole.fragment}, round {self.whole.outer_step}"


def _at(each: Round, shape: tuple[int, ...], where: tuple[int, ...]) -> _OneRound:
    def value(array: Floats) -> float:
        return float(np.broadcast_to(array, shape)[where])

    times = each.times
    return _OneRound(
        whole=each,
        sent_bytes=value(each.sent_bytes),
        received_bytes=value(each.received_bytes),
        up_s=(value(times.up_start_s), value(times.up_end_s)),
        down_s=(value(times.down_start_s), value(times.down_end_s)),
        send_s=(value(each.send_start_s), value(each.send_stop_s)),
        merge_s=(value(each.merge_start_s), value(each.merge_stop_s), value(each.merged_s)),
    )


def _loop(replica: int, rounds: Sequence[_OneRound], computed_s: Floats, steps: int) -> list[Span]:
    """Compute, wait and spent: stops, and inner steps between them."""
    stops: list[_Stop] = []
    for each in rounds:
        begin_s, end_s = each.send_s
        stops.append(_Stop(each.whole.send_step, begin_s, begin_s, end_s, each.whole.fragment, each.name, "encodes"))
        if each.whole.merge_step is not None and each.whole.merge_step <= steps:
            stops.append(_Stop(each.whole.merge_step, *each.merge_s, each.whole.fragment, each.name, "merges"))
    spans: list[Span] = []
    now_s, done = 0.0, 0

    def add(lane: Lane, stop_s: float, label: str, fragment: int | None = None) -> None:
        nonlocal now_s
        if stop_s > now_s:
            spans.append(Span(replica, lane, now_s, stop_s, label, fragment))
            now_s = stop_s

    for stop in sorted(stops, key=lambda stop: (stop.step, stop.start_s)):
        if stop.step > done:
            add("compute", stop.start_s, _steps(done, stop.step))
            done = stop.step
        add("wait", stop.waited_s, f"waits for {stop.round}", stop.fragment)
        add("spent", stop.stop_s, f"{stop.busy_with} {stop.round}", stop.fragment)
    if steps > done:
        add("compute", now_s + float(computed_s[steps] - computed_s[done]), _steps(done, steps))
    return spans


def _transfers(replica: int, rounds: Sequence[_OneRound]) -> list[Span]:
    spans: list[Span] = []
    for each in rounds:
        ways: tuple[tuple[Lane, tuple[float, float], float], ...] = (
            ("send", each.up_s, each.sent_bytes),
            ("receive", each.down_s, each.received_bytes),
        )
        for lane, (start_s, stop_s), num_bytes in ways:
            if num_bytes > 0:
                label = f"{each.name}, {format_bytes(num_bytes)}"
                spans.append(Span(replica, lane, start_s, stop_s, label, each.whole.fragment))
    return spans


def _steps(done: int, upto: int) -> str:
    return f"step {upto}" if upto == done + 1 else f"steps {done + 1} to {upto}"


def peak_bytes_per_s(simulated: Simulated, window_s: float | None = None) -> Floats:
    """The highest rate of payload that any replica's uplink carried over any window of time, ``(...)`` by scenario.

    Windows are half-open, so that what a link without limits carries at once counts in one window, not in the next.

    Args:
        simulated: with ``history=True``; all rounds count, before the measured part, too.
        window_s: how long, above 0; default: the mean time of a step, by scenario.

    Raises:
        ConfigurationError: without a history, and for a window that is none.
    """
    _check_history(simulated)
    if window_s is not None and not 0 < window_s < math.inf:
        raise ConfigurationError(f"a window of {window_s} s was given; above 0 s would work. Nothing was computed.")
    shape = simulated.compute_s.shape
    windows_s = np.asarray(simulated.compute_s.mean(-1) / simulated.steps if window_s is None else window_s)
    windows_s = np.broadcast_to(windows_s[..., None], shape).reshape(-1)
    peaks = np.zeros(windows_s.shape)
    if simulated.history:
        starts, stops, sizes = (
            np.stack([np.broadcast_to(array, shape).reshape(-1) for array in arrays], axis=-1)
            for arrays in (
                [each.times.up_start_s for each in simulated.history],
                [each.times.up_end_s for each in simulated.history],
                [each.sent_bytes for each in simulated.history],
            )
        )
        peaks = np.array([_peak(*columns) for columns in zip(starts, stops, sizes, windows_s, strict=True)])
    highest: Floats = peaks.reshape(shape).max(-1)
    return highest


def _peak(starts: Floats, stops: Floats, sizes: Floats, window_s: float) -> float:
    """Of one uplink: what it carried up to a time is linear between edges of its transfers, which do not overlap, with
    a jump at a transfer that takes no time. All transfers have the link's rate, so some best window begins with one:
    what begins in the middle of a transfer loses nothing when it begins earlier."""
    order = np.lexsort((stops, starts))
    edges = np.stack([starts[order], stops[order]], axis=-1).reshape(-1)
    sent = np.cumsum(sizes[order])
    carried = np.stack([sent - sizes[order], sent], axis=-1).reshape(-1)
    # a little less than the window: two jumps that are exactly one window apart must not depend on rounding
    length_s = window_s * (1 - 1e-9)
    begins = edges[::2]
    upto = _carried(edges, carried, begins + length_s, "right") - _carried(edges, carried, begins, "left")
    return float(upto.max()) / window_s


def _carried(edges: Floats, carried: Floats, at_s: Floats, side: Literal["left", "right"]) -> Floats:
    """Bytes carried up to ``at_s``; a jump at that very time counts from the right, and does not from the left."""
    index = np.searchsorted(edges, at_s, side=side)
    before, after = np.clip(index - 1, 0, None), np.clip(index, None, len(edges) - 1)
    gap_s = edges[after] - edges[before]
    part = np.where(gap_s > 0, np.clip((at_s - edges[before]) / np.where(gap_s > 0, gap_s, 1.0), 0, 1), 0.0)
    total: Floats = carried[before] + part * (carried[after] - carried[before])
    return total


def _check_history(simulated: Simulated) -> None:
    if not simulated.history and bool(simulated.sent_bytes.any()):
        raise ConfigurationError(
            "a simulation without its rounds was given; simulate(..., history=True) would work. Nothing was computed."
        )
