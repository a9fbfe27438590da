"""DiLoCo in Lightning's `Trainer`, as a callback: Lightning's own strategies run the inside of a replica."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from diloco.errors import CheckpointError, ConfigurationError, from_extra
from diloco.integrations.host import (
    HostedReplica,
    Parameters,
    load_state,
    of_one_job,
    refuse_unfit,
    save_state,
    saved_states,
)
from diloco.outer import DiLoCo
from diloco.transport import Transport

with from_extra("lightning", "DiLoCoCallback needs lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer


Connect = Callable[[], AbstractContextManager[Transport]]
"""Connects to the other replicas when training starts, such as a `functools.partial` of `connect_tcp`."""


class DiLoCoCallback(Callback):
    """Makes a Lightning `Trainer` one of several replicas: one process, or those of one ``strategy="ddp"``.

    After every optimizer step fragments are sent and merged according to the schedule. Lightning's checkpoints contain
    DiLoCo's state, so that ``fit(ckpt_path=...)`` resumes exactly. Figures of the rounds are logged as ``diloco/...``.

    Args:
        transport: the connection to the other replicas, or a `Connect`, which DDP requires. None: each rank is a
            replica, and DDP averages no gradients (`connect_process_group`). Lightning saves the first one's state, so
            each also saves its own, in the folder ``FILE.ckpt.replicas`` beside the file. A single rank trains alone.
        parameters: those that are validated, saved as the ``state_dict``, and left in the module at the end.
        begin_from_checkpoint: whether ``fit`` may resume from a checkpoint without DiLoCo's state.
        arguments: further arguments of `DiLoCo`.
    """

    def __init__(
        self,
        *,
        transport: Transport | Connect | None = None,
        parameters: Parameters = "global",
        begin_from_checkpoint: bool = False,
        **arguments: Any,
    ) -> None:
        self.transport, self.begin_from_checkpoint = transport, begin_from_checkpoint
        self._replica = HostedReplica(parameters, arguments)
        self._loaded: Mapping[str, Any] = {}
        self._at_end = ExitStack()

    @property
    def diloco(self) -> DiLoCo | None:  # None until training starts
        return self._replica.diloco

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_unfit(trainer.strategy)
        if self.diloco is not None or len(trainer.optimizers) != 1:
            raise ConfigurationError("A DiLoCoCallback serves one fit() of a module with one optimizer.")
        transport = self._at_end.enter_context(self.transport()) if callable(self.transport) else self.transport
        diloco = self._replica.begin(trainer.strategy.model or pl_module, trainer.optimizers[0], transport)
        if of_one_job(diloco):
            self._save_each(trainer.strategy)
        if of_one_job(diloco) and trainer.ckpt_path and saved_states(folder := _beside(trainer.ckpt_path)):
            load_state(folder, diloco, check_model=False, inner=self._replica.inner)
        elif self._loaded:
            self._replica.load_state_dict(self._loaded)
        elif trainer.global_step and not self.begin_from_checkpoint:
            raise CheckpointError("The checkpoint has no state of DiLoCoCallback. Set begin_from_checkpoint=True.")
        self._counted, saving = trainer.global_step, pl_module.on_save_checkpoint

        def put_first(checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].update(self._replica.chosen_state(pl_module))
            saving(checkpoint)

        # Lightning calls no callback when it saves weights only; on the instance, as its class may have others
        object.__setattr__(pl_module, "on_save_checkpoint", put_first)
        self._at_end.callback(object.__delattr__, pl_module, "on_save_checkpoint")

    def _save_each(self, strategy: Any) -> None:
        """Let each rank, which is a replica, save its own state whenever Lightning saves the first one's."""
        saving, removing = strategy.save_checkpoint, strategy.remove_checkpoint

        def save(checkpoint: dict[str, Any], filepath: Any, *given: Any, **more: Any) -> None:
            saving(checkpoint, filepath, *given, **more)
            if "callbacks" in checkpoint:  # not only the weights
                replica = self._replica
                save_state(_beside(filepath), replica.begun, replica.hidden, replica.inner)

        def remove(filepath: Any) -> None:
            removing(filepath)
            if strategy.is_global_zero:
                shutil.rmtree(_beside(filepath), ignore_errors=True)

        strategy.save_checkpoint, strategy.remove_checkpoint = save, remove
        self._at_end.callback(delattr, strategy, "save_checkpoint")
        self._at_end.callback(delattr, strategy, "remove_checkpoint")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        steps, self._counted = trainer.global_step - self._counted, trainer.global_step
        if steps > 1:
            raise ConfigurationError(f"training_step took {steps} optimizer steps with one batch. Take one per batch.")
        if steps:
            self._replica.step()
        pl_module.log_dict(self._replica.begun.figures())

    def on_validation_start(self, *_: Any) -> None:
        self._replica.show()

    def on_validation_end(self, *_: Any) -> None:
        self._replica.hide()

    def on_train_end(self, *_: Any) -> None:
        self._replica.end()
        self._at_end.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._replica.abandon()
        self._at_end.__exit__(type(exception), exception, sys.exc_info()[2])

    def state_dict(self) -> dict[str, Any]:
        if self.diloco is None:
            return dict(self._loaded)
        return {} if of_one_job(self.diloco) else self._replica.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict  # restored when training starts


def _beside(checkpoint: Any) -> Path:
    """Return the folder for the states of the ranks of one job, beside a checkpoint or the one that it links to."""
    if "://" in str(checkpoint):
        raise ConfigurationError(f"The replicas of one job save into folders, but the checkpoint is {checkpoint}.")
    return Path(f"{Path(checkpoint).resolve()}.replicas")
