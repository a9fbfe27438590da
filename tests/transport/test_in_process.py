"""The in-process transport: the contract, injected faults, threads, and errors that only it can make."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from diloco.algorithm import RoundId, SendersMean
from diloco.errors import RoundTimeoutError, RoundVoidError
from diloco.protocol import Average
from diloco.transport import InProcessTransport, Transport
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
