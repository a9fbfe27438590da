"""Replicas that fail and return: compared with the simulator (without losses), with formulas, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.scale.churn import Churn, void_probability
from benchmarks.scale.churn_run import ChurnRun
from benchmarks.scale.messages import counted
from benchmarks.scale.round_cost import RoundCost
from benchmarks.scale.sweep import Scaled, simulate_churn, sweep
from diloco.algorithm import SyncSchedule, make_codec
from diloco.errors import ConfigurationError
from diloco.plan import Cluster, Overheads, Workload, simulate
from diloco.transport import Link

FLOAT32 = make_codec("float32")
SMALL = Workload(parameters=1_000_000, layers=4, step_time_s=1.0)
BLOCKING = SyncSchedule(inner_steps=10)
STREAMING = SyncSchedule(inner_steps=10, num_fragments=4, overlap_steps=3)


def cluster(number: int, *, bandwidth: float = 8e6, latency_s: float = 0.1) -> Cluster:
    return Cluster.of([Link(bandwidth, latency_s)] * number, SMALL.step_time_s)


def run(number: int, churn: Churn, *, schedule: SyncSchedule = BLOCKING, cycles: int = 20) -> Scaled:
    return simulate_churn(SMALL, schedule, FLOAT32, cluster(number), churn, cycles=cycles)


@pytest.mark.parametrize("number", [1, 2, 3, 20])
@pytest.mark.parametrize("schedule", [BLOCKING, STREAMING])
def test_without_losses_it_is_the_simulator(number: int, schedule: SyncSchedule) -> None:
    overheads = Overheads(goodput=0.9, round_trips=2, send_s_per_value=1e-8, merge_s_per_value=2e-8)
    place = replace(cluster(number), overheads=overheads)
    ours = simulate_churn(SMALL, schedule, FLOAT32, place, Churn(), cycles=3, warm_up=2)
    theirs = simulate(SMALL.traffic(schedule, FLOAT32, number), place, steps=60, measure_from=30)
    assert ours.compute_utilization == pytest.approx(float(theirs.compute_utilization), rel=1e-12)
    assert (ours.rounds, ours.void_rounds, ours.losses, ours.joins) == (len(theirs.merged), 0, 0, 0)
    assert ours.sent_bytes == pytest.approx(theirs.sent_bytes.mean() / len(theirs.merged))
    assert ours.received_bytes == pytest.approx(theirs.received_bytes.mean() / len(theirs.merged))
    assert ours.busiest_bytes == max(theirs.sent_bytes.max(), theirs.received_bytes.max())
    assert ours.members_share == 1
    assert ours.staleness == pytest.approx(0.5 + schedule.overlap_steps / schedule.inner_steps)
    assert ours.goodput == pytest.approx(ours.compute_utilization)


def test_a_loss_by_hand() -> None:
    """Rounds of three take 5.53 s. Replica 2 ends at 12 s, which is noticed at 27 s, so step 10 is merged at 27.5 s."""
    churn = Churn(silence_s=15.0, silent_share=1.0, view_change_s=0.5, away_s=1e9)
    simulated = ChurnRun(SMALL, BLOCKING, FLOAT32, cluster(3), churn, 30)
    simulated.membership.expect(12.0, "fail", 2)
    for step in BLOCKING.busy_steps(20):
        simulated.change_members(step)
        simulated.send(0, step)
        simulated.merge(0, step)
        if step == 10:
            assert simulated.now_s(10)[:2].tolist() == [27.5, 27.5]
            assert (simulated.counts["void_rounds"], simulated.sums["kept"]) == (1, 0)
    assert simulated.present.tolist() == [True, True, False]
    assert simulated.counts == {"rounds": 2, "void_rounds": 1, "losses": 1, "joins": 0}
    assert simulated.sums["kept"] == 2 * 20  # the next round contains the work of the void one
    assert simulated.now_s(20)[0] == pytest.approx(37.5 + 4.0 + 0.2)  # two replicas, 4 MB each way, payload and vote
    assert simulated.waited_s[2] == 2.0  # a replica does not wait after its end


@pytest.mark.parametrize(("ends_s", "void"), [(9.9, True), (10.1, True), (14.1, True), (14.3, False)])
def test_only_a_loss_before_the_commit_makes_a_round_void(ends_s: float, void: bool) -> None:
    simulated = ChurnRun(SMALL, BLOCKING, FLOAT32, cluster(2), Churn(away_s=1e9, silent_share=1.0), 10)
    simulated.membership.expect(ends_s, "fail", 1)
    simulated.change_members(10)
    simulated.send(0, 10)
    simulated.merge(0, 10)
    assert simulated.counts["void_rounds"] == void


def test_a_joiner_by_hand() -> None:
    """A lost replica that returns at once joins the view when it has the state, and contributes two rounds later."""
    churn = Churn(silent_share=0.0, away_s=0.0, state_share=0.95, view_change_s=0.0)
    simulated = ChurnRun(SMALL, BLOCKING, FLOAT32, cluster(2), churn, 60)
    simulated.membership.expect(1.0, "fail", 1)  # 8 MB at 0.95 MB/s: it joins at 9.4 s, before the first round
    for step in BLOCKING.busy_steps(40):
        simulated.change_members(step)
        simulated.send(0, step)
        contributes = simulated.in_flight[0].contributes.tolist()
        simulated.merge(0, step)
        assert contributes == [True, step > 10]
    assert simulated.sums["kept"] == 40 + 30  # its work since step 10
    assert simulated.counts == {"rounds": 4, "void_rounds": 0, "losses": 1, "joins": 1}
    assert simulated.now_s(40)[0] == simulated.now_s(40)[1]


def test_what_has_changed_since_the_download_is_fetched_in_the_joiners_merge() -> None:
    """The download takes from 21 s to 37 s, a round is merged at 33.7 s, so the joiner's merge takes 16 s more."""
    for refetch in (True, False):
        churn = Churn(silent_share=0.0, away_s=0.0, view_change_s=0.0, refetch=refetch)
        simulated = ChurnRun(SMALL, BLOCKING, FLOAT32, cluster(3), churn, 60)
        simulated.membership.expect(16.0, "fail", 2)
        simulated.membership.serves_until_s[0] = 21.0
        merged_s = []
        for step in BLOCKING.busy_steps(50):
            simulated.change_members(step)
            simulated.send(0, step)
            simulated.merge(0, step)
            merged_s.append(simulated.now_s(step)[simulated.present].tolist())
        assert simulated.counts["joins"] == 1
        late_s = [max(each) - min(each) for each in merged_s]
        assert sum(each == pytest.approx(16.0) for each in late_s) == refetch
        # and the next round waits for the joiner
        assert len([each for each in late_s if each < 1e-9]) == 5 - refetch


