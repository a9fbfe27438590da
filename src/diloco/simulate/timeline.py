"""A simulated run as spans of time, and the highest rate that its uplinks carried, for pictures and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigurationError
from diloco.simulate.cluster import Cluster
from diloco.simulate.utilization import Simulated, SimulatedRound
from diloco.units import format_bytes

__all__ = ["Lane", "Span", "peak_bytes_per_s", "timeline"]

Floats = NDArray[np.float64]

Lane = Literal["compute", "wait", "spent", "send", "receive"]
"""compute: inner steps; wait: waiting for the average of a merge; spent: encoding, outer steps and merging
(`Overheads`); send, receive: payload on the replica's link. The first three never overlap."""


@dataclass(frozen=True)
class Span:
    """An uninterrupted activity of a replica or its link."""

    replica: int  # m
    lane: Lane  # kind of activity; spans in one lane of a replica do not overlap
    start_s: float  # seconds from the start of the run
    stop_s: float  # ``start_s`` or later; equal only for payload on an unlimited link
    label: str  # description for users
    fragment: int | None = None  # p, if the activity is about one fragment


def timeline(simulated: Simulated, cluster: Cluster, steps: int) -> tuple[Span, ...]:
    """Return the spans of the first ``steps`` inner steps, ordered by replica and start.

    The spans compute, wait and spent of a replica follow each other without gaps, from 0 to the end of the last step
    and of the sends and merges after it. Payload sent by then is shown until its transfer ends, which may be later. A
    parcel that is sent in parts is shown as one transfer that ends at the same time.

    Args:
        simulated: a simulation of at least ``steps`` steps and one scenario, with ``history=True``.

    Raises:
        ConfigurationError: without a history, for less than one step, and for several scenarios.
    """
    shape = simulated.compute_s.shape
    _check_history(simulated)
    if steps < 1 or len(shape) > 1:
        raise ConfigurationError(
            f"a timeline needs at least one step and a single scenario of the shape (replicas,), got {steps} steps and "
            f"the shape {shape}."
        )
    computed_s = cluster.computed_s(steps)
    rounds = [each for each in simulated.history if each.send_step <= steps]
    spans: list[Span] = []
    for replica in range(shape[-1]):

        def at(array: Floats, of: int = replica) -> float:
            return float(np.broadcast_to(array, shape)[of])

        compute_s = computed_s[:, min(replica, computed_s.shape[-1] - 1)]
        own = [*_loop(replica, rounds, at, compute_s), *_transfers(replica, rounds, at)]
        spans.extend(sorted(own, key=lambda span: (span.start_s, span.stop_s)))
    return tuple(spans)


def _loop(
    replica: int, rounds: Sequence[SimulatedRound], at: Callable[[Floats], float], computed_s: Floats
) -> list[Span]:
    """Return the spans compute, wait and spent of a replica.

    Args:
        rounds: the rounds sent in the steps that are shown.
        at: returns this replica's value of an array of `SimulatedRound`.
        computed_s: the compute time of the replica after each step, ``(steps + 1,)``.
    """
    steps = len(computed_s) - 1
    # (step, time at which computing stops, end of the wait, end of the work, verb for the label, round)
    stops: list[tuple[int, float, float, float, str, SimulatedRound]] = []
    for each in rounds:
        begin_s = at(each.send_start_s)
        stops.append((each.send_step, begin_s, begin_s, at(each.send_stop_s), "encodes", each))
        if each.merge_step is not None and each.merge_step <= steps:
            merge_s = (at(each.merge_start_s), at(each.merge_stop_s), at(each.merged_s))
            stops.append((each.merge_step, *merge_s, "merges", each))
    spans: list[Span] = []
    now_s, done = 0.0, 0

    def add(lane: Lane, stop_s: float, label: str, fragment: int | None = None) -> None:
        nonlocal now_s
        if stop_s > now_s:
            spans.append(Span(replica, lane, now_s, stop_s, label, fragment))
            now_s = stop_s

    for step, start_s, waited_s, stop_s, does, each in sorted(stops, key=lambda stop: stop[:2]):
        if step > done:
            add("compute", start_s, _steps(done, step))
            done = step
        add("wait", waited_s, f"waits for {_name(each)}", each.fragment)
        add("spent", stop_s, f"{does} {_name(each)}", each.fragment)
    if steps > done:
        add("compute", now_s + float(computed_s[steps] - computed_s[done]), _steps(done, steps))
    return spans


