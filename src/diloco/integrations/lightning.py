"""DiLoCo in Lightning's `Trainer`, as a callback.

It is not a strategy, because Lightning's own strategies (one device, or DDP) run the inside of a replica.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Unpack

from torch import Tensor

from diloco.algorithm import all_parameters
from diloco.errors import CheckpointError, ConfigurationError, from_extra
from diloco.integrations.host import names_of, refuse_unfit
from diloco.integrations.hosted_replica import DiLoCoArguments, HostedReplica, Parameters, exact_state, restore
from diloco.outer import DiLoCo
from diloco.transport import Transport

with from_extra("lightning", "DiLoCoCallback needs lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["Connect", "DiLoCoCallback"]

Connect = Callable[[], AbstractContextManager[Transport]]
"""Returns a context manager that connects to the other replicas when training starts and disconnects when it ends, such
as a `functools.partial` of `connect_replica`."""


class DiLoCoCallback(Callback):
    """Makes a Lightning `Trainer` one of several replicas.

    After every optimizer step, however many batches it accumulated, fragments are sent and merged according to the
    schedule. A step that a gradient scaler skipped counts as a step that trained nothing. Lightning's checkpoints
    contain DiLoCo's state, and ``trainer.fit(ckpt_path=...)`` resumes exactly. Figures of the rounds are logged under
    names that start with ``diloco/``.

    A replica is one process, or the processes of one ``strategy="ddp"``, with its own ``default_root_dir``. All
    replicas must start with the same weights, take the same number of optimizer steps (``max_steps``), and see
    different data (`diloco.replica_share`).

    Args:
        transport: the connection to the other replicas, or a `Connect` that makes it when training starts, or None to
            train alone. DDP requires a `Connect`, because Lightning starts the other processes first.
        parameters: the parameters that are validated, saved as the ``state_dict`` of a checkpoint, and left in the
            module at the end. With "global", which all replicas agree on, resuming is still exact, because the
            checkpoint also has the local ones (not with ``save_weights_only``).
        begin_from_checkpoint: whether ``fit`` may resume from a checkpoint without DiLoCo's state. DiLoCo then starts
            there.
        arguments: further arguments of `DiLoCo`: schedule, codec, outer_optimizer, merge, on_event and more.

    Raises:
        ConfigurationError: if something can't work; in most cases only when training starts.
    """

    def __init__(
        self,
        *,
        transport: Transport | Connect | None = None,
        parameters: Parameters = "global",
        begin_from_checkpoint: bool = False,
        **arguments: Unpack[DiLoCoArguments],
    ) -> None:
        self.transport = transport
        self.begin_from_checkpoint = begin_from_checkpoint
        self._replica = HostedReplica(parameters, arguments)
        self._loaded: Mapping[str, Any] | None = None
        self._at_end = ExitStack()

    @property
    def diloco(self) -> DiLoCo | None:
        """The `DiLoCo` of this replica; None until training starts."""
        return self._replica.diloco

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that can't work, before anything is set up."""
        if stage == "fit":
            refuse_unfit(names_of(trainer.strategy), f"A Trainer with {type(trainer.strategy).__name__}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Connect, create the `DiLoCo`, and restore its state if training resumes."""
        if self.diloco is not None:
            raise ConfigurationError(
                "This DiLoCoCallback has already been used by a fit(), and its rounds have ended. Create a new one "
                "with a new transport."
            )
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"DiLoCoCallback needs a module with one optimizer, got {len(trainer.optimizers)}, whose steps "
                "Lightning adds up. Use one optimizer, or DiLoCo in your own loop."
            )
        transport = self.transport
        if callable(transport):
            transport = self._at_end.enter_context(transport())
        diloco = self._replica.begin(pl_module, trainer.optimizers[0], transport)
        if self._loaded is not None:
            self._resume(diloco, self._loaded)
        elif trainer.global_step and not self.begin_from_checkpoint:
            raise CheckpointError(
                f"The Trainer resumes at step {trainer.global_step} from a checkpoint without DiLoCo's state. Use a "
                "checkpoint that was saved with DiLoCoCallback, or set begin_from_checkpoint=True."
            )
        self._counted = trainer.global_step
        if self._replica.parameters == "global":
            put_globals = functools.partial(_put_globals, diloco, pl_module)
            self._at_end.callback(_before_saving(pl_module, put_globals))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run `DiLoCo.step` if this batch completed an optimizer step, and log the figures."""
        steps = trainer.global_step - self._counted
        self._counted = trainer.global_step
        if steps > 1:
            raise ConfigurationError(
                f"training_step took {steps} optimizer steps with one batch, but DiLoCo may have to merge after each. "
                "Take one step per batch, or use DiLoCo in your own loop. Training stops here."
            )
        if steps:
            self._replica.step()
        pl_module.log_dict(self._replica.figures())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the parameters that are to be validated into the module."""
        self._replica.show()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the local parameters back for training."""
        self._replica.hide()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge what is in flight, leave the module with the chosen parameters, and disconnect."""
        self._replica.end()
        self._at_end.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Disconnect at once."""
        self._replica.abandon()
        self._at_end.__exit__(type(exception), exception, sys.exc_info()[2])

    def state_dict(self) -> dict[str, Any]:
        """Return the state that Lightning saves in its checkpoint for this callback."""
        if self.diloco is None:
            return dict(self._loaded or {})
        saves_globals = self._replica.training and self._replica.parameters == "global"
        state = exact_state(self.diloco, self._replica.local() if saves_globals else None)
        return state | {"replica": self.diloco.transport.replica}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state, to restore it when training starts."""
        self._loaded = state_dict or None

    def _resume(self, diloco: DiLoCo, state: Mapping[str, Any]) -> None:
        if state["replica"] != diloco.transport.replica:
            raise CheckpointError(
                f"The checkpoint belongs to replica {state['replica']}, but this is replica "
                f"{diloco.transport.replica}. Resume each replica from its own checkpoint."
            )
        restore(diloco, state)


def _put_globals(diloco: DiLoCo, module: LightningModule, state_dict: dict[str, Tensor]) -> None:
    """Replace the local parameters by the global ones in the ``state_dict`` that Lightning is about to save."""
    parameters, values = diloco.named_parameters(), diloco.named_global_params()
    agreed = {id(parameters[name]): value for name, value in values.items()}
    # hooks of some wrappers take their own prefix out of the names in a state_dict
    names = dict(module.named_parameters(remove_duplicate=False)) | dict(all_parameters(module))
    for name, parameter in names.items():
        if id(parameter) in agreed and name in state_dict:
            state_dict[name] = agreed[id(parameter)].to(parameter.device, parameter.dtype, copy=True)


def _before_saving(module: LightningModule, put: Callable[[dict[str, Tensor]], None]) -> Callable[[], None]:
    """Call ``put`` with every ``state_dict`` that Lightning saves of ``module``. Return a function that ends this.

    It wraps the module's own hook, because Lightning does not call callbacks when it saves weights only.
    """
    saving = module.on_save_checkpoint

    @functools.wraps(saving)
    def put_first(checkpoint: dict[str, Any]) -> None:
        put(checkpoint["state_dict"])
        saving(checkpoint)

    # set on the instance, because its class may have other instances
    object.__setattr__(module, "on_save_checkpoint", put_first)
    return lambda: object.__delattr__(module, "on_save_checkpoint")
