"""Rules that merge new global parameters of a fragment into its local parameters.

With alpha = 0 and tau = 0 both rules replace the local parameters by the global ones.

`carry_over` serves a replica whose contribution is *not* in the average. It moves the local parameters along with the
global ones and keeps the replica's unsent work, so that its next pseudo-gradient contains all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from diloco.algorithm.checks import check_number


@runtime_checkable
class MergeRule(Protocol):
    """A rule that merges new global parameters into the local ones, each value by the same value of the others alone."""

    @property
    def keeps_sent(self) -> bool:
        """Whether the rule needs the local parameters when sent, which cost 4 bytes per value while in flight."""

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        """Update ``local`` in place, given the global parameters after the outer step; all ``(n,)`` float32.

        ``sent`` are the local parameters when sent if ``keeps_sent``, else None. A call gets a part of a fragment.
        """


@dataclass(frozen=True)
class AlphaMerge:
    """``local <- alpha * local + (1 - alpha) * global`` (Streaming DiLoCo, Algorithm 2, line 12).

    alpha = 0 drops the work of the overlapped steps; alpha = 1 ignores the other replicas.

    >>> import torch
    >>> local = torch.tensor([1.0, 2.0])
    >>> AlphaMerge(0.25).merge(local, torch.tensor([5.0, 6.0]), None)
    >>> local.tolist()
    [4.0, 5.0]
    """

    alpha: float = 0.0
    keeps_sent = False

    def __post_init__(self) -> None:
        check_number("merge alpha", self.alpha, ge=0, le=1)

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        local.mul_(self.alpha).add_(global_params * (1 - self.alpha))


@dataclass(frozen=True)
class RebaseMerge:
    """``local <- global + (local - local when sent)``, which keeps all work of the overlapped steps
    (as LOSCAR-SGD).

    >>> import torch
    >>> local, sent = torch.tensor([1.5]), torch.tensor([1.0])
    >>> RebaseMerge().merge(local, torch.tensor([3.0]), sent)
    >>> local.tolist()
    [3.5]
    """

    keeps_sent = True

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        assert sent is not None, "RebaseMerge needs the local parameters when sent"
        local.sub_(sent).add_(global_params)


def carry_over(local: Tensor, old_global: Tensor, new_global: Tensor) -> None:
    """``local <- local + (new global - old global)``, in place; all ``(numel,)`` float32.

    The pseudo-gradient ``global - local`` stays the same, so none of the replica's work is lost.

    >>> import torch
    >>> local, old, new = torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([6.0])
    >>> carry_over(local, old, new)
    >>> (old - 1.0).item() == (new - local).item()
    True
    """
    local.add_(new_global - old_global)
