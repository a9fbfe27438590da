"""The verdict on a round, its mean by any rule, clipped or not, and the weights of contributions."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco import ConfigurationError, ContractError, DiLoCo, SendersMean
from diloco.algorithm import (
    CODECS,
    LARGEST_MEAN,
    Contribution,
    Verdict,
    judge,
    make_codec,
    vector_norm,
    weighted_mean,
)
from diloco.errors import CodecError
from diloco.testing import check_average_rule
from tests.algorithm.contributions import SIZE, contribution
from tests.replicas import Vectors


def decide(given: Sequence[Contribution], *, num_replicas: int = 3, least: int = 3, **absent: str) -> Verdict:
    """Judge contributions. ``absent`` is given as ``r1="was not heard of"``."""
    return judge(
        {each.replica: each.checked() for each in given},
        members=range(num_replicas),
        min_contributors=least,
        absent={int(name[1:]): why for name, why in absent.items()},
    )


class TestJudge:
    @pytest.mark.parametrize(("least", "contributors"), [(1, (0, 2)), (2, (0, 2)), (3, ())])
    def test_absent_ones_are_named_and_the_minimum_decides(self, least: int, contributors: tuple[int, ...]) -> None:
        verdict = decide([contribution(0), contribution(2)], least=least, r1="was not heard of")
        assert verdict.contributors == contributors
        why = "replica 1 was not heard of"
        assert verdict.reason == (why if contributors else f"2 of 3 contributions are usable, 3 are needed: {why}")
        assert verdict.diverged == ()

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"withdrawn": "gradients that are not finite"}, "gradients that are not finite"),
            (
                {"numel": SIZE - 1, "payload": torch.zeros(4 * SIZE - 4, dtype=torch.uint8)},
                f"holds {SIZE - 1} values instead of {SIZE} values",
            ),
            ({"weight": 0.0}, "its weight is 0.0, which is not from 1e-18 to 1e+18"),
            ({"weight": -1.0}, "its weight is -1.0"),
            ({"weight": float("nan")}, "its weight is nan"),
            ({"weight": float("inf")}, "its weight is inf"),
            ({"weight": 1e39}, "its weight is 1e+39"),  # infinite in float32
            ({"weight": 1e-46}, "its weight is 1e-46"),  # zero in float32
            ({"payload": torch.zeros(4 * SIZE - 1, dtype=torch.uint8)}, "values must be a tensor of shape"),
            ({"payload": torch.full((4 * SIZE,), 0xFF, dtype=torch.uint8)}, "contains NaN or infinity at value 0"),
            ({"buffers": torch.tensor([1.0])}, "holds 1 floating buffers instead of 2"),
            ({"buffers": None}, "holds no floating buffers instead of 2"),
            ({"integers": torch.zeros(7, dtype=torch.uint8)}, "holds 7 integer buffers instead of"),
            ({"integers": None}, "holds no integer buffers instead of 8"),
        ],
    )
    @pytest.mark.parametrize("bad", [0, 2])
    def test_what_cannot_be_averaged_is_refused_and_named(self, change: dict[str, Any], words: str, bad: int) -> None:
        """Invariant 11 holds for the lowest replica, too, which has no say over the majority's sizes."""
        sound = {"buffers": torch.ones(2), "integers": torch.zeros(8, dtype=torch.uint8)}
        given = [contribution(m, **(sound | change if m == bad else sound)) for m in range(3)]
        others = tuple(m for m in range(3) if m != bad)
        verdict = decide(given, least=2)
        assert verdict.contributors == others
        assert verdict.reason.startswith(f"the contribution of replica {bad} was refused: ")
        assert words in verdict.reason
        assert verdict.diverged == ()
        strict = decide(given, least=3)
        assert strict.void
        assert strict.reason == f"2 of 3 contributions are usable, 3 are needed: {verdict.reason}"
        assert weighted_mean([given[m] for m in others]).contributors == others

    def test_the_digest_of_the_minority_makes_the_round_void(self) -> None:
        """Invariant 1: a mismatch is never averaged over, whatever the minimum."""
        given = [contribution(0, digest="odd"), contribution(1), contribution(2)]
        verdict = decide(given, least=1)
        words = "global parameters or outer state of replica 0 differ from those of replica 1"
        assert verdict == Verdict((), words, (0,), 1)
        assert verdict.void

    @pytest.mark.parametrize(
        ("digests", "diverged"), [("ab", (1,)), ("aabb", (2, 3)), ("abba", (1, 2)), ("baab", (1, 2))]
    )
    def test_on_a_tie_the_lowest_replica_counts_as_the_majority(self, digests: str, diverged: tuple[int, ...]) -> None:
        verdict = decide(
            [contribution(m, digest=digest) for m, digest in enumerate(digests)], num_replicas=len(digests)
        )
        assert (verdict.diverged, verdict.donor) == (diverged, 0)

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.tuples(st.sampled_from("aaab"), st.sampled_from([1.0, 2.0, 0.0]), st.booleans()), min_size=1),
        st.integers(1, 6),
        st.randoms(use_true_random=False),
    )
    def test_the_order_of_arrival_does_not_matter(self, cases: Any, least: int, random: Any) -> None:
        """Property: every replica receives the same contributions in a different order."""
        arrived = [contribution(m, digest=d, weight=w) for m, (d, w, here) in enumerate(cases) if here]
        absent = [m for m, (_, _, here) in enumerate(cases) if not here]
        verdicts = set()
        for _ in range(4):
            random.shuffle(arrived)
            random.shuffle(absent)
            reasons = {f"r{m}": "was not heard of" for m in absent}
            verdicts.add(decide(arrived, num_replicas=len(cases), least=least, **reasons))
        (only,) = verdicts
        assert only.void or (not only.diverged and len(only.contributors) >= least)
        assert only.contributors == tuple(sorted(only.contributors))
        assert set(only.contributors) <= {each.replica for each in arrived if each.weight > 0}


