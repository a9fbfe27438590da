"""The common part of the integrations: a replica whose training loop is driven by a framework.

DiLoCo's state is saved next to the framework's checkpoint, in ``diloco/replica-M`` of the checkpoint folder. If
parameters are sharded, each rank saves its part in ``diloco/replica-M-rank-R-of-S``. The files are written atomically,
verified when read, and contain no pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco.algorithm import (
    AverageRule,
    Codec,
    FragmentLayout,
    MergeRule,
    OuterOptimizer,
    SyncSchedule,
    check_choice,
    digest_tensors,
    host_copy,
    local_shard,
)
from diloco.checkpoint import open_checkpoint, save_checkpoint
from diloco.errors import CheckpointError, ConfigurationError
from diloco.events import Event, RoundCommitted
from diloco.integrations.host import StepWatch, is_sharded, unwrapped
from diloco.outer import DiLoCo, Warnings, check_kinds
from diloco.transport import Transport

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
"""Which parameters are evaluated, saved as the model, and left in the model at the end: the global ones, which are the
same on all replicas, or this replica's local ones."""


class DiLoCoArguments(TypedDict, total=False):
    """The arguments that an integration passes on to `DiLoCo`, which documents them."""

    schedule: SyncSchedule | None
    fragments: Sequence[FragmentLayout] | None
    outer_optimizer: OuterOptimizer | None
    merge: MergeRule | None
    codec: Codec | str
    error_feedback: bool | float
    global_device: torch.device | str | None
    weight: float
    max_norm: float | None
    average: AverageRule | None
    telemetry: bool
    mean_codec: Codec | str
    on_event: Callable[[Event], None] | None


class Figures:
    """Collects figures of the rounds for a framework's logs.

    Args:
        on_event: a callback that also receives every event. None warns of void rounds and failures.
    """

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self._on_event = Warnings().handle if on_event is None else on_event
        self._wait_s = 0.0
        self._contributors = 0

    def handle(self, event: Event) -> None:
        """Process ``event``, and pass it on."""
        if isinstance(event, RoundCommitted):
            self._wait_s += event.wait_s
            self._contributors = len(event.contributors)
        self._on_event(event)

    def of(self, diloco: DiLoCo) -> dict[str, float]:
        """Return name -> number: rounds and bytes since the start of training, and seconds waited by this process."""
        return {
            "diloco/rounds": diloco.rounds_committed,
            "diloco/rounds_void": diloco.rounds_void,
            "diloco/contributors": self._contributors,
            "diloco/sent_bytes": diloco.transport.sent_bytes,
            "diloco/received_bytes": diloco.transport.received_bytes,
            "diloco/wait_s": self._wait_s,
        }


class HostedReplica:
    """A `DiLoCo` that is created when a framework starts to train. It can swap global parameters into the model.

    While the model holds the global parameters, it must not be trained or merged.

    Args:
        parameters: the parameters that the model holds while it is evaluated or saved, and at the end.
        arguments: further arguments of `DiLoCo`.

    Raises:
        ConfigurationError: if ``parameters`` or one of ``arguments`` can't work.
    """

    def __init__(self, parameters: Parameters, arguments: DiLoCoArguments) -> None:
        if parameters not in get_args(Parameters):
            raise ConfigurationError(f"parameters must be 'global' or 'local', got {parameters!r}.")
        for name in arguments:
            check_choice("argument", name, list(DiLoCoArguments.__annotations__))
        check_kinds(arguments)
        self.parameters = parameters
        self.diloco: DiLoCo | None = None  # None until training starts
        self.training = False  # whether training has started and not ended
        self._arguments = arguments
        self._figures = Figures(arguments.get("on_event"))
        self._hidden: dict[str, Tensor] | None = None

    def begin(self, model: nn.Module, optimizer: Any, transport: Transport | None) -> DiLoCo:
        """Create the `DiLoCo` for the model and optimizer that a framework has wrapped.

        Raises:
            ConfigurationError: if DiLoCo can't work with the model, the optimizer or the transport.
        """
        bare, inner = unwrapped(model, optimizer, transport)
        arguments = self._arguments | {"on_event": self._figures.handle}
        self.diloco = DiLoCo(bare, inner, transport=transport, **arguments)
        self._watch = StepWatch(inner)
        self.training = True
        return self.diloco

    def step(self) -> None:
        """Run `DiLoCo.step` after the optimizer has stepped or a gradient scaler has skipped the step."""
        self._begun.step(self._watch.trained())

    def figures(self) -> dict[str, float]:
        """Return figures for the framework's logs; see `Figures`."""
        return self._figures.of(self._begun)

    @property
    def shows_globals(self) -> bool:
        """Whether the model holds the global parameters instead of the local ones."""
        return self._hidden is not None

    def show(self) -> None:
        """During training, put the parameters that are to be evaluated or saved into the model."""
        if self.training and self.parameters == "global" and self._hidden is None:
            self._begun.check_model()
            self._hidden = {name: host_copy(values) for name, values in held_values(self._begun).items()}
            hold_values(self._begun, self._begun.named_global_params())

    def hide(self) -> None:
        """Put the local parameters back into the model."""
        if self._hidden is not None:
            hold_values(self._begun, self._hidden)
            self._hidden = None

    def local(self) -> dict[str, Tensor]:
        """Return parameter name -> local value, without copying, whatever the model currently holds."""
        return held_values(self._begun) if self._hidden is None else self._hidden

    def end(self, instead: Mapping[str, Tensor] | None = None) -> None:
        """Merge what is in flight, and leave the model with the chosen `parameters`, or with ``instead`` if given."""
        self.hide()
        self._begun.end()
        if instead is None and self.parameters == "global":
            instead = self._begun.named_global_params()
        if instead is not None:
            hold_values(self._begun, instead)
        self.abandon()

    def abandon(self) -> None:
        """Put the local parameters back and remove the hook from the optimizer; do nothing after `end`."""
        self.hide()
        if self.training:
            self._watch.close()
            self.training = False

    @property
    def _begun(self) -> DiLoCo:
        assert self.diloco is not None, "training has started"
        return self.diloco