def _transfers(replica: int, rounds: Sequence[SimulatedRound], at: Callable[[Floats], float]) -> list[Span]:
    spans: list[Span] = []
    for each in rounds:
        times = each.times
        ways: tuple[tuple[Lane, Floats, Floats, Floats], ...] = (
            ("send", times.up_start_s, times.up_end_s, each.sent_bytes),
            ("receive", times.down_start_s, times.down_end_s, each.received_bytes),
        )
        for lane, start_s, stop_s, num_bytes in ways:
            if at(num_bytes) > 0:
                label = f"{_name(each)}, {format_bytes(at(num_bytes))}"
                spans.append(Span(replica, lane, at(start_s), at(stop_s), label, each.fragment))
    return spans


def _name(each: SimulatedRound) -> str:
    return f"fragment {each.fragment}, round {each.outer_step}"


def _steps(done: int, upto: int) -> str:
    return f"step {upto}" if upto == done + 1 else f"steps {done + 1} to {upto}"


def peak_bytes_per_s(simulated: Simulated, window_s: float | None = None) -> Floats:
    """Return the highest rate of payload on any replica's uplink over any window of time, ``(...)`` by scenario.

    Windows are half-open, so a payload that an unlimited link carries instantly counts in exactly one of two adjacent
    windows.

    Args:
        simulated: a simulation with ``history=True``; all rounds count, including those before the measured part.
        window_s: the length of the window, above 0. Default: the mean time of a step, by scenario.

    Raises:
        ConfigurationError: without a history, and for a window that is not above 0.
    """
    _check_history(simulated)
    if window_s is not None and not 0 < window_s < math.inf:
        raise ConfigurationError(f"the window must be above 0 s and finite, got {window_s} s.")
    shape = simulated.compute_s.shape
    if not simulated.history:
        return np.zeros(shape[:-1])
    windows_s = np.asarray(simulated.compute_s.mean(-1) / simulated.steps if window_s is None else window_s)
    windows_s = np.broadcast_to(windows_s[..., None], shape).reshape(-1)
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
    """Return the peak rate of one uplink.

    The number of bytes carried by a time is linear between the edges of the transfers, which do not overlap, with a
    jump at a transfer that takes no time. All transfers have the link's rate, so one of the best windows begins with a
    transfer: a window that begins inside a transfer loses nothing if it begins earlier.
    """
    order = np.lexsort((stops, starts))
    edges = np.stack([starts[order], stops[order]], axis=-1).reshape(-1)
    sent = np.cumsum(sizes[order])
    carried = np.stack([sent - sizes[order], sent], axis=-1).reshape(-1)
    # slightly less than the window, so that two jumps exactly one window apart do not depend on rounding
    length_s = window_s * (1 - 1e-9)
    begins = edges[::2]
    upto = _carried(edges, carried, begins + length_s, "right") - _carried(edges, carried, begins, "left")
    return float(upto.max()) / window_s


def _carried(edges: Floats, carried: Floats, at_s: Floats, side: Literal["left", "right"]) -> Floats:
    """Return the bytes carried by ``at_s``. A jump exactly at ``at_s`` counts for "right" and not for "left"."""
    index = np.searchsorted(edges, at_s, side=side)
    before, after = np.clip(index - 1, 0, None), np.clip(index, None, len(edges) - 1)
    gap_s = edges[after] - edges[before]
    part = np.where(gap_s > 0, np.clip((at_s - edges[before]) / np.where(gap_s > 0, gap_s, 1.0), 0, 1), 0.0)
    total: Floats = carried[before] + part * (carried[after] - carried[before])
    return total


def _check_history(simulated: Simulated) -> None:
    if not simulated.history and bool(simulated.sent_bytes.any()):
        raise ConfigurationError("the simulation has no history of its rounds. Use simulate(..., history=True).")