class TestMean:
    @pytest.mark.parametrize("codec", CODECS.names)
    def test_the_order_of_arrival_does_not_change_a_bit(self, codec: str) -> None:
        given = [
            contribution(
                m, codec=codec, weight=1 / (m + 1), buffers=torch.tensor([0.1 * m]), integers=torch.tensor([m])
            )
            for m in range(5)
        ]
        first = weighted_mean(given)
        for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
            again = weighted_mean([given[m] for m in order])
            assert torch.equal(again.values.view(torch.int32), first.values.view(torch.int32))
            assert again.buffers is not None
            assert first.buffers is not None
            assert torch.equal(again.buffers, first.buffers)
            assert (again.weight, again.contributors) == (first.weight, first.contributors)
            assert again.integers is given[0].integers, (
                "the integers come from the lowest replica, not from the first arrival"
            )

    def test_the_sum_is_float32_in_the_order_of_replicas(self) -> None:
        """(1 + 2^-24) + 2^-24 is 1 in float32; in the other order it would be 1 + 2^-23."""
        given = [contribution(m, torch.tensor([value])) for m, value in enumerate((1.0, 2.0**-24, 2.0**-24))]
        assert weighted_mean(given[::-1]).values.item() == torch.tensor(1.0).div(3).item()

    def test_one_replica_gets_its_own_bits_back(self) -> None:
        """Invariant 12 holds from subnormal values to the largest that a mean may contain, including zero."""
        tiny = torch.finfo(torch.float32).tiny
        values = torch.cat([torch.tensor([0.0, tiny / 4, LARGEST_MEAN, -LARGEST_MEAN]), torch.randn(SIZE)])
        buffers = torch.tensor([torch.finfo(torch.float32).max, 1e-30])
        mean = weighted_mean([contribution(3, values, buffers=buffers, integers=torch.tensor([9]))])
        assert torch.equal(mean.values.view(torch.int32), values.view(torch.int32))
        assert mean.buffers is not None
        assert torch.equal(mean.buffers, buffers)
        assert (mean.contributors, mean.weight) == ((3,), 1.0)

    @pytest.mark.parametrize("codec", CODECS.names)
    @pytest.mark.parametrize(("weight", "base_weight"), [(1e18, 1.0), (1e18, 1e18), (8.0, 1.0)])
    def test_nobody_weighs_more_than_eight_windows_of_another_one(
        self, codec: str, weight: float, base_weight: float
    ) -> None:
        """A finite payload of 1e37 (or the codec's largest) with a weight of 1e18 overflows the float32 sum."""
        given = [contribution(m, codec=codec) for m in (0, 2)]
        given.append(contribution(1, codec=codec, weight=weight, base_weight=base_weight))
        assert weighted_mean(given).weight == 10.0
        given[2] = replace(given[2], payload=make_codec(codec).encode(torch.full((SIZE,), 1e37)))
        if codec == "float16":  # it saturates
            assert bool(torch.isfinite(weighted_mean(given).values).all())
            return
        with pytest.raises(CodecError, match=r"the mean .*; replica 1 contributed most"):
            weighted_mean(given)

    def test_buffers_are_averaged_where_they_are_finite_and_stay_where_they_are_on_none(self) -> None:
        """A mask of -inf voids no round, and sums of large values do not overflow."""
        inf, nan = float("inf"), float("nan")
        given = [[-inf, inf, nan, 3e38, 0.1, 1.0], [-inf, 3.0, inf, 3e38, 0.1, 4.0], [-inf, 6.0, nan, 3e38, 0.1, nan]]
        weights = (1.0, 2.0, 1.0)
        mean = weighted_mean(
            [contribution(m, buffers=torch.tensor(given[m]), weight=weights[m], base_weight=2.0) for m in range(3)]
        ).buffers
        assert mean is not None
        torch.testing.assert_close(mean, torch.tensor([-inf, 4.0, nan, 3e38, 0.1, 3.0]), rtol=0, atol=0, equal_nan=True)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def folded(squares: list[float]) -> float:
    """Compute the sum by its definition, in Python's float64."""
    while len(squares) > 1:
        half = (len(squares) + 1) // 2
        upper = squares[half:]
        squares = [a + b for a, b in zip(squares, upper, strict=False)] + squares[len(upper) : half]
    return squares[0]


