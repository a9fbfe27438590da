"""One replica whose loop a framework drives: what the integrations have in common.

DiLoCo's state lies beside the framework's own checkpoint, in ``diloco/replica-M`` of its folder, or in
``diloco/replica-M-rank-R-of-S`` where ranks share the parameters out and each saves its own: verified, whole or not
there, and without pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco.algorithm.clipping import Clipping
from diloco.algorithm.codec import Codec
from diloco.algorithm.digest import digest_tensors
from diloco.algorithm.fragments import Fragment, local_shard, trainable_parameters
from diloco.algorithm.merge import MergeRule
from diloco.algorithm.outer_optimizer import OuterOptimizer
from diloco.algorithm.schedule import SyncSchedule
from diloco.checkpoint.reading import open_checkpoint
from diloco.checkpoint.writing import save_checkpoint
from diloco.errors import CheckpointError, ConfigurationError
from diloco.events import Event, RoundCommitted
from diloco.integrations.host import StepWatch, is_sharded, unwrapped
from diloco.outer.diloco import DiLoCo
from diloco.transport.base import Transport

__all__ = [
    "DiLoCoArguments",
    "Figures",
    "HostedReplica",
    "Parameters",
    "exact_state",
    "has_state",
    "held_values",
    "hold_values",
    "load_state",
    "restore",
    "save_state",
]

Parameters = Literal["global", "local"]
"""Whose values are evaluated, saved for use, and left in the model at the end: what all replicas agree on, or this
replica's own."""


class DiLoCoArguments(TypedDict, total=False):
    """The arguments of `DiLoCo` that an integration passes on; they are explained there."""

    schedule: SyncSchedule | None
    fragments: Sequence[Fragment] | None
    outer_optimizer: OuterOptimizer | None
    merge: MergeRule | None
    codec: Codec | str
    error_feedback: bool
    global_device: torch.device | str | None
    weight: float
    clipping: Clipping | None
    mean_codec: Codec | str
    mean_error_feedback: bool | float
    on_event: Callable[[Event], None] | None


class Figures:
    """What became of the rounds so far, as a framework's logs take it.

    Args:
        on_event: called with every event, too.
    """

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self._on_event = on_event
        self._wait_s = 0.0
        self._contributors = 0

    def handle(self, event: Event) -> None:
        """Take note of ``event``."""
        if isinstance(event, RoundCommitted):
            self._wait_s += event.wait_s
            self._contributors = len(event.contributors)
        if self._on_event is not None:
            self._on_event(event)

    def of(self, diloco: DiLoCo) -> dict[str, float]:
        """Name -> number. Rounds and bytes since the beginning; seconds of waiting since this process began."""
        return {
            "diloco/rounds": diloco.rounds_committed,
            "diloco/rounds_void": diloco.rounds_void,
            "diloco/contributors": self._contributors,
            "diloco/sent_bytes": diloco.transport.sent_bytes,
            "diloco/received_bytes": diloco.transport.received_bytes,
            "diloco/wait_s": self._wait_s,
        }


class HostedReplica:
    """A `DiLoCo` that is made when a framework begins to train, and the values that the model holds meanwhile.

    While the global parameters are shown, nothing may be trained or merged.

    Args:
        parameters: whose values the model holds where it is evaluated and saved, and at the end.

    Raises:
        ConfigurationError: if ``parameters`` are neither global nor local.
    """

    def __init__(self, parameters: Parameters, arguments: DiLoCoArguments) -> None:
        if parameters not in get_args(Parameters):
            raise ConfigurationError(f"parameters={parameters!r} was given; use global or local.")
        self.parameters = parameters
        self.diloco: DiLoCo | None = None  # once training has begun
        self.training = False  # whether training has begun, and has not ended
        self._arguments = arguments
        self._figures = Figures(arguments.get("on_event"))
        self._hidden: dict[str, Tensor] | None = None

    def begin(self, model: nn.Module, optimizer: Any, transport: Transport | None) -> DiLoCo:
        """Make the `DiLoCo` of what a framework has wrapped.

        Raises:
            ConfigurationError: if it can't serve the model, the optimizer or the transport.
        """
        bare, inner = unwrapped(model, optimizer, transport)
        arguments = self._arguments | {"on_event": self._figures.handle}
        self.diloco = DiLoCo(bare, inner, transport=transport, **arguments)
        self._watch = StepWatch(inner)
        self.training = True
        return self.diloco

    def step(self) -> None:
        """The optimizer has stepped, or a gradient scaler has skipped the step."""
        self._begun.step(self._watch.trained())

    def figures(self) -> dict[str, float]:
        """For the framework's logs; see `Figures`."""
        return self._figures.of(self._begun)

    @property
    def shows_globals(self) -> bool:
        """Whether the model holds the global parameters in place of the local ones."""
        return self._hidden is not None

    def show(self) -> None:
        """While training: the model takes the parameters that are to be evaluated or saved."""
        if self.training and self.parameters == "global" and self._hidden is None:
            self._hidden = {name: values.clone() for name, values in held_values(self._begun.model).items()}
            hold_values(self._begun.model, self._begun.outer_loop.named_global_params())

    def hide(self) -> None:
        """The model holds the local parameters again."""
        if self._hidden is not None:
            hold_values(self._begun.model, self._hidden)
            self._hidden = None

    def local(self) -> dict[str, Tensor]:
        """Parameter name -> the local value, wherever it is now; not copied."""
        return held_values(self._begun.model) if self._hidden is None else self._hidden

    def end(self, instead: Mapping[str, Tensor] | None = None) -> None:
        """Merge what is in flight, and leave the model with the parameters that were asked for, or ``instead``."""
        self.hide()
        self._begun.end()
        if instead is None and self.parameters == "global":
            instead = self._begun.outer_loop.named_global_params()
        if instead is not None:
            hold_values(self._begun.model, instead)
        self.abandon()

    def abandon(self) -> None:
        """Leave the model with the local parameters and the optimizer as it was; does nothing after the end."""
        self.hide()
        if self.training:
            self._watch.close()
            self.training = False

    @property
    def _begun(self) -> DiLoCo:
        assert self.diloco is not None, "training has begun"
        return self.diloco


def held_values(model: nn.Module) -> dict[str, Tensor]:
    """Name -> what this rank holds of the trainable parameter, on the same memory."""
    return {name: local_shard(parameter) for name, parameter in trainable_parameters(model).items()}


def hold_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the trainable parameters, in their own dtype and on their own device."""
    for name, shard in held_values(model).items():
        shard.copy_(values[name])


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
            "the other's model and optimizer. Give each replica a folder of its own."
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
            "saved, with as many ranks as it had then."
        )
    opened = open_checkpoint(mine)
    if check_model and opened.about["model"] != digest_tensors(held_values(diloco.model)):
        raise CheckpointError(
            f"the model that was loaded is not the one saved in {checkpoint}. Tell the callback which folder it was "
            "loaded from (resume_from_checkpoint)."
        )
    restore(diloco, opened.load("state"))


def _place(checkpoint: Path, diloco: DiLoCo) -> Path:
    """Where this rank's state lies."""
    suffix = f"-rank-{dist.get_rank()}-of-{dist.get_world_size()}" if is_sharded(diloco.model) else ""
    return checkpoint / "diloco" / f"replica-{diloco.transport.replica}{suffix}"


def _saved(checkpoint: Path) -> list[str]:
    """Whose state lies there: the names of all places."""
    return sorted(path.name for path in (checkpoint / "diloco").glob("replica-*"))