def held_values(diloco: DiLoCo) -> dict[str, Tensor]:
    """Return name -> this rank's part of each synchronised parameter, sharing its memory."""
    return {name: local_shard(parameter) for name, parameter in diloco.named_parameters().items()}


def hold_values(diloco: DiLoCo, values: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the synchronised parameters, which keep their dtype and device."""
    for name, shard in held_values(diloco).items():
        shard.copy_(values[name])


def exact_state(diloco: DiLoCo, local: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Return the state that `restore` needs in addition to the framework's own.

    Args:
        local: parameter name -> local value, if the framework saves the global parameters as the model; else None.
    """
    return {"diloco": diloco.state_dict(), "local": local}


def restore(diloco: DiLoCo, state: Mapping[str, Any]) -> None:
    """Restore the state returned by `exact_state`. The framework loads the model before or after this call."""
    if state["local"] is not None:
        hold_values(diloco, state["local"])
    diloco.load_state_dict(state["diloco"])


def save_state(checkpoint: Path, diloco: DiLoCo, local: Mapping[str, Tensor] | None = None) -> None:
    """Save the state that this rank needs to resume exactly. Call this on all ranks of the replica.

    Args:
        checkpoint: the framework's checkpoint folder.
        local: parameter name -> local value, if the framework saves the global parameters as the model; else None.

    Raises:
        ConfigurationError: if another replica has saved into the same folder.
        CheckpointError: if the state can't be written.
    """
    if not is_sharded(diloco.model) and dist.is_initialized() and dist.get_rank() != 0:
        return
    replica, mine = diloco.transport.replica, _place(checkpoint, diloco)
    if others := [name for name in _saved(checkpoint) if name.partition("-rank-")[0] != f"replica-{replica}"]:
        raise ConfigurationError(
            f"Replica {replica} can't save into {checkpoint}, because {others[0]} saves there and each would overwrite "
            "the other's model and optimizer. Give each replica its own folder."
        )
    about = {"replica": replica, "steps": diloco.steps, "model": digest_tensors(held_values(diloco))}
    save_checkpoint(mine, diloco.steps, {"state": exact_state(diloco, local)}, about=about, keep=1)


def has_state(checkpoint: Path) -> bool:
    """Return whether any replica has saved its state in the folder."""
    return bool(_saved(checkpoint))


def load_state(checkpoint: Path, diloco: DiLoCo, *, check_model: bool) -> None:
    """Restore the state that `save_state` saved. Call this on all ranks of the replica.

    Afterwards the model holds its local parameters, even if the framework saved the global ones.

    Args:
        checkpoint: the framework's checkpoint folder.
        diloco: this rank's `DiLoCo`, which has not taken a step.
        check_model: whether to check that the model is the one saved with the state; True if it is already loaded.

    Raises:
        CheckpointError: if the state of this replica is missing or damaged, or belongs to another model or schedule.
    """
    mine = _place(checkpoint, diloco)
    if not mine.exists() and (others := _saved(checkpoint)):
        raise CheckpointError(
            f"{checkpoint} holds {', '.join(others)}, but not {mine.name}. Resume from the folder that this replica "
            "saved, with the same number of ranks."
        )
    opened = open_checkpoint(mine)
    if check_model and opened.about.get("model") != digest_tensors(held_values(diloco)):
        raise CheckpointError(
            f"The model that was loaded is not the one saved in {checkpoint}. Pass the folder that it was loaded from "
            "to DiLoCoCallback (resume_from_checkpoint=...)."
        )
    restore(diloco, opened.load("state"))


def _place(checkpoint: Path, diloco: DiLoCo) -> Path:
    """Return the folder of this rank's state."""
    suffix = f"-rank-{dist.get_rank()}-of-{dist.get_world_size()}" if is_sharded(diloco.model) else ""
    return checkpoint / "diloco" / f"replica-{diloco.transport.replica}{suffix}"


def _saved(checkpoint: Path) -> list[str]:
    """Return the names of all states saved in the folder."""
    return sorted(path.name for path in (checkpoint / "diloco").glob("replica-*"))
