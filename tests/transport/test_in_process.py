"""The in-process transport: the contract, injected faults, threads, its own errors, and emulated links."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import RoundId, SendersMean
from diloco.errors import ConfigurationError, RoundTimeoutError, RoundVoidError
from diloco.protocol import Average
from diloco.transport import InProcessTransport, Link, Transport, VirtualNetwork
from tests.faults import Fault, FaultyTransport
from tests.transport.contract import SIZE, MakeEndpoints, TransportContract, contribution, exchange


def endpoints_of(hub: InProcessTransport) -> list[Transport]:
    return [hub.endpoint(number) for number in hub.view.members]


class TestInProcessContract(TransportContract):
    @pytest.fixture
    def make_endpoints(self) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            return endpoints_of(InProcessTransport(num_replicas))

        return make


def faulty(kind: str, *, min_contributors: int | None = None, seconds: float = 0.0) -> InProcessTransport:
    fault = Fault(kind=kind, replica=1, round=RoundId(0, 0), seconds=seconds)  # type: ignore[arg-type]  # from a table
    return FaultyTransport(3, min_contributors=min_contributors, faults=[fault], round_timeout_s=10)


FAULTS = [
    ("drop", 0.0, "replica 1 sent nothing"),
    ("late", 11.0, "replica 1 was 11 s late, but the limit is 10 s"),
    ("truncate", 0.0, "the contribution of replica 1 was refused"),
    ("non-finite", 0.0, "the contribution of replica 1 was refused"),
]


@pytest.mark.parametrize(("kind", "seconds", "words"), FAULTS)
@pytest.mark.parametrize("codec", ["float32", "int8", "fp4"])
def test_a_fault_makes_the_round_void_for_all_and_names_the_replica(
    kind: str, seconds: float, words: str, codec: str
) -> None:
    endpoints = endpoints_of(faulty(kind, seconds=seconds))
    pending = [endpoint.average(contribution(m, codec=codec)) for m, endpoint in enumerate(endpoints)]
    for each in pending:
        with pytest.raises(RoundVoidError, match=words):
            each.wait()
    assert endpoints[0].sent_bytes > 0, "void rounds cost bytes too"


@pytest.mark.parametrize(("kind", "seconds", "words"), FAULTS)
def test_with_enough_others_the_mean_divides_by_what_arrived(kind: str, seconds: float, words: str) -> None:
    """Invariant 3."""
    endpoints = endpoints_of(faulty(kind, min_contributors=2, seconds=seconds))
    averages = exchange(endpoints, [contribution(m, weight=1.0 + m) for m in range(3)])
    alone = exchange(endpoints_of(InProcessTransport(1)), [contribution(0)])[0].values
    third = contribution(2).codec.decode(contribution(2).payload, alone.numel())
    for average in averages:
        assert (average.contributors, average.weight) == ((0, 2), 4.0)
        torch.testing.assert_close(average.values, (alone + 3 * third) / 4)
        assert words in average.note


def test_an_error_of_a_users_rule_makes_the_round_void_for_all_with_its_reason() -> None:
    class Broken(SendersMean):
        def combine(self, *_: object) -> torch.Tensor:
            raise RuntimeError("of the rule")

    endpoints = endpoints_of(InProcessTransport(2))
    given = [replace(contribution(m), average_rule=Broken(), tensors=(SIZE,)) for m in range(2)]
    for pending in [endpoint.average(each) for endpoint, each in zip(endpoints, given, strict=True)]:
        with pytest.raises(RoundVoidError, match="of the rule"):
            pending.wait()


def test_a_missed_commit_is_the_business_of_one_replica() -> None:
    pending = [e.average(contribution(m)) for m, e in enumerate(endpoints_of(faulty("miss-commit")))]
    assert pending[0].wait().contributors == (0, 1, 2)
    with pytest.raises(RoundVoidError, match="no commit was received"):
        pending[1].wait()
    assert pending[2].wait().contributors == (0, 1, 2)


def test_replicas_in_threads_wait_for_each_other_and_get_the_same_bits() -> None:
    hub = InProcessTransport(3)
    averages: dict[int, list[Average]] = {m: [] for m in range(3)}

    def live(replica: int) -> None:
        for step in range(20):
            pending = hub.endpoint(replica).average(contribution(replica, outer_step=step))
            averages[replica].append(pending.wait())

    threads = [threading.Thread(target=live, args=(replica,)) for replica in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = InProcessTransport(3)
    for step in range(20):
        in_turns = exchange(endpoints_of(expected), [contribution(m, outer_step=step) for m in range(3)])
        assert all(torch.equal(averages[m][step].values, in_turns[0].values) for m in range(3))


def test_so_it_is_before_the_other_replica_was_heard_of_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With H = 1, in the first step: in a process with one thread, no other replica can ever contribute."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # other tests may have left threads behind
    pending = InProcessTransport(2).endpoint(0).average(contribution(0))
    with pytest.raises(RoundTimeoutError, match="replica 1 has not sent"):
        pending.wait()


def test_a_replica_that_never_comes_is_named_after_the_timeout() -> None:
    pending = InProcessTransport(2, round_timeout_s=0).endpoint(0).average(contribution(0))
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with pytest.raises(RoundTimeoutError, match="within 0 s: no contribution arrived from replica 1"):
            pending.wait()
    finally:
        done.set()
        other.join()


@pytest.mark.parametrize("number", [16, 64])
@pytest.mark.parametrize("codec", ["float32", "fp4"])
def test_many_replicas_share_one_mean_and_its_traffic_stops_growing(number: int, codec: str) -> None:
    """Nine or more replicas use a reduce-scatter: each moves its payload and the float32 means about once."""
    endpoints = endpoints_of(InProcessTransport(number))
    given = [contribution(m, codec=codec, weight=1.0 + m % 3) for m in range(number)]
    averages = exchange(endpoints, given)
    total = torch.zeros(SIZE, dtype=torch.float64)
    for each in given:
        total += each.weight * each.codec.decode(each.payload, SIZE).double()
    assert averages[0].weight == sum(each.weight for each in given)
    torch.testing.assert_close(averages[0].values.double(), total / averages[0].weight, rtol=0, atol=1e-5)
    assert {id(average.values) for average in averages} == {id(averages[0].values)}
    assert all(average.contributors == tuple(range(number)) for average in averages)
    assert sum(average.sent_bytes for average in averages) == sum(average.received_bytes for average in averages)


# Emulated links: times that can be checked by hand, on a virtual clock.


MEGABYTE_PER_S = 8e6


def commit_s(network: VirtualNetwork, size: int, at_s: float = 0.0) -> float:
    """Return when a round is committed in which each replica sends and receives ``size`` bytes."""
    replicas = len(network.links)
    return network.commit_time_s([at_s] * replicas, [size] * replicas, [size] * replicas)


def test_bandwidth_latency_and_vote_add_up() -> None:
    """2 MB at 1 MB/s, then 0.1 s of latency and 0.1 s for the vote."""
    emulated = network(MEGABYTE_PER_S, 0.1)
    assert commit_s(emulated, 2_000_000, at_s=1.0) == pytest.approx(1.0 + 2.0 + 0.1 + 0.1)
    assert emulated.state_dict()["links"][0] == [pytest.approx(3.0), pytest.approx(3.1)]


@given(
    num_replicas=st.integers(1, 5),
    bandwidth=st.floats(1e3, 1e12),
    slower=st.floats(1, 100),
    latency=st.floats(0, 1),
    more=st.floats(0, 1),
    size=st.integers(0, 10**9),
)
def test_a_worse_link_never_helps(
    num_replicas: int, bandwidth: float, slower: float, latency: float, more: float, size: int
) -> None:
    times = [1.0] * num_replicas
    good = commit_s(VirtualNetwork([Link(bandwidth, latency)] * num_replicas, times), size)
    bad = commit_s(VirtualNetwork([Link(bandwidth / slower, latency + more)] * num_replicas, times), size)
    assert bad >= good >= 0


def network(bandwidth: float, latency_s: float = 0.0, step_time_s: float = 1.0) -> VirtualNetwork:
    return VirtualNetwork([Link(bandwidth, latency_s)] * 2, [step_time_s] * 2)


def test_what_is_overlapped_is_not_waited_for() -> None:
    """4 kB at 1 kB/s take 4 s; 3 steps of 1 s pass before the merge, so the replica waits 1 s: CU = 3 / 4."""
    emulated = network(8_000.0)
    hub = InProcessTransport(2, network=emulated)
    endpoints = [hub.endpoint(m) for m in range(2)]
    pending = [endpoint.average(contribution(m)) for m, endpoint in enumerate(endpoints)]
    for _ in range(3):
        for endpoint in endpoints:
            endpoint.tick()
    extra_s = (2 * 4 + 2) / 1000
    assert contribution(0).payload.numel() == 4 * SIZE
    assert [each.wait().wait_s for each in pending] == [pytest.approx(1.0 + extra_s)] * 2
    assert emulated.compute_utilization(0) == pytest.approx(3 / (4 + extra_s))


def test_a_round_slower_than_the_timeout_is_void() -> None:
    hub = InProcessTransport(2, network=network(8_000.0), round_timeout_s=3.9)
    pending = [hub.endpoint(m).average(contribution(m)) for m in range(2)]
    with pytest.raises(RoundVoidError, match=r"it would take 4\.01 s, but the limit is 3\.9 s"):
        pending[0].wait()


def test_clocks_and_rounds_in_flight_survive_a_checkpoint() -> None:
    """The bytes of a round in flight already occupy the link; saving must not send them twice."""

    def through(stop: bool) -> list[float]:
        hub = InProcessTransport(2, network=network(8_000.0))
        pending = [hub.endpoint(m).average(contribution(m)) for m in range(2)]
        if stop:
            state = hub.state_dict()
            hub = InProcessTransport(2, network=network(8_000.0))
            hub.load_state_dict(state)
            pending = [hub.endpoint(m).average(contribution(m)) for m in range(2)]
        for m in range(2):
            hub.endpoint(m).tick()
        later = [hub.endpoint(m).average(contribution(m, fragment=1)) for m in range(2)]
        return [each.wait().wait_s for each in (*pending, *later)]

    assert through(stop=True) == through(stop=False)


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0), (math.nan, 0.0), (1.0, math.inf)]
)
def test_links_that_are_none_are_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(ConfigurationError, match="must have a positive bandwidth"):
        Link(bandwidth, latency)
