"""Isotropic means: the singular values of each hidden matrix's mean pseudo-gradient become about equal (IsoLoCo).

Replicas must agree to the bit, but the bits of a matrix product depend on the order of its sums, which each processor
and library chooses for itself. Here all factors are multiples of 2^-25, in float64, and so small that every sum of
their products is exact, in any order. Everything else is elementwise, of operations that round alike everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diloco.algorithm.muon import COEFFICIENTS
from diloco.algorithm.partition import FragmentLayout
from diloco.algorithm.rounds import vector_norm
from diloco.algorithm.tensors import local_shard, set_whole_

_GRID = 2.0**25
_STEPS = 5


def isotropic(mean: Tensor, layout: FragmentLayout, matrices: Mapping[str, nn.Parameter]) -> Tensor:
    """Return a fragment's mean pseudo-gradient with about equal singular values in ``matrices``.

    The part of a matrix, ``G = U S V^T``, becomes about ``U V^T``, with the norm of G, so that the outer step is as
    long as before (IsoLoCo, 2607.03011). All bits are the same on every CPU and GPU.

    Args:
        mean: ``(numel,)`` float32, left unchanged.
        layout: The layout of ``mean``.
        matrices: Name -> parameter, such as `hidden_matrices`. If ranks shard them, each rank computes whole matrices,
            and all must call this at once.

    Returns:
        ``(numel,)`` float32; ``mean`` itself if the fragment has none of the matrices.

    >>> layout = FragmentLayout(0, ("matrix", "bias"), ((2, 2), (1,)))
    >>> mean = torch.tensor([3.0, 0.0, 0.0, 1.0, 5.0])
    >>> isotropic(mean, layout, {"matrix": nn.Parameter(torch.zeros(2, 2))})[-1]
    tensor(5.)
    """
    if not matrices.keys() & set(layout.names):
        return mean
    result = mean.clone()
    for name, part in layout.named(result).items():
        if name in matrices:
            _change_(part, matrices[name])
    return result


def _change_(part: Tensor, parameter: nn.Parameter) -> None:
    shard: Any = part
    if hasattr(parameter, "to_local"):
        shard = torch.empty_like(parameter.detach(), dtype=torch.float32)
        local_shard(shard).copy_(part)
    whole = shard.full_tensor() if shard is not part else part
    set_whole_(shard, _orthogonalised(whole.cpu() if whole.device.type == "mps" else whole))  # MPS has no float64
    if shard is not part:
        part.copy_(local_shard(shard))


def _orthogonalised(matrix: Tensor) -> Tensor:
    """Return about ``|G| U V^T / |U V^T|`` for ``G = U S V^T``, by the iteration of `newton_schulz` on the grid.

    Of singular values of at most 1.21 the iteration makes values of at most 1.21. Norms of rows and columns are at most
    the largest of them, so the absolute values of the products in a sum add up to less than 4 (2.81 * 1.21 in the last
    product), which is 2^52 units of 2^-50. Float64 holds 2^53.
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
    # a sum of zeros may be -0.0, depending on the library; + 0.0 makes it 0.0
    return values.mul_(_GRID).round_().mul_(1 / _GRID).add_(0.0)
