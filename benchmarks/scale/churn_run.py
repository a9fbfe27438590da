"""One simulated run of replicas that fail and return; a round has the replicas that are members when it begins.

Schedule, sizes and links are those of `diloco.plan.simulate`. Membership follows the torch transport: a loss or
a join ends the view and voids the rounds in flight, whose work travels with the next round of their fragment.
`benchmarks.scale.churn` draws the losses and joins.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.churn import Churn, Membership, ViewChange
from diloco.algorithm import Codec, SyncSchedule
from diloco.plan import Cluster, Traffic, Workload
from diloco.transport import LinkArrays, round_times

__all__ = ["ChurnRun"]

Floats = NDArray[np.float64]

STATE_BYTES_PER_VALUE = 8
"""Global parameters and one outer momentum, both float32."""


class _InFlight(NamedTuple):
    members: NDArray[np.intp]
    contributes: NDArray[np.bool_]
    sent_step: int
    until_s: float
    void: bool


class ChurnRun:
    """Clocks, links and membership of M replicas, ``(M,)``; by fragment ``(M, P)``."""

    def __init__(
        self,
        workload: Workload,
        schedule: SyncSchedule,
        codec: Codec,
        cluster: Cluster,
        churn: Churn,
        steps: int,
        jitter: float = 0.0,
    ) -> None:
        self.workload, self.schedule, self.codec, self.cluster, self.churn = workload, schedule, codec, cluster, churn
        number, fragments = cluster.num_replicas, schedule.num_fragments
        links, shape = cluster.links, (number,)
        self.bandwidth: Floats = np.broadcast_to(links.bandwidth_bits_per_s, shape)
        self.latency: Floats = np.broadcast_to(links.latency_s, shape)
        self.sizes = np.array(workload.fragment_sizes(fragments), dtype=float)
        self.state_bytes = STATE_BYTES_PER_VALUE * self.sizes
        self.membership = Membership(churn, self.bandwidth, float(self.state_bytes.sum()))
        self.present = np.ones(number, dtype=bool)
        self.dies_s = np.full(number, math.inf)
        self.shift_s, self.waited_s, self.spent_s = np.zeros(number), np.zeros(number), np.zeros(number)
        self.up_free_s, self.down_free_s = np.zeros(number), np.zeros(number)
        self.sent_bytes, self.received_bytes = np.zeros(number), np.zeros(number)
        self.away_steps, self.away_compute_s = np.zeros(number), np.zeros(number)
        self.left_step = np.zeros(number, dtype=int)
        self.last_sent = np.zeros((number, fragments), dtype=int)
        self.settled, self.fetched_s = np.ones((number, fragments), dtype=bool), np.full((number, fragments), math.inf)
        self.changed_s = np.full(fragments, -math.inf)
        self.links_from_s = -math.inf
        self.in_flight: dict[int, _InFlight] = {}
        self.counts = dict.fromkeys(("rounds", "void_rounds", "losses", "joins"), 0)
        self.sums = dict.fromkeys(("kept", "carried", "stale", "round_s", "committed", "handed_in"), 0.0)
        self._traffic: dict[int, Traffic] = {}
        self.computed_s = cluster.computed_s(steps)
        if jitter:  # step times from a gamma distribution with this standard deviation relative to their mean
            drawn = np.random.default_rng(churn.seed).gamma(jitter**-2, jitter**2, (steps, number))
            self.computed_s[1:] = np.cumsum(drawn * cluster.step_time_s, axis=0)

    def now_s(self, step: int) -> Floats:
        """Return each replica's clock when it has computed ``step`` steps, with its waits so far."""
        clocks: Floats = self.computed_s[step] + self.waited_s + self.spent_s + self.shift_s
        return clocks

    def change_members(self, step: int) -> None:
        """Apply the changes that are noticed before the first member begins to synchronise ``step``."""
        while True:
            now_s = self.now_s(step)
            working = self._working(now_s)
            pending = self.membership.pending
            if not working.any():  # no time passes until a replica joins
                if not pending:
                    self._draw(self.membership.next_event_s())
                    continue
                first_s = pending[0].notice_s
            else:
                first_s = float(now_s[working].min())
                self._draw(float(now_s[working].max()))
                if not (self._working(now_s) == working).all():
                    continue
                if not pending or pending[0].notice_s > first_s:
                    return
            self._apply(heapq.heappop(pending), step, first_s)

    def send(self, fragment: int, step: int) -> None:
        """Send between the members as `diloco.plan.simulate` does; all payloads leave at the end of the step."""
        members = np.flatnonzero(self.present)
        parcel, overheads = self._traffic_between(len(members)).parcels[fragment], self.cluster.overheads
        self.spent_s[members] += overheads.send_s_per_value * parcel.numel
        ready_s = np.maximum(self.now_s(step)[members], self.links_from_s)
        first_s = float(ready_s.min())
        left = np.where(self.membership.serves_at(first_s), 1 - self.churn.state_share, 1.0)
        links = LinkArrays((left * self.bandwidth)[members], self.latency[members])
        up_s, down_s = self.up_free_s[members], self.down_free_s[members]
        times = round_times(links, ready_s, parcel.sent_bytes, parcel.received_bytes, up_s, down_s)
        overhead_s = float(self.cluster.overhead_s(parcel, links).max())
        until_s = float(times.committed_s.max()) + overhead_s
        void_s = self._void_at_s(float(times.committed_s.max()))
        void = math.isfinite(void_s)
        # what a void round has not sent by then is dropped with its connections
        self.up_free_s[members] = np.minimum(times.up_end_s, void_s)
        self.down_free_s[members] = np.minimum(np.maximum(down_s, times.down_end_s), void_s)
        if void:
            until_s = void_s + self.churn.view_change_s
        else:
            self.sums["round_s"] += float(times.committed_s.max()) - first_s
            self.sums["committed"] += 1
        self.sent_bytes[members] += parcel.sent_bytes
        self.received_bytes[members] += parcel.received_bytes
        self.sums["handed_in"] += len(members)
        self.in_flight[fragment] = _InFlight(members, self.settled[members, fragment], step, until_s, void)

    def merge(self, fragment: int, step: int) -> None:
        """Wait for the round; a replica new to the fragment finds out whether it has the current state."""
        sent, overheads = self.in_flight.pop(fragment), self.cluster.overheads
        now_s = self.now_s(step)
        here = sent.members[self._working(now_s)[sent.members]]
        self.waited_s[here] += np.maximum(0.0, np.minimum(sent.until_s, self.dies_s[here]) - now_s[here])
        self.spent_s[here] += overheads.merge_s_per_value * int(self.sizes[fragment])
        self.counts["rounds"] += 1
        self.counts["void_rounds"] += sent.void
        if sent.void:
            return
        contributors = sent.members[sent.contributes]
        carried = sent.sent_step - self.last_sent[contributors, fragment]
        share = self.sizes[fragment] / self.sizes.sum()
        self.sums["kept"] += share * float(carried.sum())
        self.sums["carried"] += float(carried.sum())
        self.sums["stale"] += float((carried * (self.schedule.overlap_steps + carried / 2)).sum())
        self.last_sent[contributors, fragment] = sent.sent_step
        for replica in sent.members[~sent.contributes]:
            if self.churn.refetch and self.fetched_s[replica, fragment] < self.changed_s[fragment]:
                donor = int(np.flatnonzero(self.present)[0])
                state_bytes = float(self.state_bytes[fragment])
                self.waited_s[replica] += self.membership.transfer_s(int(replica), donor, state_bytes)
                self.fetched_s[replica, fragment] = math.inf  # at the next round it equals that of the others
            else:
                self.settled[replica, fragment] = True
        self.changed_s[fragment] = max(sent.until_s, float(now_s[here].min(initial=sent.until_s)))

    def totals(self, step: int) -> dict[str, Any]:
        """Return the totals so far; `simulate_churn` takes their difference."""
        away, now_s = ~self.present, self.now_s(step)
        since_s = self.computed_s[step] - np.take_along_axis(self.computed_s, self.left_step[None], 0)[0]
        return {
            **self.counts,
            **self.sums,
            "wall_s": float(now_s[self.present].mean() if self.present.any() else now_s.mean()),
            "waited_s": self.waited_s.copy(),
            "spent_s": self.spent_s.copy(),
            "computed_s": self.computed_s[step],
            "sent": self.sent_bytes.copy(),
            "received": self.received_bytes.copy(),
            "away_steps": self.away_steps + np.where(away, step - self.left_step, 0),
            "away_compute_s": self.away_compute_s + np.where(away, since_s, 0.0),
        }

    def _apply(self, change: ViewChange, step: int, first_s: float) -> None:
        self.counts["joins" if change.joins else "losses"] += 1
        self.links_from_s = change.notice_s + self.churn.view_change_s
        self.present[change.replica] = change.joins
        if change.joins:
            self._admit(change.replica, step, max(first_s, change.notice_s))
        else:
            self.left_step[change.replica] = step

    def _admit(self, replica: int, step: int, time_s: float) -> None:
        """Put a joiner at the step of the others; some of the state that it fetched may have changed since."""
        self.shift_s[replica] += time_s - float(self.now_s(step)[replica])
        left = self.left_step[replica]
        self.away_steps[replica] += step - left
        self.away_compute_s[replica] += self.computed_s[step, replica] - self.computed_s[left, replica]
        self.last_sent[replica], self.settled[replica] = step, False
        parts = np.concatenate([[0.0], np.cumsum(self.state_bytes)[:-1]]) / self.state_bytes.sum()
        begin_s = float(self.membership.fetched_s[replica])
        self.fetched_s[replica] = begin_s + parts * (time_s - begin_s)
        self.up_free_s[replica] = self.down_free_s[replica] = time_s
        losses = [change.cause_s for change in self.membership.pending if change.replica == replica]
        self.dies_s[replica] = min(losses, default=math.inf)

    def _working(self, now_s: Floats) -> NDArray[np.bool_]:
        """Return the members that are alive at their time ``now_s``, whether or not a loss has been noticed."""
        return self.present & (now_s < self.dies_s)

    def _void_at_s(self, committed_s: float) -> float:
        void_s = self.membership.void_at_s(committed_s)
        self._note_losses()
        return void_s

    def _draw(self, until_s: float) -> None:
        self.membership.draw(until_s)
        self._note_losses()

    def _note_losses(self) -> None:
        for change in self.membership.pending:
            if not change.joins and self.present[change.replica]:
                self.dies_s[change.replica] = min(self.dies_s[change.replica], change.cause_s)

    def _traffic_between(self, members: int) -> Traffic:
        if members not in self._traffic:
            self._traffic[members] = self.workload.traffic(self.schedule, self.codec, members)
        return self._traffic[members]
