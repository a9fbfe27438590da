"""Isotropic means against a singular value decomposition, and a problem that they learn faster."""

import pytest
import torch
from torch import Tensor, nn

from diloco import DiLoCo
from diloco.algorithm import FragmentLayout, digest_tensors, isotropic, newton_schulz
from diloco.errors import ConfigurationError

SHAPES = [(1, 1), (1, 7), (7, 1), (6, 6), (5, 40), (40, 5)]


def random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_one(matrix: Tensor) -> Tensor:
    layout = FragmentLayout(0, ("matrix",), (tuple(matrix.shape),))
    return isotropic(matrix.flatten(), layout, {"matrix": nn.Parameter(matrix)}).view_as(matrix)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_singular_vectors_and_the_norm_stay_and_the_values_become_alike(shape: tuple[int, int]) -> None:
    matrix = random(shape)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    rotated = left.mT @ of_one(matrix).double() @ right.mT  # diagonal, as the singular vectors are the same
    made = rotated.diagonal()
    assert float(made.norm()) == pytest.approx(float(values.norm()), rel=1e-6)
    assert float((rotated - torch.diag(made)).norm()) < 1e-5 * float(made.norm())
    assert made.min() > 0.5 * made.max(), "values above a five-hundredth of the norm differ by less than a factor of 2"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exponent", [-100, -1, 90])
def test_means_of_any_size_are_scaled_alike(shape: tuple[int, int], exponent: int) -> None:
    """The results differ by a power of two, in every bit."""
    matrix, factor = random(shape), 2.0**exponent
    assert torch.equal(of_one(matrix * factor), of_one(matrix) * factor)


def test_the_bits_are_those_of_every_processor() -> None:
    """The digest was taken with AVX2 and without vector instructions."""
    whole = torch.arange(-450.0, 450.0).mul_(7.0).remainder_(901.0)
    made = {"square": of_one(whole.view(30, 30)), "tall": of_one(whole[:200].view(40, 5))}
    assert digest_tensors(made) == "59417bccffaeeb7c33be0defb772d35e"


def test_directions_without_any_work_get_none() -> None:
    assert not of_one(torch.zeros(3, 4)).any()
    column, row = random((30, 1)), random((1, 20), seed=1)
    assert (of_one(column @ row) - column @ row).norm() < 1e-3 * (column @ row).norm()


@pytest.mark.parametrize("steps", range(1, 6))
def test_singular_values_keep_the_bound_that_makes_sums_exact(steps: int) -> None:
    values = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    made = newton_schulz(torch.diag_embed(torch.stack([values, (1 - values.square()).sqrt()], 1)), steps)
    assert made.abs().max() < 1.21


def test_rows_of_negative_zeros_become_positive_zeros() -> None:
    matrix = random((4, 6))
    matrix[1:3] = -0.0
    made = of_one(matrix)
    assert not made[1:3].any()
    assert not torch.signbit(made[1:3]).any()


def test_other_tensors_and_the_mean_stay() -> None:
    layout = FragmentLayout(0, ("table", "matrix", "bias"), ((5, 2), (4, 3), (4,)))
    mean = random((layout.numel,))
    before = mean.clone()
    some = nn.Parameter(torch.zeros(4, 3))
    made = isotropic(mean, layout, {"matrix": some, "of another fragment": some})
    assert torch.equal(mean, before)
    changed = [name for name, part in layout.named(made).items() if not torch.equal(part, layout.named(mean)[name])]
    assert changed == ["matrix"]
    assert isotropic(mean, layout, {"of another fragment": some}) is mean


def test_models_without_hidden_matrices_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"isotropic=True needs hidden matrices.*Omit it"):
        DiLoCo(model, inner, isotropic=True)
