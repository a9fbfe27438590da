"""DiLoCo in Lightning's `Trainer`, as a callback: Lightning's own strategies run the inside of a replica."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from diloco.errors import ConfigurationError, from_extra
from diloco.integrations.host import HostedReplica, Parameters, refuse_unfit, replace_method, save_state
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
        arguments: further arguments of `DiLoCo`.
    """

    def __init__(
        self,
        *,
        transport: Transport | Connect | None = None,
        parameters: Parameters = "global",
        **arguments: Any,
    ) -> None:
        self.transport = transport
        self._replica = HostedReplica(parameters, arguments)

    @property
    def diloco(self) -> DiLoCo | None:  # None until training starts
        return self._replica.diloco

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_unfit(trainer.strategy)
        if self.diloco is not None or len(trainer.optimizers) != 1:
            raise ConfigurationError("A DiLoCoCallback serves one fit() of a module with one optimizer.")
        model, goes_on = trainer.strategy.model or pl_module, bool(trainer.global_step)
        self._replica.begin(model, trainer.optimizers[0], self.transport, goes_on=goes_on)
        self._counted = trainer.global_step
        if trainer.global_step:
            self._replica.resume(self._replica.beside(trainer.ckpt_path))
        # Lightning calls no callback when it saves only weights, or deletes
        replace_method(self._replica.at_end, trainer, "save_checkpoint", self._save)
        replace_method(self._replica.at_end, trainer.strategy, "remove_checkpoint", self._remove)

    def _save(self, saving: Any, path: Any, weights_only: bool | None = None, *given: Any, **more: Any) -> None:
        with self._replica.shown():
            saving(path, weights_only, *given, **more)
            if not weights_only and (folder := self._replica.beside(path)):
                save_state(folder, self._replica.begun, self._replica.hidden, self._replica.inner)

    def _remove(self, removing: Any, path: Any) -> None:
        removing(path)
        if folder := self._replica.beside(path):
            shutil.rmtree(folder, ignore_errors=True)

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

    def on_exception(self, *_: Any) -> None:
        self._replica.abandon()

    def state_dict(self) -> dict[str, Any]:
        return self._replica.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._replica.load_state_dict(state_dict)