def test_losses_alone_void_rounds_by_the_formula() -> None:
    churn = Churn(mtbf_s=40_000.0, silent_share=0.0, away_s=1e12)
    done = run(500, churn, cycles=400)
    expected = -math.expm1(-500 * done.members_share * done.round_s / churn.mtbf_s)
    assert done.joins == 0
    assert done.losses == pytest.approx(500 * done.members_share * done.wall_s / churn.mtbf_s, rel=0.35)
    assert done.void_rounds / done.rounds == pytest.approx(expected, abs=5 * math.sqrt(expected / 400))


def test_losses_and_joiners_void_rounds_by_the_formula() -> None:
    churn = Churn(mtbf_s=5_000.0, silent_share=0.0, away_s=1_000.0, state_share=0.01, donors="spread", refetch=False)
    done = run(50, churn, cycles=400)
    expected = void_probability(50 * done.members_share, done.round_s, churn)
    assert done.joins > 20
    assert 0.05 < expected < 0.5
    assert done.void_rounds / done.rounds == pytest.approx(expected, abs=5 * math.sqrt(expected / 400))


def test_the_formula() -> None:
    churn = Churn(mtbf_s=1000.0, silence_s=10.0, silent_share=0.5)
    assert void_probability(100, 0.0, Churn()) == 0
    assert void_probability(100, 2.5, churn) == pytest.approx(1 - math.exp(-1))
    assert void_probability(100, 2.5, churn, overlap_s=0.0) == pytest.approx(1 - math.exp(-0.5))
    assert void_probability(100, 2.5, churn) < void_probability(200, 2.5, churn) < 1


def test_more_failures_never_raise_goodput() -> None:
    done = [
        run(20, Churn(mtbf_s=mtbf_s, away_s=100.0), schedule=STREAMING, cycles=100)
        for mtbf_s in (math.inf, 20_000.0, 2_000.0, 400.0)
    ]
    goodput = [each.goodput for each in done]
    assert all(more < fewer - 0.02 for fewer, more in pairwise(goodput)), goodput
    assert done[-1].staleness > done[0].staleness
    assert done[-1].members_share < done[1].members_share < done[0].members_share == 1


def test_one_replica_alone_goes_on_when_it_is_back() -> None:
    done = run(1, Churn(mtbf_s=500.0, away_s=500.0), cycles=2000)
    assert done.void_rounds == 0
    assert done.compute_utilization > 0.99  # half a second per return
    assert done.losses > 15
    assert 0.3 < done.goodput < 0.7


