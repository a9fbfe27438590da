"""Isotropic means: the singular values of each hidden matrix's mean pseudo-gradient become about equal (IsoLoCo).

Replicas must agree to the bit, but the bits of a matrix product depend on the order of its sums, which each processor
and library chooses for itself. Here all factors are multiples of 2^-25, in float64, and so small that every sum of
their products is exact, in any order. Everything else is elementwise and rounded once.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from diloco.algorithm.muon import COEFFICIENTS
from diloco.algorithm.partition import FragmentLayout
from diloco.algorithm.rounds import vector_norm

_GRID = 2.0**25
_STEPS = 5


def isotropic(mean: Tensor, layout: FragmentLayout, names: Collection[str]) -> Tensor:
    """Return a fragment's mean pseudo-gradient with about equal singular values in the matrices of ``names``.

    The part of a matrix, ``G = U S V^T``, becomes about ``U V^T``, with the norm of G, so that the outer step is as
    long as before (IsoLoCo, 2607.03011). All bits are the same on every CPU and GPU.

    Args:
        mean: ``(numel,)`` float32, left unchanged.
        layout: The layout of ``mean``.
        names: Those of the matrices. Others that the fragment has stay as they are.

    Returns:
        ``(numel,)`` float32; ``mean`` itself if the fragment has none of the matrices.

    >>> layout = FragmentLayout(0, ("matrix", "bias"), ((2, 2), (1,)))
    >>> isotropic(torch.tensor([3.0, 0.0, 0.0, 1.0, 5.0]), layout, {"matrix"})[-1]
    tensor(5.)
    """
    if not any(name in names for name in layout.names):
        return mean
    result = mean.clone()
    for name, matrix in layout.named(result).items():
        if name in names:
            matrix.copy_(_orthogonalised(matrix.cpu() if matrix.device.type == "mps" else matrix))  # has no float64
    return result


def _orthogonalised(matrix: Tensor) -> Tensor:
    """Return about ``|G| U V^T / |U V^T|`` for ``G = U S V^T``, by the iteration of `newton_schulz` on the grid.

    Singular values stay below 1.2, so the absolute values of the products in a sum add up to less than 4, which is 2^52
    units of 2^-50. Float64 holds 2^53.
    """
    norm, tall, (a, b, c) = vector_norm(matrix.flatten()), matrix.shape[0] > matrix.shape[1], COEFFICIENTS
    if not norm:
        return matrix
    working = _on_grid((matrix.mT if tall else matrix).double() * (1 / norm))
    for _ in range(_STEPS):
        gram = _on_grid(working @ working.mT)
        inner = _on_grid((gram @ gram).mul_(c).add_(gram * b))
        working = _on_grid((inner @ working).add_(working * a))
    result = working.mT if tall else working
    return result * (norm / vector_norm(result.float().flatten()))


def _on_grid(values: Tensor) -> Tensor:
    return values.mul_(_GRID).round_().mul_(1 / _GRID)
