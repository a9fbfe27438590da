"""A fragment on its way: what was sent, kept until its average is merged, and through a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.algorithm.clipping import Clipping
from diloco.algorithm.codec import Codec
from diloco.transport.base import Pending

__all__ = ["InFlight", "restore_contribution"]


@dataclass(frozen=True, eq=False)
class InFlight:
    """One fragment of one replica between sending and merging.

    Attributes:
        contribution: what was handed to the transport; handed in again after a checkpoint, it makes the same average.
        pending: the average on its way.
        sent: ``(numel,)`` float32, the local parameters at sending, where the merge rule needs them.
    """

    contribution: Contribution
    pending: Pending
    sent: Tensor | None

    def state_dict(self) -> dict[str, Any]:
        """What `restore_contribution` needs, and ``sent``; tensors are not copied."""
        contribution = self.contribution
        return {
            "fragment": contribution.round.fragment,
            "outer_step": contribution.round.outer_step,
            "payload": contribution.payload,
            "weight": contribution.weight,
            "digest": contribution.digest,
            "buffers": contribution.buffers,
            "integers": contribution.integers,
            "sent": self.sent,
        }


def restore_contribution(
    state: Mapping[str, Any], *, replica: int, codec: Codec, numel: int, device: torch.device, clipping: Clipping
) -> Contribution:
    """The contribution that `InFlight.state_dict` described, on ``device``."""
    return Contribution(
        round=RoundId(int(state["fragment"]), int(state["outer_step"])),
        replica=replica,
        codec=codec,
        numel=numel,
        payload=state["payload"].to(device),
        weight=float(state["weight"]),
        digest=str(state["digest"]),
        buffers=state["buffers"],
        integers=state["integers"],
        clipping=clipping,
    )
