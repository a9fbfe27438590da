"""The verdict on a round, its mean by any rule, clipped or not, the weights of contributions, and what is measured."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
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
    Mean,
    Nesterov,
    OuterOptimizer,
    Verdict,
    judge,
    make_codec,
    measured_outer_step,
    vector_norm,
    weighted_mean,
)
from diloco.errors import CodecError
from diloco.events import RoundCommitted
from diloco.testing import check_average_rule
from tests.algorithm.codecs import SIZE, contribution, contributions, finite_floats
from tests.replicas import Vectors, quadratic, streaming


def decide(
    given: Sequence[Contribution], *, num_replicas: int = 3, least: int = 3, absent: Mapping[int, str] | None = None
) -> Verdict:
    checked = {each.replica: each.checked() for each in given}
    return judge(checked, members=range(num_replicas), min_contributors=least, absent=absent or {})


@pytest.mark.parametrize(("least", "contributors"), [(1, (0, 2)), (2, (0, 2)), (3, ())])
def test_absent_ones_are_named_and_the_minimum_decides(least: int, contributors: tuple[int, ...]) -> None:
    verdict = decide([contribution(0), contribution(2)], least=least, absent={1: "was not heard of"})
    why = "replica 1 was not heard of"
    assert verdict.reason == (why if contributors else f"2 of 3 contributions are usable, 3 are needed: {why}")
    assert (verdict.contributors, verdict.diverged) == (contributors, ())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"withdrawn": "gradients that are not finite"}, "gradients that are not finite"),
        (
            {"numel": SIZE - 1, "payload": torch.zeros(4 * SIZE - 4, dtype=torch.uint8)},
            f"holds {SIZE - 1} values instead of {SIZE} values",
        ),
        *(
            ({"weight": weight}, f"its weight is {weight}, which is not from 1e-18 to 1e+18")
            for weight in (0.0, -1.0, math.nan, math.inf, 1e39, 1e-46)  # the last two are infinite and zero in float32
        ),
        ({"payload": torch.zeros(4 * SIZE - 1, dtype=torch.uint8)}, "values must be a tensor of shape"),
        ({"payload": torch.full((4 * SIZE,), 0xFF, dtype=torch.uint8)}, "contains NaN or infinity at value 0"),
        ({"buffers": torch.tensor([1.0])}, "holds 1 floating buffers instead of 2"),
        ({"buffers": None}, "holds no floating buffers instead of 2"),
        ({"integers": torch.zeros(7, dtype=torch.uint8)}, "holds 7 integer buffers instead of"),
        ({"integers": None}, "holds no integer buffers instead of 8"),
    ],
)
@pytest.mark.parametrize("bad", [0, 2])
def test_what_cannot_be_averaged_is_refused_and_named(change: dict[str, Any], words: str, bad: int) -> None:
    """Invariant 11 holds for the lowest replica, too, which has no say over the majority's sizes."""
    sound = {"buffers": torch.ones(2), "integers": torch.zeros(8, dtype=torch.uint8)}
    given = [contribution(m, **(sound | change if m == bad else sound)) for m in range(3)]
    verdict = decide(given, least=2)
    assert (verdict.contributors, verdict.diverged) == (tuple(sorted({0, 1, 2} - {bad})), ())
    assert verdict.reason.startswith(f"the contribution of replica {bad} was refused: ")
    assert words in verdict.reason
    few = f"2 of 3 contributions are usable, 3 are needed: {verdict.reason}"
    assert decide(given, least=3) == replace(verdict, contributors=(), reason=few, donor=-1)


@pytest.mark.parametrize(
    ("digests", "diverged", "donor"),
    [("abb", (0,), 1), ("ab", (1,), 0), ("aabb", (2, 3), 0), ("abba", (1, 2), 0), ("baab", (1, 2), 0)],
)
def test_a_digest_of_the_minority_makes_the_round_void(digests: str, diverged: tuple[int, ...], donor: int) -> None:
    """Invariant 1: a mismatch is never averaged over, whatever the minimum. On a tie the lowest replica counts."""
    given = [contribution(m, digest=digest) for m, digest in enumerate(digests)]
    names = ", ".join(map(str, diverged))
    words = f"global parameters or outer state of replica {names} differ from those of replica {donor}"
    assert decide(given, num_replicas=len(digests), least=1) == Verdict((), words, diverged, donor)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("aaab"), st.sampled_from([1.0, 2.0, 0.0]), st.booleans()), min_size=1),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_the_order_of_arrival_does_not_change_the_verdict(cases: Any, least: int, random: Any) -> None:
    """Property: every replica receives the same contributions in a different order."""
    arrived = [contribution(m, digest=d, weight=w) for m, (d, w, here) in enumerate(cases) if here]
    absent = [m for m, (_, _, here) in enumerate(cases) if not here]
    verdicts = set()
    for _ in range(4):
        random.shuffle(arrived)
        random.shuffle(absent)
        reasons = dict.fromkeys(absent, "was not heard of")
        verdicts.add(decide(arrived, num_replicas=len(cases), least=least, absent=reasons))
    (only,) = verdicts
    assert only.void or (not only.diverged and len(only.contributors) >= least)
    assert only.contributors == tuple(sorted(only.contributors))
    assert set(only.contributors) <= {each.replica for each in arrived if each.weight > 0}


