"""The in-process transport: the contract, damaged contributions, its own errors, and emulated links."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diloco.algorithm import SendersMean, weighted_mean
from diloco.errors import ConfigurationError, RoundTimeoutError, RoundVoidError
from diloco.transport import InProcessTransport, Link, Transport, VirtualNetwork
from diloco.waiting import in_thread
from tests.transport.contract import SIZE, MakeEndpoints, TransportContract, check_void, contribution, exchange


def endpoints_of(hub: InProcessTransport) -> list[Transport]:
    return [hub.endpoint(number) for number in hub.view.members]


class TestInProcessContract(TransportContract):
    @pytest.fixture
    def make_endpoints(self) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            return endpoints_of(InProcessTransport(num_replicas))

        return make


def test_a_transport_of_your_own_may_set_whatever_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `failure` and `fetched_bytes`, which others compute, Python said that they have no setter."""
    monkeypatch.setattr(Transport, "__abstractmethods__", frozenset())
    names = re.findall(r"^        (\w+(?:, \w+)*):", Transport.__doc__ or "", re.MULTILINE)
    mine = type("Mine", (Transport,), {})()
    for name in ", ".join(names).split(", "):
        setattr(mine, name, "given")
    assert {"replica", "view", "failure", "fetched_bytes", "sent_bytes"} <= vars(mine).keys()


@pytest.mark.parametrize("damage", [lambda payload: payload[:-1], lambda payload: torch.full_like(payload, 255)])
@pytest.mark.parametrize("codec", ["float32", "int8", "fp4"])
def test_a_damaged_contribution_is_left_out_or_makes_the_round_void(
    codec: str, damage: Callable[[Tensor], Tensor]
) -> None:
    """Invariant 3: the mean divides by the weights that arrived."""
    given = [contribution(m, codec=codec, weight=1.0 + m) for m in range(3)]
    given[1] = replace(given[1], payload=damage(given[1].payload))
    expected = weighted_mean([given[0], given[2]])
    for average in exchange(endpoints_of(InProcessTransport(3, min_contributors=2)), given):
        assert (average.contributors, average.weight) == ((0, 2), 4.0)
        assert torch.equal(average.values, expected.values)
        assert "the contribution of replica 1 was refused" in average.note
    endpoints = endpoints_of(InProcessTransport(3))
    check_void(endpoints, given, "the contribution of replica 1 was refused")
    assert endpoints[0].sent_bytes > 0, "void rounds cost bytes too"


def test_an_error_of_a_users_rule_makes_the_round_void_for_all_with_its_reason() -> None:
    class Broken(SendersMean):
        def combine(self, *_: object) -> Tensor:
            raise RuntimeError("of the rule")

    given = [replace(contribution(m), average_rule=Broken(), tensors=(SIZE,)) for m in range(2)]
    check_void(endpoints_of(InProcessTransport(2)), given, "of the rule")


def test_a_replica_that_can_never_come_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With H = 1, in the first step: in a process with one thread, no other replica can contribute."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # other tests may have left threads behind
    pending = InProcessTransport(2).endpoint(0).average(contribution(0))
    with pytest.raises(RoundTimeoutError, match="replica 1 has not sent"):
        pending.wait()


def test_a_replica_that_never_comes_is_named_after_the_timeout() -> None:
    pending = InProcessTransport(2, round_timeout_s=0).endpoint(0).average(contribution(0))
    with pytest.raises(RoundTimeoutError, match="within 0 s: no contribution arrived from replica 1"):
        in_thread(pending.wait, "waiting").result()


def test_many_replicas_share_one_mean() -> None:
    given = [contribution(m, weight=1.0 + m % 3) for m in range(64)]
    averages = exchange(endpoints_of(InProcessTransport(64)), given)
    assert len({id(average.values) for average in averages}) == 1
    assert torch.equal(averages[0].values, weighted_mean(given).values)


# Emulated links: times that can be checked by hand, on a virtual clock.


def network() -> VirtualNetwork:
    """Links of 1 kB/s between two replicas whose steps take 1 s."""
    return VirtualNetwork([Link(8_000.0)] * 2, [1.0] * 2)


def test_what_is_overlapped_is_not_waited_for() -> None:
    """4 kB at 1 kB/s take 4 s; 3 steps of 1 s pass before the merge, so the replica waits 1 s: CU = 3 / 4."""
    emulated = network()
    endpoints = endpoints_of(InProcessTransport(2, network=emulated))
    pending = [endpoint.average(contribution(m)) for m, endpoint in enumerate(endpoints)]
    for _ in range(3):
        for endpoint in endpoints:
            endpoint.tick()
    extra_s = (2 * 4 + 2) / 1000
    assert contribution(0).payload.numel() == 4 * SIZE
    assert [each.wait().wait_s for each in pending] == [pytest.approx(1.0 + extra_s)] * 2
    assert emulated.compute_utilization(0) == pytest.approx(3 / (4 + extra_s))


def test_a_round_slower_than_the_timeout_is_void() -> None:
    hub = InProcessTransport(2, network=network(), round_timeout_s=3.9)
    pending = [hub.endpoint(m).average(contribution(m)) for m in range(2)]
    with pytest.raises(RoundVoidError, match=r"it would take 4\.01 s, but the limit is 3\.9 s"):
        pending[0].wait()


def test_clocks_and_rounds_in_flight_survive_a_checkpoint() -> None:
    """The bytes of a round in flight already occupy the link; saving must not send them twice."""

    def through(stop: bool) -> list[float]:
        hub = InProcessTransport(2, network=network())
        pending = [hub.endpoint(m).average(contribution(m)) for m in range(2)]
        if stop:
            state = hub.state_dict()
            hub = InProcessTransport(2, network=network())
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
