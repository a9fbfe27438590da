"""DiLoCo's state beside a framework's own checkpoint: verified, whole or not there, and without pickle.

It lies in ``diloco/replica-M`` of the framework's folder, or in ``diloco/replica-M-rank-R-of-S`` where ranks share the
parameters out and each saves its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from diloco.algorithm.digest import digest_tensors
from diloco.checkpoint.reading import open_checkpoint
from diloco.checkpoint.writing import save_checkpoint
from diloco.errors import CheckpointError, ConfigurationError
from diloco.integrations.host import is_sharded
from diloco.integrations.hosted_replica import held_values, hold_values
from diloco.outer.diloco import DiLoCo

__all__ = ["exact_state", "has_state", "load_state", "restore", "save_state"]


def exact_state(diloco: DiLoCo, local: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """All that `restore` needs beside the framework's own state.

    Args:
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
        local: parameter name -> the local value, where the framework saves global ones as the model.

    Raises:
        ConfigurationError: if another replica saves into the same folder.
        CheckpointError: if it can't be written.
    """
    if not is_sharded(diloco.model) and dist.is_initialized() and dist.get_rank() != 0:
        return
    replica, mine = diloco.transport.replica, _place(checkpoint, diloco)
    if others := [name for name in _saved(checkpoint) if name.partition("-rank-")[0] != f"replica-{replica}"]:
        raise ConfigurationError(
            f"replica {replica} was to save into {checkpoint}, where {others[0]} saves too, and each would overwrite "
            "the other's model and optimizer. Give each replica a folder of its own. Nothing was saved."
        )
    about = {"replica": replica, "steps": diloco.steps, "model": digest_tensors(held_values(diloco.model))}
    save_checkpoint(mine, diloco.steps, {"state": exact_state(diloco, local)}, about=about, keep=1)


def has_state(checkpoint: Path) -> bool:
    """Whether any replica saved its state there."""
    return bool(_saved(checkpoint))


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
    mine = _place(checkpoint, diloco)
    if not mine.exists() and (others := _saved(checkpoint)):
        raise CheckpointError(
            f"{checkpoint} holds {', '.join(others)} and not {mine.name}. Resume from the folder that this replica "
            "saved, with as many ranks as it had then. Nothing was started."
        )
    opened = open_checkpoint(mine)
    if check_model and opened.about["model"] != digest_tensors(held_values(diloco.model)):
        raise CheckpointError(
            f"the model that was loaded is not the one saved in {checkpoint}. Tell the callback which folder it was "
            "loaded from (resume_from_checkpoint). Nothing was started."
        )
    restore(diloco, opened.load("state"))


def _place(checkpoint: Path, diloco: DiLoCo) -> Path:
    """Where this rank's state lies."""
    suffix = f"-rank-{dist.get_rank()}-of-{dist.get_world_size()}" if is_sharded(diloco.model) else ""
    return checkpoint / "diloco" / f"replica-{diloco.transport.replica}{suffix}"


def _saved(checkpoint: Path) -> list[str]:
    """Whose state lies there: the names of all places."""
    return sorted(path.name for path in (checkpoint / "diloco").glob("replica-*"))
