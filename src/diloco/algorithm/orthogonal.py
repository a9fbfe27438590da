"""Orthogonalisation of matrices by the Newton-Schulz iteration, on one rank or shared by several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_SIDE = 64  # for smaller matrices bfloat16 costs more than it gains
_BATCH_VALUES = 1 << 24  # the most values that a rank orthogonalises together, which bounds the scratch memory


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return approximately ``U V^T`` for each matrix ``U S V^T``, by the quintic Newton-Schulz iteration.

    The singular values of the result are near 1. With ``X = G / |G|_F``, transposed if it has more rows than columns,
    ``steps`` times::

        A = X X^T;   X <- 3.4445 X + (-4.7750 A + 2.0315 A^2) X

    The computation uses bfloat16 on CUDA, and on CPUs that multiply it in hardware (AMX) for matrices of at least
    64 x 64; otherwise float32.

    Args:
        matrices: ``(n, rows, columns)``, left unchanged.
        steps: The number of iterations.

    Returns:
        ``(n, rows, columns)``, in the type of ``matrices``. A matrix of zeros gives zeros.

    >>> made = orthogonalised(torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(0)))
    >>> bool((torch.linalg.svdvals(made) - 1).abs().max() < 0.35)
    True
    """
    working = matrices.to(_working_type(matrices.shape[1:], matrices.device))
    return newton_schulz(working, steps).to(matrices.dtype)


def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return `orthogonalised` matrices, computed in their own type."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    working = matrices.mT if tall else matrices
    working = working / working.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = working @ working.mT
        working = torch.baddbmm(working, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), working, beta=a)
    return working.mT if tall else working


def _working_type(shape: torch.Size, device: torch.device) -> torch.dtype:
    fast = device.type == "cuda" or (min(shape) >= _LEAST_SIDE and _multiplies_bfloat16(device.type))
    return torch.bfloat16 if fast else torch.float32


@functools.cache
def _multiplies_bfloat16(device: str) -> bool:
    """Return whether the device is a CPU that multiplies bfloat16 matrices in hardware, much faster than float32."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # newer versions of torch
    return device == "cpu" and bool(capabilities.get("amx_bf16"))


class Ranks(Protocol):
    """S ranks that hold shards, or copies, of the same matrices; `diloco.transport.ReplicaGroup` is one.

    Each method begins a transfer and returns a function that waits for it. All ranks begin the same ones in order.
    """

    size: int  # S
    position: int  # of this rank

    def begin_gather(self, value: Tensor, /) -> Callable[[], Tensor]:
        """Give ``value`` to all ranks and get ``(size, ...)``, the values of all."""
        ...

    def begin_exchange(self, values: Tensor, sends: Sequence[int], receives: Sequence[int], /) -> Callable[[], Tensor]:
        """Send the next ``sends[s]`` of ``values``, ``(n,)``, to each rank s, and get ``receives[s]`` from each."""
        ...


class Alone:
    """A lone rank, which transfers nothing."""

    size, position = 1, 0

    def begin_gather(self, value: Tensor, /) -> Callable[[], Tensor]:
        return lambda: value.unsqueeze(0)

    def begin_exchange(self, values: Tensor, sends: Sequence[int], receives: Sequence[int], /) -> Callable[[], Tensor]:
        return lambda: values


def orthogonalised_by(
    ranks: Ranks, matrices: Sequence[tuple[Tensor, Tensor]], iterate: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Orthogonalise the updates of ``matrices``, each by one of ``ranks``, and equal ones together.

    The shards of a sharded update travel to that rank and those of the result back; the result of a whole one travels
    to all. Transfers overlap with the work on other matrices and have the type of the iteration. The k-th matrix, in
    order of shapes, belongs to rank k modulo S.

    Args:
        matrices: Pairs of a parameter and its update, ``(rows, columns)``, the same on all ranks. If the parameter is a
            DTensor, sharded by rows over ``ranks``, the update is this rank's shard.
        iterate: `newton_schulz`.

    Yields:
        Each parameter with its result, or this rank's shard of it, in the type of the iteration.
    """
    alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for parameter, update in matrices:
        key = parameter.shape, hasattr(parameter, "to_local"), parameter.device, parameter.dtype
        alike.setdefault(key, []).append((parameter, update))
    last = None
    # while one batch is orthogonalised, the next is gathered and the results of the last one travel
    for batch, _ in pairwise(chain(_batches(ranks, alike.values()), [None])):
        assert batch is not None, "only the last is"
        batch.orthogonalise(iterate)
        if last is not None:
            yield from last.results()
        last = batch
    if last is not None:
        yield from last.results()


def _batches(ranks: Ranks, alike: Collection[Sequence[tuple[Tensor, Tensor]]]) -> Iterator[_Batch]:
    first = 0
    for matrices in alike:
        at_once = ranks.size * max(1, _BATCH_VALUES // matrices[0][0].numel())
        for start in range(0, len(matrices), at_once):
            batch = matrices[start : start + at_once]
            yield _Batch(ranks, [batch[(rank - first) % ranks.size :: ranks.size] for rank in range(ranks.size)])
            first += len(batch)


class _Batch:
    """Matrices of one shape on the way to the ranks that orthogonalise them, and back.

    Args:
        matrices: For each rank, the parameters and updates that it orthogonalises.
    """

    def __init__(self, ranks: Ranks, matrices: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        self.ranks = ranks
        self.matrices = matrices
        mine = [update for _, update in matrices[ranks.position]]
        parameter, update = next(pairs[0] for pairs in matrices if pairs)
        self.shape = parameter.shape
        self.sharded = hasattr(parameter, "to_local")
        working = _working_type(self.shape, update.device)
        if self.sharded:
            rows, each = self.shape[0], -(-self.shape[0] // ranks.size)  # as FSDP2 divides rows
            self.rows = [min(each, max(0, rows - rank * each)) for rank in range(ranks.size)]
            self.sends = [len(pairs) * update.numel() for pairs in matrices]
            self.receives = [len(mine) * share * self.shape[1] for share in self.rows]
            values = torch.cat([update.reshape(-1).to(working) for pairs in matrices for _, update in pairs])
            self._wait = ranks.begin_exchange(values, self.sends, self.receives)
        else:
            whole = torch.stack(mine).to(working) if mine else update.new_empty((0, *self.shape), dtype=working)
            self._wait = lambda: whole

    def orthogonalise(self, iterate: Callable[[Tensor], Tensor]) -> None:
        """Wait for this rank's matrices, orthogonalise them, and begin to send the results."""
        matrices, count = self._wait(), len(self.matrices[self.ranks.position])
        if self.sharded:
            shares = zip(torch.split(matrices, self.receives), self.rows, strict=True)
            matrices = torch.cat([share.view(count, rows, self.shape[1]) for share, rows in shares], dim=1)
        results = iterate(matrices) if count else matrices
        if self.sharded:
            values = torch.cat([share.reshape(-1) for share in torch.split(results, self.rows, dim=1)])
            self._wait = self.ranks.begin_exchange(values, self.receives, self.sends)
        else:
            room = max(map(len, self.matrices)) - count
            padded = torch.cat([results, results.new_empty((room, *self.shape))]) if room else results
            self._wait = self.ranks.begin_gather(padded)

    def results(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait for the results and yield each parameter with its own, or this rank's shard of it."""
        arrived = self._wait()
        blocks = torch.split(arrived, self.sends) if self.sharded else arrived.unbind()
        for pairs, block in zip(self.matrices, blocks, strict=True):
            for number, (parameter, update) in enumerate(pairs):
                yield parameter, block.view(-1 if update.numel() else len(pairs), *update.shape)[number]
