"""DiLoCo's state beside a framework's own checkpoint: verified, whole or not there, and without pickle.

It lies in ``diloco/replica-M`` of the framework's folder, or ``diloco/replica-M-rank-R-of-S`` where ranks share the
parameters out and each saves its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from diloco.algorithm.digest import digest_tensors
from diloco.checkpoint.reading import open_checkpoint
from diloco.checkpoint.writing import save_checkpoint
from diloco.errors import CheckpointError, ConfigurationError
from diloco.integrations.host import is_sharded
from diloco.integrations.values import held_values, hold_values
from diloco.outer.diloco import DiLoCo

__all__ = ["exact_state", "has_state", "load_state", "restore", "save_state"]


@dataclass(frozen=True)
class _Place:
    """Where this rank's state lies in a framework's checkpoint."""

    folder: Path
    replica: int
    suffix: str

    @classmethod
    def of(cls, checkpoint: Path, diloco: DiLoCo) -> _Place:
        suffix = f"-rank-{dist.get_rank()}-of-{dist.get_world_size()}" if _saves_alone(diloco) else ""
        return cls(checkpoint / "diloco", diloco.transport.replica, suffix)

    @property
    def path(self) -> Path:
        return self.folder / f"replica-{self.replica}{self.suffix}"

    def others(self) -> list[str]:
        """What lies there of other replicas, or of other numbers of ranks."""
        found = sorted(path.name for path in self.folder.glob("replica-*"))
        mine = f"replica-{self.replica}"
        end = self.suffix.rpartition("-of-")[2]
        return [name for name in found if name.partition("-rank-")[0] != mine or not name.endswith(end)]


def exact_state(diloco: DiLoCo, local: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """All that `restore` needs beside the framework's own state.

    Args:
        diloco: of this rank.
        local: parameter name -> the local value, where the framework saves global ones as the model.
    """
    return {"diloco": diloco.state_dict(), "local": local}


def restore(diloco: DiLoCo, state: Mapping[str, Any]) -> None:
    """Go on where `exact_state` was called, with a model that the framework has loaded, or is about to."""
    if state["local"] is not None:
        hold_values(diloco.model, state["local"])
    diloco.load_state_dict(state["diloco"])


def save_state(checkpoint: Path, diloco: DiLoCo, local: Mapping[str, Tensor] | None = None) -> None:
    """Save what this rank needs to go on exactly; to be called on all ranks of the replica.

    Args:
        checkpoint: the framework's folder.
        diloco: of this rank.
        local: parameter name -> the local value, where the framework saved global ones as the model.

    Raises:
        ConfigurationError: if another replica saves into the same folder.
        CheckpointError: if it can't be written.
    """
    if not _saves_alone(diloco) and dist.is_initialized() and dist.get_rank() != 0:
        return
    place = _Place.of(checkpoint, diloco)
    if others := [name for name in place.others() if name.partition("-rank-")[0] != f"replica-{place.replica}"]:
        raise ConfigurationError(
            f"replica {place.replica} was to save into {checkpoint}, where {others[0]} saves too, so that each "
            "overwrites the other's model and optimizer; a folder for each replica would work. Nothing was saved."
        )
    about = {"replica": place.replica, "steps": diloco.steps, "model": digest_tensors(held_values(diloco.model))}
    save_checkpoint(place.path, diloco.steps, {"state": exact_state(diloco, local)}, about=about, keep=1)


def has_state(checkpoint: Path) -> bool:
    """Whether any replica saved its state there."""
    return any((checkpoint / "diloco").glob("replica-*"))


def load_state(checkpoint: Path, diloco: DiLoCo, *, check_model: bool) -> None:
    """Go on where `save_state` was called; to be called on all ranks of the replica.

    Afterwards the model holds its local parameters, also where the framework saved the global ones.

    Args:
        checkpoint: the framework's folder.
        diloco: of this rank, new.
        check_model: whether the framework has loaded the model already, which then must be the one saved there.

    Raises:
        CheckpointError: if there is none for this replica, it is damaged, or of another model or schedule.
    """
    place = _Place.of(checkpoint, diloco)
    if not place.path.exists() and (others := place.others()):
        raise CheckpointError(
            f"{checkpoint} holds {', '.join(others)} and not {place.path.name}; the folder that this replica saved, "
            "with as many ranks as then, would work. Nothing was started."
        )
    opened = open_checkpoint(place.path)
    if check_model and opened.about["model"] != digest_tensors(held_values(diloco.model)):
        raise CheckpointError(
            f"the model that was loaded is not the one saved in {checkpoint}; naming the folder that it was loaded "
            "from (resume_from_checkpoint of the callback) would work. Nothing was started."
        )
    restore(diloco, opened.load("state"))


def _saves_alone(diloco: DiLoCo) -> bool:
    return is_sharded(diloco.model)
