"""The contract of every transport. Each implementation runs this suite on endpoints that it makes."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from diloco.algorithm import (
    PLAIN_MEAN,
    Contribution,
    MeanCodec,
    RoundId,
    SendersMean,
    encode_mean,
    make_codec,
    plan_exchange,
    weighted_mean,
)
from diloco.errors import ConfigurationError, DivergedError, RoundVoidError, TransportError
from diloco.protocol import Average
from diloco.transport import Transport
from tests.algorithm.codecs import OURS
from tests.transport.wires import at_once

MakeEndpoints = Callable[[int], Sequence[Transport]]
"""A function from the number of replicas to their transports, one per replica."""

SIZE = 1000
FIRST = 0
"""The outer step of the first round; tests that share endpoints use a later one."""

LOSSY_MEANS: list[tuple[str, str, dict[str, int]]] = [
    ("float32", "bfloat16", {}),
    ("float16", "int8", {"block_size": 4}),
    ("int8", "fp4", {"block_size": 64}),
]
"""Codecs of contributions, and codecs of means with which four replicas use a reduce-scatter."""


def contribution(
    replica: int,
    *,
    outer_step: int = 0,
    fragment: int = 0,
    codec: str = "float32",
    weight: float = 1.0,
    digest: str = "d",
    max_norm: float | None = None,
    scale: float = 1.0,
    mean: MeanCodec = PLAIN_MEAN,
) -> Contribution:
    generator = torch.Generator().manual_seed(17 * replica + outer_step)
    encoder = make_codec(codec)
    return Contribution(
        round=RoundId(fragment, FIRST + outer_step),
        replica=replica,
        codec=encoder,
        numel=SIZE,
        payload=encoder.encode(scale * torch.randn(SIZE, generator=generator)),
        weight=weight,
        digest=digest,
        buffers=torch.tensor([float(replica), -math.inf]),
        integers=torch.tensor([replica, 7], dtype=torch.uint8),
        max_norm=max_norm,
        mean=mean,
    )


def exchange(endpoints: Sequence[Transport], contributions: Sequence[Contribution]) -> list[Average]:
    pending = [endpoint.average(given) for endpoint, given in zip(endpoints, contributions, strict=True)]
    return [each.wait() for each in pending]


def check_void(endpoints: Sequence[Transport], contributions: Sequence[Contribution], words: str) -> None:
    """Check that a round is void for all with this reason."""
    pending = [endpoint.average(given) for endpoint, given in zip(endpoints, contributions, strict=True)]
    for each in pending:
        with pytest.raises(RoundVoidError, match=words):
            each.wait()


class PayloadContract:
    """The part of the contract that concerns payloads. Its tests may share endpoints (`FIRST`)."""

    @pytest.mark.parametrize("num_replicas", [1, 3])
    def test_every_replica_gets_the_same_weighted_mean(self, make_endpoints: MakeEndpoints, num_replicas: int) -> None:
        weights = [1.0 + replica for replica in range(num_replicas)]
        endpoints = make_endpoints(num_replicas)
        for outer_step, codec in enumerate(OURS):
            given = [
                contribution(m, outer_step=outer_step, codec=codec, weight=weights[m]) for m in range(num_replicas)
            ]
            averages = exchange(endpoints, given)
            decoded = [make_codec(codec).decode(each.payload, SIZE) for each in given]
            expected = sum(w * values for w, values in zip(weights, decoded, strict=True)) / sum(weights)
            for average in averages:
                assert torch.equal(average.values, averages[0].values), "bit-identical everywhere (invariant 1)"
                torch.testing.assert_close(average.values, expected, rtol=1e-5, atol=1e-6)
                assert average.contributors == tuple(range(num_replicas))
                assert average.weight == sum(weights)
                assert average.integers is not None
                assert average.integers.tolist() == [0, 7], "integer buffers come from the first replica"
                assert average.buffers is not None
                mean = sum(w * m for m, w in enumerate(weights)) / sum(weights)
                assert average.buffers.tolist() == pytest.approx([mean, -math.inf]), "a mask voids no round"

    def test_several_rounds_in_flight_do_not_mix(self, make_endpoints: MakeEndpoints) -> None:
        endpoints = make_endpoints(2)
        first = [endpoint.average(contribution(m, outer_step=1)) for m, endpoint in enumerate(endpoints)]
        second = [endpoint.average(contribution(m, fragment=1, outer_step=2)) for m, endpoint in enumerate(endpoints)]
        later, earlier = [each.wait() for each in second], [each.wait() for each in first]
        assert {average.round for average in later} == {RoundId(1, FIRST + 2)}
        assert {average.round for average in earlier} == {RoundId(0, FIRST + 1)}
        assert not torch.equal(later[0].values, earlier[0].values)

    def test_traffic_is_that_of_the_plan_for_every_replica(self, make_endpoints: MakeEndpoints) -> None:
        self.is_that_of_the_plan(make_endpoints(3))

    def is_that_of_the_plan(self, endpoints: Sequence[Transport]) -> None:
        """1000 values can't be divided evenly among 3. Means of 4 blocks are not worth dividing and use an all-gather,
        except with int8 means among 8 replicas."""
        num_replicas, mean = len(endpoints), "auto"
        sent, received = ([getattr(each, name) for each in endpoints] for name in ("sent_bytes", "received_bytes"))
        for outer_step, codec in enumerate(["float32", "float16", "int8"]):
            given = [contribution(m, outer_step=outer_step, codec=codec, mean=mean) for m in range(num_replicas)]
            averages, expected = exchange(endpoints, given), weighted_mean(given).values
            plan = plan_exchange(make_codec(codec), SIZE, num_replicas, 2 * 4 + 2, mean=mean)
            if num_replicas >= 8 and codec == "int8":
                encode_mean(expected, plan.mean)
            for average in averages:
                assert torch.equal(average.values, expected)
                assert average.note == ""
            assert [average.sent_bytes for average in averages] == list(plan.sent)
            assert [average.received_bytes for average in averages] == list(plan.received)
            sent = [a + b for a, b in zip(sent, plan.sent, strict=True)]
            received = [a + b for a, b in zip(received, plan.received, strict=True)]
            assert [endpoint.sent_bytes for endpoint in endpoints] == sent
            assert [endpoint.received_bytes for endpoint in endpoints] == received

    def test_void_gradients_are_averaged_at_a_later_attempt(self, make_endpoints: MakeEndpoints) -> None:
        endpoints = make_endpoints(3)
        given = [replace(contribution(m, fragment=-1), withdrawn="it fails" if m == 1 else "") for m in range(3)]
        for attempt in (1, 2):
            given = [replace(each, round=each.round._replace(fragment=-attempt)) for each in given]
            check_void(endpoints, given, "replica 1 was refused: it fails")
        given = [replace(each, round=each.round._replace(fragment=-3), withdrawn="") for each in given]
        averages, expected = exchange(endpoints, given), weighted_mean(given).values
        assert [torch.equal(average.values, expected) for average in averages] == [True] * 3

    def test_nothing_is_kept_of_a_round_that_is_over(self, make_endpoints: MakeEndpoints) -> None:
        """A run has millions of rounds, each as large as the model, so none may be kept in memory."""
        endpoints, freed = make_endpoints(3), list[threading.Event]()

        def watch(tensor: torch.Tensor) -> None:
            freed.append(threading.Event())
            weakref.finalize(tensor, freed[-1].set)

        def take_part(fragment: int, outer_step: int, withdrawn: str) -> None:
            given = [contribution(m, fragment=fragment, outer_step=outer_step) for m in range(3)]
            given = [replace(each, withdrawn=withdrawn) for each in given]
            for each in given:
                watch(each.payload)
            pending = [endpoint.average(each) for endpoint, each in zip(endpoints, given, strict=True)]
            for each in pending:
                with nullcontext() if not withdrawn else pytest.raises(RoundVoidError):
                    watch(each.wait().values)

        for outer_step, withdrawn in enumerate(("", "it was not finite")):
            for fragment in (-1, 0):  # a round of gradients, and one of parameters
                take_part(fragment, outer_step, withdrawn)
        assert len(freed) == 12 + 6
        assert all(event.wait(10.0) for event in freed)

    def test_what_is_fetched_is_the_donors_and_a_copy(self, make_endpoints: MakeEndpoints) -> None:
        endpoints = make_endpoints(2)
        held = {"global_params": torch.ones(3), "outer_step": 5, "slots": {"momentum": torch.zeros(3)}}
        endpoints[1].publish(lambda fragment: {**held, "outer_step": fragment})
        got = endpoints[0].fetch(4, [1]).result()
        got["global_params"].fill_(9)
        got["slots"]["momentum"].fill_(9)
        assert got["outer_step"] == 4
        assert held["global_params"].tolist() == [1, 1, 1]  # type: ignore[attr-defined]  # a tensor
        assert held["slots"]["momentum"].tolist() == [0, 0, 0]  # type: ignore[index]  # a dictionary


class TransportContract(PayloadContract):
    """The whole contract; subclasses provide the fixture ``make_endpoints``."""

    def test_traffic_is_that_of_the_plan_for_every_one_of_eight(self, make_endpoints: MakeEndpoints) -> None:
        self.is_that_of_the_plan(make_endpoints(8))

    def test_a_weight_that_is_none_is_refused_and_named(self, make_endpoints: MakeEndpoints) -> None:
        """The replica sends fewer bad weights than would exclude it."""
        endpoints = make_endpoints(2)
        for outer_step, weight in enumerate((0.0, math.nan)):
            given = [contribution(0, outer_step=outer_step), contribution(1, outer_step=outer_step, weight=weight)]
            check_void(endpoints, given, "replica 1 was refused: its weight is")

    @pytest.mark.parametrize("codec", ["float32", "bfloat16", "fp4"])
    def test_a_mean_that_is_not_finite_is_void_for_all_and_a_weight_is_bounded(
        self, make_endpoints: MakeEndpoints, codec: str
    ) -> None:
        """Each contribution is finite, but their sum is not. The next round is not affected."""
        endpoints = make_endpoints(3)
        given = [contribution(m, codec=codec, scale=1e37 if m == 1 else 1.0) for m in range(3)]
        given[1] = replace(given[1], weight=1e18, base_weight=1e18)
        check_void(endpoints, given, r"the mean .*; replica 1 contributed most")
        given = [contribution(m, outer_step=1, codec=codec, weight=1e18 if m == 1 else 1.0) for m in range(3)]
        assert {average.weight for average in exchange(endpoints, given)} == {10.0}

    @pytest.mark.parametrize("num_replicas", [2, 3])
    def test_a_digest_of_the_minority_is_never_averaged_over_from_the_first_round_on(
        self, make_endpoints: MakeEndpoints, num_replicas: int
    ) -> None:
        """Invariant 1."""
        endpoints = make_endpoints(num_replicas)
        given = [contribution(m, digest="odd" if m == 1 else "even") for m in range(num_replicas)]
        pending = [endpoint.average(each) for endpoint, each in zip(endpoints, given, strict=True)]
        with pytest.raises(DivergedError, match="replica 1 differ from those of replica 0") as caught:
            pending[1].wait()
        assert (caught.value.donor, caught.value.replicas) == (0, (1,))
        for each in pending[::2]:
            with pytest.raises(RoundVoidError, match="replica 1 differ"):
                each.wait()

    def test_a_replica_contributes_once_and_in_its_own_name(self, make_endpoints: MakeEndpoints) -> None:
        endpoint = make_endpoints(2)[0]
        with pytest.raises(TransportError, match="in the name of replica 1"):
            endpoint.average(contribution(1))
        endpoint.average(contribution(0))
        with pytest.raises(TransportError, match="already contributed to fragment 0, outer step 0"):
            endpoint.average(contribution(0))

    @pytest.mark.parametrize("rule", [None, SendersMean()], ids=["mean", "senders"])
    def test_clipping_and_rules_give_every_replica_the_bits_of_the_pure_function(
        self, make_endpoints: MakeEndpoints, rule: SendersMean | None
    ) -> None:
        """Every replica gets whole contributions and sums all of them, so that no mean is encoded."""
        endpoints, scales = make_endpoints(4), (1.0, 1.1, 0.9, 10.0)
        clipped: dict[float | None, tuple[int, ...]] = {20.0: (0, 1, 2, 3), 100.0: (3,), None: ()}
        cases = (("float32", "fp4", "topk2"), (20.0, 100.0 if rule is None else None))
        for outer_step, (codec, max_norm) in enumerate(itertools.product(*cases)):
            given = [
                replace(
                    contribution(m, outer_step=outer_step, codec=codec, weight=1.0 + m, max_norm=max_norm, scale=scale),
                    average_rule=rule,
                    tensors=(300, 1, 0, 699),
                    mean=make_codec("fp4"),
                )
                for m, scale in enumerate(scales)
            ]
            expected = weighted_mean(given)
            assert codec == "topk2" or expected.clipped == clipped[max_norm], "norms of topk2 are smaller"
            for average in exchange(endpoints, given):
                assert torch.equal(average.values, expected.values)
                assert average.clipped == expected.clipped
                assert average.weight == 10.0
                assert average.sent_bytes == 3 * (make_codec(codec).payload_bytes(SIZE) + 2 * 4 + 2)

    def test_encoded_means_are_the_bits_of_the_pure_function_round_after_round(
        self, make_endpoints: MakeEndpoints
    ) -> None:
        """The second round of each fragment is void."""
        endpoints, weights = make_endpoints(4), (1.0, 2.0, 0.5, 3.0)
        for fragment, (codec, name, parameters) in enumerate(LOSSY_MEANS):
            mean = make_codec(name, **parameters)
            for outer_step in range(4):
                given = [
                    contribution(m, fragment=fragment, outer_step=outer_step, codec=codec, weight=w, mean=mean)
                    for m, w in enumerate(weights)
                ]
                if outer_step == 1:
                    given[2] = replace(given[2], withdrawn="it was not finite")
                    check_void(endpoints, given, "it was not finite")
                    continue
                averages, expected = exchange(endpoints, given), weighted_mean(given).values
                plan = plan_exchange(make_codec(codec), SIZE, 4, 2 * 4 + 2, mean=mean)
                assert plan.pattern == "reduce-scatter"
                encode_mean(expected, mean)
                for position, average in enumerate(averages):
                    assert torch.equal(average.values, expected)
                    assert average.sent_bytes == plan.sent[position]
                    assert average.received_bytes == plan.received[position]

    def test_facts_that_differ_are_refused_on_every_side(self, make_endpoints: MakeEndpoints) -> None:
        endpoints, codecs = make_endpoints(3), ["fp4", "int8", "fp4"]

        def exchanged_once(endpoint: Transport) -> Average:
            endpoint.agree({"seed": "0", "codec": codecs[endpoint.replica]})
            return endpoint.average(contribution(endpoint.replica)).wait()

        found = at_once([lambda each=each: exchanged_once(each) for each in endpoints])
        for each in found:
            assert isinstance(each, ConfigurationError), found
            assert "has codec = fp4" in str(each)
            assert "replica 1" in str(each)
            assert "has codec = int8" in str(each)

    def test_a_donor_with_nothing_to_give_is_named(self, make_endpoints: MakeEndpoints) -> None:
        with pytest.raises(TransportError, match="replica 1 was asked for fragment 0"):
            make_endpoints(2)[0].fetch(0, [1]).result()
