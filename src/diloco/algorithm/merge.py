"""What becomes of the local parameters of a fragment when its new global parameters arrive.

Two rules with one interface. Both reduce to "take the global parameters" with alpha = 0 and tau = 0.

===========  ==========================================================  ==============================================
rule         equation                                                    source
===========  ==========================================================  ==============================================
``alpha``    ``local <- alpha * local + (1 - alpha) * global``           Streaming DiLoCo, Algorithm 2, line 12
``rebase``   ``local <- global + (local - local at sending)``            as LOSCAR-SGD: keep the drift of the overlapped
                                                                         steps, replace only what is stale
===========  ==========================================================  ==============================================

`carry_over` serves a replica whose contribution is *not* in the average: it follows the move of the global parameters
and keeps its own unsent work, so that its next pseudo-gradient holds all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from diloco.algorithm.numbers import check_number

__all__ = ["AlphaMerge", "MergeRule", "RebaseMerge", "carry_over"]


class MergeRule(Protocol):
    """How local parameters take up new global ones."""

    @property
    def keeps_sent(self) -> bool:
        """Whether the rule needs the local parameters as they were at sending (4 bytes per value while in flight)."""

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        """Change ``local`` in place. A rule with an attribute ``elementwise = True`` may be given a part of the values.

        Args:
            local: ``(numel,)`` float32, the local parameters now.
            global_params: ``(numel,)`` float32, after the outer step.
            sent: ``(numel,)`` float32, the local parameters at sending, if ``keeps_sent``.
        """


@dataclass(frozen=True)
class AlphaMerge:
    """``local <- alpha * local + (1 - alpha) * global`` (Streaming DiLoCo, Algorithm 2, line 12).

    alpha = 0 drops what the overlapped steps did, alpha = 1 never listens to the other replicas.

    >>> import torch
    >>> local = torch.tensor([1.0, 2.0])
    >>> AlphaMerge(0.25).merge(local, torch.tensor([5.0, 6.0]), None)
    >>> local.tolist()
    [4.0, 5.0]
    """

    alpha: float = 0.0
    keeps_sent = False
    elementwise = True

    def __post_init__(self) -> None:
        check_number("merge alpha", self.alpha, 0, 1)

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        local.mul_(self.alpha).add_(global_params * (1 - self.alpha))


@dataclass(frozen=True)
class RebaseMerge:
    """``local <- global + (local - local at sending)``: the drift of the overlapped steps is kept whole.

    >>> import torch
    >>> local, sent = torch.tensor([1.5]), torch.tensor([1.0])
    >>> RebaseMerge().merge(local, torch.tensor([3.0]), sent)
    >>> local.tolist()
    [3.5]
    """

    keeps_sent = True
    elementwise = True

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        assert sent is not None, "RebaseMerge keeps what was sent"
        local.sub_(sent).add_(global_params)


def carry_over(local: Tensor, old_global: Tensor, new_global: Tensor) -> None:
    """``local <- local + (new global - old global)``, in place; all ``(numel,)`` float32.

    The pseudo-gradient ``global - local`` is the same before and after: nothing of the replica's work is lost.

    >>> import torch
    >>> local, old, new = torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([6.0])
    >>> carry_over(local, old, new)
    >>> (old - 1.0).item() == (new - local).item()
    True
    """
    local.add_(new_global - old_global)
