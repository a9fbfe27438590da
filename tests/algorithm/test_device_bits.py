"""What replicas must agree on to the bit uses only operations that CPUs and GPUs round alike."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from diloco.algorithm import (
    AverageRule,
    FragmentLayout,
    Nesterov,
    OuterOptimizer,
    SendersMean,
    Sgd,
    ValueSchedule,
    divisor,
    encode_mean,
    isotropic,
    weighted_mean,
)
from diloco.testing import spread_values
from tests.algorithm.codecs import BOUNDED, COARSE, contributions

SAME_ON_ALL = re.compile(
    "add|sub|rsub|mul|div|neg|abs|round|_to_copy|copy|fill|zero|"  # rounded once
    "amax|aminmax|maximum|clamp|where|gather|scatter|masked_fill|cat|stack|topk|eq|ne|lt|le|gt|ge|isfinite|all|nonzero|"
    "_local_scalar_dense|constant_pad_nd|equal|"  # exact
    "new_full|full_like|zeros_like|empty_like|clone|detach|alias|view|slice|select|split_with_sizes|split|unbind|"
    "unsqueeze|expand|transpose|t|lift_fresh|_unsafe_view"  # memory
)


def check_exact(left: Tensor, right: Tensor) -> None:
    """Raise unless float64 holds every partial sum of a matrix product's elements, in any order."""
    with _disable_current_modes():
        for factor in (left, right):
            assert factor.dtype == torch.float64
            assert torch.equal(factor * 2.0**25, (factor * 2.0**25).round()), "a factor is between multiples of 2^-25"
        assert (left.abs() @ right.abs()).max() < 2.0**3, "a sum has more than 53 bits"


class Watched(TorchDispatchMode):
    """Raises for an operation on floating-point tensors whose bits depend on the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.removesuffix("_")
        floats = [each for each in tree_leaves(args) if isinstance(each, Tensor) and each.is_floating_point()]
        half = [each for each in floats if each.dtype != torch.float64]
        if name == "mm":
            check_exact(*floats)
        elif floats and not SAME_ON_ALL.fullmatch(name):
            doubled = name == "sqrt" and not half  # correctly rounded in float64 by all
            if not doubled and not (name == "pow" and args[1] == 2):  # x * x
                raise AssertionError(f"{func} is rounded in its own way by each device or library")
        if name == "div" and not (isinstance(args[1], Tensor) and args[1].dim()):
            raise AssertionError("CUDA multiplies by the rounded inverse of a number")
        if name in ("add", "sub") and abs(kwargs.get("alpha", 1)) != 1:
            raise AssertionError("a product and a sum in one operation may be rounded once or twice")
        return func(*args, **kwargs)


@pytest.mark.parametrize("codec", [name for name in BOUNDED | COARSE if not name.endswith("-built")])
def test_a_codec_has_the_same_bits_on_every_device(codec: str) -> None:
    encoder, values = (BOUNDED | COARSE)[codec](), spread_values(9000)
    with Watched():
        payload = encoder.encode(values)
        encoder.validate(payload, len(values))
        encoder.decode(payload, len(values))
        encoder.accumulate(payload, values, 0.3)
        encode_mean(values, encoder)


@pytest.mark.parametrize("rule", [None, SendersMean()])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_mean_has_the_same_bits_on_every_device(rule: AverageRule | None, max_norm: float | None) -> None:
    more: dict[str, Any] = {"average_rule": rule, "max_norm": max_norm, "tensors": (200, 400), "buffers": torch.ones(3)}
    for codec, number in (("fp4", 3), ("int8", 5)):
        values = [spread_values(600, seed=m).clamp_(-1e20, 1e20) for m in range(number)]
        given = contributions(values, [1.0 + 0.3 * m for m in range(number)], codec=codec, **more)
        with Watched():
            weighted_mean(given)


@pytest.mark.parametrize("outer", [Sgd(learning_rate=0.7), Nesterov(), Nesterov(learning_rate=ValueSchedule(peak=1))])
def test_an_outer_step_has_the_same_bits_on_every_device(outer: OuterOptimizer) -> None:
    values, *means = (spread_values(600, seed).clamp_(-1e15, 1e15) for seed in range(4))
    with Watched():
        state = outer.init(values)
        for mean in means:
            outer.update(mean, state, values)


@pytest.mark.parametrize("shape", [(40, 40), (3, 400), (400, 3), (1, 7)])
def test_an_isotropic_mean_has_the_same_bits_on_every_device(shape: tuple[int, int]) -> None:
    layout = FragmentLayout(0, ("random", "identity", "bias"), (shape, shape, (3,)))
    random = spread_values(layout.sizes[0]).clamp_(-1e20, 1e20)
    mean = torch.cat([random, torch.eye(*shape).flatten(), torch.ones(3)])
    with Watched():
        isotropic(mean, layout, dict.fromkeys(("random", "identity"), nn.Parameter(random.view(shape))))


@pytest.mark.parametrize("number", [3, 5, 6, 7, 0.19, 1e-18, 3e18])
def test_division_by_a_divisor_rounds_once_as_division_by_a_number_does_on_the_cpu(number: float) -> None:
    values = spread_values(5000)
    for some in (values, values.to(torch.float64), values[:0]):
        assert torch.equal(some / divisor(number, some), some / number)