@pytest.mark.parametrize("codec", CODECS.names)
def test_the_order_of_arrival_does_not_change_a_bit_of_the_mean(codec: str) -> None:
    given = [
        contribution(m, codec=codec, weight=1 / (m + 1), buffers=torch.tensor([0.1 * m]), integers=torch.tensor([m]))
        for m in range(5)
    ]
    first = weighted_mean(given)
    assert first.integers is given[0].integers, "those of the lowest replica, not of the first arrival"
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        assert weighted_mean([given[m] for m in order]).digest() == first.digest()


def test_the_sum_is_float32_in_the_order_of_replicas() -> None:
    """(1 + 2^-24) + 2^-24 is 1 in float32; in the other order it would be 1 + 2^-23."""
    given = [contribution(m, torch.tensor([value])) for m, value in enumerate((1.0, 2.0**-24, 2.0**-24))]
    assert weighted_mean(given[::-1]).values.item() == torch.tensor(1.0).div(3).item()


def test_one_replica_gets_its_own_bits_back() -> None:
    """Invariant 12 holds from subnormal values to the largest that a mean may contain, including zero."""
    tiny = torch.finfo(torch.float32).tiny
    values = torch.cat([torch.tensor([0.0, tiny / 4, LARGEST_MEAN, -LARGEST_MEAN]), torch.randn(SIZE)])
    buffers = torch.tensor([torch.finfo(torch.float32).max, 1e-30])
    extras = {"buffers": buffers, "integers": torch.tensor([9])}
    mean = weighted_mean([contribution(3, values, **extras)])
    assert mean.digest() == Mean(values=values, contributors=(3,), weight=1.0, **extras).digest()


@pytest.mark.parametrize("codec", CODECS.names)
@pytest.mark.parametrize(("weight", "base_weight"), [(1e18, 1.0), (1e18, 1e18), (8.0, 1.0)])
def test_nobody_weighs_more_than_eight_windows_of_another_one(codec: str, weight: float, base_weight: float) -> None:
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


def test_buffers_are_averaged_where_they_are_finite_and_stay_where_they_are_on_none() -> None:
    """A mask of -inf voids no round, and sums of large values do not overflow."""
    inf, nan = float("inf"), float("nan")
    given = [[-inf, inf, nan, 3e38, 0.1, 1.0], [-inf, 3.0, inf, 3e38, 0.1, 4.0], [-inf, 6.0, nan, 3e38, 0.1, nan]]
    pairs = enumerate(zip(map(torch.tensor, given), (1.0, 2.0, 1.0), strict=True))
    mean = weighted_mean([contribution(m, buffers=each, weight=w, base_weight=2.0) for m, (each, w) in pairs])
    expected = torch.tensor([-inf, 4.0, nan, 3e38, 0.1, 3.0])
    torch.testing.assert_close(mean.buffers, expected, rtol=0, atol=0, equal_nan=True)


def folded(squares: list[float]) -> float:
    """Compute the sum by its definition, in Python's float64."""
    while len(squares) > 1:
        half = (len(squares) + 1) // 2
        upper = squares[half:]
        squares = [a + b for a, b in zip(squares, upper, strict=False)] + squares[len(upper) : half]
    return squares[0]


@given(st.lists(finite_floats, min_size=1, max_size=70))
def test_norm_has_the_bits_of_a_plain_loop_in_the_same_order(values: list[float]) -> None:
    expected = math.sqrt(folded([x * x for x in values]))
    assert vector_norm(torch.tensor(values, dtype=torch.float32)) == expected


def scaled(scales: Sequence[float]) -> list[Tensor]:
    return [scale * torch.randn(700, generator=torch.Generator().manual_seed(m)) for m, scale in enumerate(scales)]


@pytest.mark.parametrize("codec", CODECS.names)
def test_mean_is_that_of_the_naive_formula(codec: str) -> None:
    """``sum w f v / sum w``: the norms are those of decoded values, the divisor stays the sum of the weights."""
    given = contributions(scaled([1.0, 1.0, 50.0, 1.0]), [1.0, 2.0, 0.5, 1.0], codec=codec, max_norm=50.0)
    decoded = [make_codec(codec).decode(each.payload, 700).double() for each in given]
    terms = [each.weight * min(1.0, 50.0 / float(v.norm())) * v for each, v in zip(given, decoded, strict=True)]
    mean = weighted_mean(given)
    assert (mean.clipped, mean.weight) == ((2,), 4.5)
    torch.testing.assert_close(mean.values.double(), sum(terms) / 4.5, rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.floats(1e-3, 1e6), st.sampled_from(CODECS.names))