@given(st.lists(FLOATS, min_size=1, max_size=70))
def test_norm_has_the_bits_of_a_plain_loop_in_the_same_order(values: list[float]) -> None:
    expected = math.sqrt(folded([x * x for x in values]))
    assert vector_norm(torch.tensor(values, dtype=torch.float32)) == expected


def contributions(codec: str, scales: list[float], weights: list[float], max_norm: float | None) -> list[Contribution]:
    values = [scale * torch.randn(700, generator=torch.Generator().manual_seed(m)) for m, scale in enumerate(scales)]
    pairs = enumerate(zip(values, weights, strict=True))
    return [contribution(m, each, codec=codec, weight=w, max_norm=max_norm) for m, (each, w) in pairs]


@pytest.mark.parametrize("codec", CODECS.names)
def test_mean_is_that_of_the_naive_formula(codec: str) -> None:
    """``sum w f v / sum w``: the norms are those of decoded values, the divisor stays the sum of the weights."""
    given = contributions(codec, [1.0, 1.0, 50.0, 1.0], [1.0, 2.0, 0.5, 1.0], bound := 50.0)
    decoded = [make_codec(codec).decode(each.payload, 700).double() for each in given]
    scaled = [each.weight * min(1.0, bound / float(v.norm())) * v for each, v in zip(given, decoded, strict=True)]
    mean = weighted_mean(given)
    assert (mean.clipped, mean.weight) == ((2,), 4.5)
    torch.testing.assert_close(mean.values.double(), sum(scaled) / 4.5, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.floats(1e-3, 1e6), st.sampled_from(CODECS.names))
def test_nobody_moves_the_mean_by_more_than_its_weight_times_the_bound(
    scales: list[float], bound: float, codec: str
) -> None:
    mean = weighted_mean(contributions(codec, scales, [1.0] * len(scales), bound))
    assert vector_norm(mean.values) <= bound * (1 + 1e-4)


class Lengthened:
    """A rule of one's own that needs whole tensors: the mean, as long as the longest contribution."""

    elementwise = False

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        longest, total = torch.zeros(len(tensors)), torch.zeros(sum(tensors))
        for weight, values in contributions:
            total += weight * values
            norms = torch.stack([part.norm() for part in torch.split(values, list(tensors))])
            longest = torch.maximum(longest, norms)
        for length, part in zip(longest, torch.split(total, list(tensors)), strict=True):
            part.mul_(length / part.norm().clamp(min=1e-20))
        return total


def test_a_broken_rule_is_found_by_the_contract() -> None:
    class Forgetful(SendersMean):
        """A broken rule that keeps contributions although the next one overwrites them, and counts its calls."""

        calls = 0

        def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
            Forgetful.calls += 1
            return torch.stack([values for _, values in contributions]).mean(0) + Forgetful.calls

    check_average_rule(Lengthened())
    check_average_rule(SendersMean())
    with pytest.raises(ContractError, match="average Forgetful: equal contributions give different averages"):
        check_average_rule(Forgetful())


def test_whole_tensors_are_refused_where_ranks_share_them_out() -> None:
    model = Vectors()
    for parameter in model.parameters():
        parameter.to_local = lambda parameter=parameter: parameter  # type: ignore[attr-defined]  # as DTensors have it
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"Lengthened\(\) needs whole tensors, but first and 2 more"):
        DiLoCo(model, inner, average=Lengthened())
    with pytest.raises(ConfigurationError, match=r"first and 2 more parameters are sharded over ranks.*\(ddp\)"):
        DiLoCo(model, inner, max_norm=1.0)
    DiLoCo(model, inner, average=SendersMean())