def test_one_donor_keeps_up_with_fewer_joiners_than_all_do() -> None:
    churn = Churn(mtbf_s=500.0, away_s=10.0, state_share=0.1, refetch=False)
    first, spread = (run(30, replace(churn, donors=donors), cycles=300) for donors in ("first", "spread"))
    assert first.download_s == pytest.approx(80.0)
    assert spread.members_share > 0.7
    assert first.members_share < spread.members_share - 0.3


def test_silence_makes_the_others_wait() -> None:
    churn = Churn(mtbf_s=4_000.0, away_s=1e12, silent_share=0.0)
    at_once, silent = (run(100, replace(churn, silent_share=share)) for share in (0.0, 1.0))
    assert silent.compute_utilization < at_once.compute_utilization - 0.02


def test_the_seed_decides() -> None:
    churn = Churn(mtbf_s=2_000.0, away_s=100.0, seed=1)
    assert run(10, churn) == run(10, churn)
    assert run(10, churn) != run(10, replace(churn, seed=2))


@pytest.mark.parametrize(
    ("codec", "number", "pattern", "bytes_per_value"),
    [
        ("fp4", 8, "all-gather", 7 * (0.5 + 1 / 256)),
        ("fp4", 16, "reduce-scatter", 15 / 16 * (4.5 + 1 / 256)),
        ("fp4", 1000, "reduce-scatter", 4.5),
        ("bfloat16", 2, "all-gather", 2),
        ("bfloat16", 1000, "reduce-scatter", 6),
    ],
)
def test_bytes_per_value_have_an_asymptote(codec: str, number: int, pattern: str, bytes_per_value: float) -> None:
    cost = RoundCost.of(make_codec(codec), 1 << 28, number)
    assert cost.pattern == pattern
    assert cost.bytes_per_value == pytest.approx(bytes_per_value, rel=0.005)


def test_connections_messages_and_room() -> None:
    alone, two, five, many = (RoundCost.of(FLOAT32, 1_000_000, number) for number in (1, 2, 5, 1000))
    assert (alone.connections, alone.messages, alone.room_bytes) == (0, 0, 4_000_000)
    assert (two.connections, two.messages, two.room_bytes) == (5, 4, 8_000_000)
    assert (five.connections, five.messages) == (8, 40)
    assert (many.connections, many.messages) == (1998, 1_998_000)
    assert RoundCost.of(FLOAT32, 1_000_000, 5, streams=4).connections == 20
    assert RoundCost.of(make_codec("fp4"), 1 << 20, 8).room_bytes == 7 * 528_384 + 4 * (1 << 20)
    assert many.room_bytes == pytest.approx(2 * 4_000_000, rel=0.01)


@pytest.mark.parametrize(
    ("phase", "messages", "trips"),
    [("round", 2, 2), ("join", 2, 4), ("leave", 3, 3), ("kill", 3, 4), ("start, all at once", 14, 17)],
)
def test_what_a_member_says_to_another_does_not_grow_with_their_number(phase: str, messages: int, trips: int) -> None:
    """The number of trips does not grow either. The first trip of a kill is its detection. At a start several replicas
    join by one view change."""
    network = counted(phase, 8)
    assert network.messages <= messages * 8 * 7
    assert network.trips == trips


def test_a_sweep_has_a_row_for_every_scenario() -> None:
    rows = list(
        sweep(
            {"small": SMALL},
            replicas=(1, 2, 40),
            codecs=[make_codec("fp4"), FLOAT32],
            bandwidths_bits_per_s=[1e6, 1e9],
            churns=[Churn(), Churn(mtbf_s=10_000.0)],
            jitters=[0.0, 0.1],
            cycles=1,
        )
    )
    names = ("codec", "replicas", "bandwidth_bits_per_s", "mtbf_s", "jitter")
    assert len({tuple(row[name] for name in names) for row in rows}) == len(rows) == 3 * 2 * 2 * 2 * 2
    alone = [row for row in rows if row["replicas"] == 1 and row["mtbf_s"] == math.inf]
    assert all(row["compute_utilization"] == 1 and row["sent_bytes"] == 0 for row in alone)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mtbf_s": 0.0},
        {"away_s": -1.0},
        {"silence_s": math.inf},
        {"silent_share": 1.1},
        {"state_share": 0.0},
        {"state_share": 1.0},
        {"donors": "all"},
        {"mtbf_s": math.nan},
    ],
)
def test_what_is_no_churn_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="Times must be at least 0 s"):
        Churn(**wrong)  # type: ignore[arg-type]


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cycles=0"):
        run(2, Churn(), cycles=0)