def test_nobody_moves_the_mean_further_than_the_bound(scales: list[float], bound: float, codec: str) -> None:
    mean = weighted_mean(contributions(scaled(scales), [1.0] * len(scales), codec=codec, max_norm=bound))
    assert vector_norm(mean.values) <= bound * (1 + 1e-4)


class Longest:
    """A rule of one's own that needs whole tensors: the contribution of the largest norm."""

    elementwise = False

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        return max((values.clone() for _, values in contributions), key=vector_norm)


def test_a_broken_rule_is_found_by_the_contract() -> None:
    class Counting(SendersMean):
        calls = itertools.count()

        def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
            return super().combine(contributions, tensors) + next(self.calls)

    check_average_rule(Longest())
    check_average_rule(SendersMean())
    with pytest.raises(ContractError, match="average Counting: equal contributions give different averages"):
        check_average_rule(Counting())
    last = type("Last", (Longest,), {"combine": lambda self, given, sizes: [values for _, values in given][-1]})
    with pytest.raises(ContractError, match=r"average Last: the average of 1 contributions .* shares their memory"):
        check_average_rule(last())
    with pytest.raises(ContractError, match="elementwise is True, but a value of the average depends on others"):
        check_average_rule(type("Claims", (Longest,), {"elementwise": True})())


class Greatest(Longest):
    """A rule whose result is a column of a matrix: its values are not next to each other."""

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        return torch.stack([values.clone() for _, values in contributions], dim=1).sort(dim=1).values[:, -1]


def test_what_is_measured_does_not_depend_on_how_a_rule_lays_out_the_average() -> None:
    """Regression: cosines and gains were those of other values, in place of samples of the average."""
    values = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(0))
    mean = weighted_mean(contributions(values.unbind(), [1.0, 1.0], average_rule=Greatest())).values
    assert torch.equal(mean, values.amax(0))
    measures, sample = measured_outer_step(
        Nesterov(), mean, Nesterov().init(mean), torch.zeros_like(mean), mean[:16384]
    )
    assert measures["gain"] == pytest.approx(0.7 * 1.9)
    assert bool(torch.isin(sample, mean).all())


def test_whole_tensors_are_refused_where_ranks_share_them_out() -> None:
    model = Vectors()
    for parameter in model.parameters():
        parameter.to_local = lambda parameter=parameter: parameter  # type: ignore[attr-defined]  # as DTensors have it
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"Longest\(\) needs whole tensors, but first and 2 more"):
        DiLoCo(model, inner, average=Longest())
    with pytest.raises(ConfigurationError, match=r"first and 2 more parameters are sharded over ranks.*\(ddp\)"):
        DiLoCo(model, inner, max_norm=1.0)
    DiLoCo(model, inner, average=SendersMean())


def measured(outer: OuterOptimizer, means: list[Tensor]) -> list[SimpleNamespace]:
    values, last, measures = torch.zeros_like(means[0]), None, []
    state = outer.init(values)
    for mean in means:
        one, last = measured_outer_step(outer, mean, state, values, last)
        measures.append(SimpleNamespace(**one))
    return measures


def test_cosines_of_orthogonal_and_opposite_means() -> None:
    one, other = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    found = measured(Nesterov(learning_rate=1.0, momentum=0.5), [one, other, -other])
    assert [each.mean_norm for each in found] == [3, 4, 4]
    assert [each.mean_cosine for each in found] == [None, 0, -1]
    # the momentum is (3, 0), then (1.5, 4)
    assert [each.momentum_cosine for each in found] == [None, 0, pytest.approx(-4 / math.hypot(1.5, 4))]
    assert found[2].gain == pytest.approx(1 + 0.5 + 0.25 * -1)  # 1 + mu + mu^2 <b, Delta> / |Delta|^2


def test_every_replica_tells_the_same_of_a_round() -> None:
    swarm = streaming(codec="int8")
    swarm.run(15, quadratic())
    committed = [event for event in swarm.events if isinstance(event, RoundCommitted)]
    told = {
        (each.fragment, each.outer_step, each.mean_norm, each.gain, each.mean_cosine, each.momentum_cosine)
        for each in committed
    }
    assert 3 < len(told) == len(committed) / 3
    for _, outer_step, *known, cosine, momentum in told:
        assert None not in known
        assert (cosine is None, momentum is None) == (outer_step == 0, outer_step == 0)
