"""DiLoCo in Lightning's `Trainer`: a callback.

It is not a strategy, because what happens inside a replica is left to Lightning's own: one device, or DDP.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Unpack

from torch import Tensor

from diloco.errors import CheckpointError, ConfigurationError, from_extra
from diloco.integrations.host import names_of, refuse_unfit
from diloco.integrations.hosted_replica import DiLoCoArguments, HostedReplica, Parameters, exact_state, restore
from diloco.outer.diloco import DiLoCo
from diloco.transport.base import Transport

with from_extra("lightning", "DiLoCoCallback needs lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["Connect", "DiLoCoCallback"]

Connect = Callable[[], AbstractContextManager[Transport]]
"""Connects to the other replicas when training begins, and disconnects at its end, such as a `functools.partial` of
`connect_replica`."""


class DiLoCoCallback(Callback):
    """Makes a Lightning `Trainer` one replica among others.

    After every optimizer step, however many batches it accumulated, fragments are sent and merged as the schedule says;
    a step that a gradient scaler skipped counts as one that trained nothing. DiLoCo's state is in Lightning's
    checkpoints, and ``trainer.fit(ckpt_path=...)`` resumes exactly. Figures of the rounds are logged under names that
    begin with ``diloco/``.

    Every replica is a process, or the processes of one ``strategy="ddp"``, with its own ``default_root_dir``. All must
    begin with the same weights, take the same number of optimizer steps (``max_steps``), and see different data
    (`diloco.replica_share`).

    Args:
        transport: this replica's way to the others, or how to connect to them when training begins (with DDP it must be
            this, since Lightning starts the other processes first); None: alone.
        parameters: whose values are validated, saved as the ``state_dict`` of a checkpoint, and left in the module at
            the end. global: those that all replicas agree on; resuming is exact all the same, since the local ones are
            in the checkpoint, too (not with ``save_weights_only``).
        begin_from_checkpoint: whether ``fit`` may resume from a checkpoint without DiLoCo, which then begins there.
        arguments: of `DiLoCo`: schedule, codec, outer_optimizer, merge, on_event and more.

    Attributes:
        diloco: once training has begun.

    Raises:
        ConfigurationError: for what can't work; most of it when training begins.
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
        """Of this replica, once training has begun."""
        return self._replica.diloco

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what can't work before anything is set up for it."""
        if stage == "fit":
            refuse_unfit(names_of(trainer.strategy), f"a Trainer with {type(trainer.strategy).__name__}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Connect, and make the `DiLoCo`, at its beginning or where a checkpoint was saved."""
        if self.diloco is not None:
            raise ConfigurationError(
                "DiLoCoCallback was given to a second fit(), but its rounds are over. Make a new one with a new "
                "transport."
            )
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"DiLoCoCallback was given to a module of {len(trainer.optimizers)} optimizers, whose steps Lightning "
                "adds up. Use one optimizer, or DiLoCo around a loop of your own."
            )
        transport = self.transport
        if callable(transport):
            transport = self._at_end.enter_context(transport())
        diloco = self._replica.begin(pl_module, trainer.optimizers[0], transport)
        if self._loaded is not None:
            self._resume(diloco, self._loaded)
        elif trainer.global_step and not self.begin_from_checkpoint:
            raise CheckpointError(
                f"the Trainer resumes at step {trainer.global_step} from a checkpoint without DiLoCo's state. Use one "
                "that was saved with DiLoCoCallback, or begin_from_checkpoint=True."
            )
        self._counted = trainer.global_step
        if self._replica.parameters == "global":
            put_globals = functools.partial(_put_globals, diloco, pl_module)
            self._at_end.callback(_before_saving(pl_module, put_globals))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Where this batch completed an optimizer step, it is counted."""
        steps = trainer.global_step - self._counted
        self._counted = trainer.global_step
        if steps > 1:
            raise ConfigurationError(
                f"training_step took {steps} steps of the optimizer with one batch, but DiLoCo may have to merge after "
                "each. Take one step a batch, or use DiLoCo around a loop of your own. Training stops here."
            )
        if steps:
            self._replica.step()
        pl_module.log_dict(self._replica.figures())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module takes the parameters that are to be validated."""
        self._replica.show()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on with the local parameters."""
        self._replica.hide()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge what is in flight, leave the module with the parameters that were asked for, and disconnect."""
        self._replica.end()
        self._at_end.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Disconnect at once."""
        self._replica.abandon()
        self._at_end.__exit__(type(exception), exception, sys.exc_info()[2])

    def state_dict(self) -> dict[str, Any]:
        """What Lightning keeps of this callback in a checkpoint."""
        if self.diloco is None:
            return dict(self._loaded or {})
        saves_globals = self._replica.training and self._replica.parameters == "global"
        state = exact_state(self.diloco, self._replica.local() if saves_globals else None)
        return state | {"replica": self.diloco.transport.replica}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, when training begins."""
        self._loaded = state_dict or None

    def _resume(self, diloco: DiLoCo, state: Mapping[str, Any]) -> None:
        if state["replica"] != diloco.transport.replica:
            raise CheckpointError(
                f"the checkpoint is of replica {state['replica']}, but this is replica {diloco.transport.replica}. "
                "Resume each replica from its own."
            )
        restore(diloco, state)


def _put_globals(diloco: DiLoCo, module: LightningModule, state_dict: dict[str, Tensor]) -> None:
    """Replace the parameters in what Lightning is about to save of ``module``."""
    values = {id(module.get_parameter(name)): v for name, v in diloco.outer_loop.named_global_params().items()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in values and name in state_dict:
            state_dict[name] = values[id(parameter)].to(parameter.device, parameter.dtype, copy=True)


def _before_saving(module: LightningModule, put: Callable[[dict[str, Tensor]], None]) -> Callable[[], None]:
    """Call ``put`` with every ``state_dict`` that Lightning saves of ``module``, until what is returned is called.

    In the module's own hook, since Lightning does not ask callbacks where it saves weights only.
    """
    saving = module.on_save_checkpoint

    @functools.wraps(saving)
    def put_first(checkpoint: dict[str, Any]) -> None:
        put(checkpoint["state_dict"])
        saving(checkpoint)

    # as an attribute of the object: its class may have others
    object.__setattr__(module, "on_save_checkpoint", put_first)
    return lambda: object.__delattr__(module, "on_save_checkpoint")
