"""Simulates many replicas that fail and return: what losses and joiners cost, by the number of replicas.

Without losses it agrees with `diloco.plan.simulate`: the same rounds and bytes, and up to rounding the same
compute utilisation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.scale.churn import Churn
from benchmarks.scale.churn_run import ChurnRun
from diloco.algorithm import Codec, Send, SyncSchedule
from diloco.errors import ConfigurationError
from diloco.plan import Cluster, Workload
from diloco.transport import Link

__all__ = ["Scaled", "simulate_churn", "sweep"]


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """The result of the measured part of a run.

    Attributes:
        steps: the number of inner steps.
        wall_s: their duration, mean over the members.
        rounds: the number of rounds, merged or void.
        void_rounds: the number of rounds that no replica applied.
        losses, joins: the numbers of view changes.
        compute_utilization: the compute utilisation of the replicas while they were members.
        goodput: the replica-steps that reached the global parameters, over those that M replicas compute in ``wall_s``
            if they never fail or wait.
        members_share: the mean share of the M replicas that were members.
        staleness: the steps of work that are not in the global parameters yet, mean over time, in H; ``1/2 + tau/H`` if
            every round is committed.
        round_s: the time from the first contribution to the commit, mean over committed rounds.
        download_s: the time of a joiner's download if no other replica downloads.
        sent_bytes, received_bytes: the mean bytes of a member in a round, void rounds included.
        busiest_bytes: the most that one replica sent or received in the measured part.
    """

    steps: int
    wall_s: float
    rounds: int
    void_rounds: int
    losses: int
    joins: int
    compute_utilization: float
    goodput: float
    members_share: float
    staleness: float
    round_s: float
    download_s: float
    sent_bytes: float
    received_bytes: float
    busiest_bytes: float


def simulate_churn(
    workload: Workload,
    schedule: SyncSchedule,
    codec: Codec,
    cluster: Cluster,
    churn: Churn,
    *,
    cycles: int = 10,
    warm_up: int = 2,
    jitter: float = 0.0,
) -> Scaled:
    """Simulate ``(warm_up + 1 + cycles) * H`` steps that all M replicas begin, and measure the last ``cycles * H``.

    The work that a lost replica has not sent is lost. In its first round of each fragment, and in the first after it
    has fetched the fragment again, a joiner takes part without its work counting; the next round contains its work
    since it joined. The bytes of void rounds count as moved.

    Raises:
        ConfigurationError: if ``cycles`` is below 1 or ``warm_up`` below 0.

    >>> from diloco.algorithm.codec import make_codec
    >>> workload = Workload(parameters=10**9, layers=24, step_time_s=0.1)
    >>> schedule = SyncSchedule(inner_steps=100, num_fragments=8, overlap_steps=5)
    >>> links = Cluster.of([Link(1e9, 0.04)] * 8, 0.1)
    >>> run = simulate_churn(workload, schedule, make_codec("fp4"), links, Churn())
    >>> round(run.goodput, 3), run.rounds, round(run.staleness, 2)
    (0.287, 80, 0.55)
    """
    period = schedule.inner_steps
    begin, steps = (warm_up + 1) * period, (warm_up + 1 + cycles) * period
    if cycles < 1 or warm_up < 0:
        raise ConfigurationError(
            f"cycles must be at least 1 and warm_up at least 0, got cycles={cycles} and warm_up={warm_up}. Nothing was "
            "computed."
        )
    run = ChurnRun(workload, schedule, codec, cluster, churn, steps, jitter)
    before = None
    for step in schedule.busy_steps(steps):
        if before is None and step > begin:
            before = run.totals(begin)
        run.change_members(step)
        for action in schedule.actions(step):
            if isinstance(action, Send):
                run.send(action.fragment, step)
            else:
                run.merge(action.fragment, step)
    after = run.totals(steps)
    assert before is not None, "every fragment is sent in every H steps"
    return _measured(run, {name: after[name] - before[name] for name in after}, cycles * period)


def _measured(run: ChurnRun, counted: Mapping[str, Any], steps: int) -> Scaled:
    compute_s = counted["computed_s"] - counted["away_compute_s"]
    some = compute_s > 0
    spent_s = (compute_s + counted["waited_s"] + counted["spent_s"])[some]
    wall_s = counted["wall_s"]
    number, handed_in = run.cluster.num_replicas, max(1.0, counted["handed_in"])
    ideal_steps = float((wall_s / run.cluster.step_time_s).sum())
    rate = run.churn.state_share * float(run.bandwidth.min())
    return Scaled(
        steps=steps,
        wall_s=wall_s,
        rounds=int(counted["rounds"]),
        void_rounds=int(counted["void_rounds"]),
        losses=int(counted["losses"]),
        joins=int(counted["joins"]),
        compute_utilization=float((compute_s[some] / spent_s).mean()) if some.any() else 0.0,
        goodput=float(counted["kept"] / ideal_steps),
        members_share=1 - float(counted["away_steps"].sum()) / (number * steps),
        staleness=float(counted["stale"] / counted["carried"] / run.sync.inner_steps)
        if counted["carried"]
        else math.inf,
        round_s=float(counted["round_s"] / counted["committed"]) if counted["committed"] else math.inf,
        download_s=8 * float(run.state_bytes.sum()) / rate,
        sent_bytes=float(counted["sent"].sum()) / handed_in,
        received_bytes=float(counted["received"].sum()) / handed_in,
        busiest_bytes=float(max(counted["sent"].max(), counted["received"].max())),
    )


def sweep(
    models: Mapping[str, Workload],
    *,
    replicas: Sequence[int] = (2, 4, 8, 16, 32, 64, 125, 250, 500, 1000),
    codecs: Sequence[Codec],
    bandwidths_bits_per_s: Sequence[float],
    churns: Sequence[Churn] = (Churn(),),
    jitters: Sequence[float] = (0.0,),
    latency_s: float = 0.04,
    inner_steps: int = 100,
    overlap_steps: int = 5,
    cycles: int = 10,
) -> Iterator[dict[str, Any]]:
    """Yield one row for each combination, as plain values: the scenario, then the fields of `Scaled`.

    There are `Workload.default_fragments` fragments, at most H. All links and step times of a scenario are equal. All
    random numbers come from the seeds of ``churns``, so the same call gives the same rows.
    """
    for (name, workload), codec, churn in itertools.product(models.items(), codecs, churns):
        schedule = SyncSchedule(
            inner_steps=inner_steps,
            num_fragments=min(workload.default_fragments, inner_steps),
            overlap_steps=overlap_steps,
        )
        for bandwidth, jitter, number in itertools.product(bandwidths_bits_per_s, jitters, replicas):
            links = [Link(bandwidth, latency_s)] * number
            cluster = Cluster.of(links, workload.step_time_s)
            done = simulate_churn(workload, schedule, codec, cluster, churn, cycles=cycles, jitter=jitter)
            yield {
                "model": name,
                "codec": codec.name,
                "replicas": number,
                "bandwidth_bits_per_s": bandwidth,
                "jitter": jitter,
                "mtbf_s": churn.mtbf_s,
                "donors": churn.donors,
                "refetch": churn.refetch,
                **asdict(done),
            }
