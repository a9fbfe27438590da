"""DiLoCo in a Hugging Face Accelerate loop, around the model and optimizer that ``accelerator.prepare`` returned."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from diloco.errors import from_extra
from diloco.integrations.host import (
    StepWatch,
    hold,
    load_state,
    refuse_unfit,
    replace_method,
    replica_of_each_rank,
    save_state,
    unwrapped,
)
from diloco.outer import DiLoCo
from diloco.transport import Transport

with from_extra("hf", "AcceleratedDiLoCo needs accelerate"):
    from accelerate import Accelerator


class AcceleratedDiLoCo(DiLoCo):
    """`DiLoCo` for a model and an optimizer that an `Accelerator` prepared.

    `step` may be called after every micro-batch. Under ``accelerator.accumulate`` it counts only the calls after which
    gradients are synchronised, one per optimizer step. A step that the gradient scaler of ``mixed_precision="fp16"``
    skipped counts as a step that trained nothing.

    ``accelerator.save_state`` and ``load_state`` also save and load DiLoCo's state, in files next to theirs. The model
    that they save has the local parameters; for the global ones use ``with diloco.global_model() as model``. After the
    ``with`` block the model has the global parameters, which are the same on all replicas.
    ``accelerator.log(diloco.figures())`` logs the rounds.

    Args:
        accelerator: the accelerator that prepared the model and the optimizer.
        model: the prepared model.
        optimizer: the prepared optimizer.
        transport: the connection to the other replicas. None: each rank of torch.distributed is a replica, and
            DistributedDataParallel averages no gradients (`connect_process_group`). A single rank, or the ranks of a
            sharded model (FSDP2), train alone.
        arguments: further arguments of `DiLoCo`.

    Raises:
        ConfigurationError: if DiLoCo can't work with the given objects, such as a DeepSpeed accelerator.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        transport: Transport | None = None,
        **arguments: Any,
    ) -> None:
        refuse_unfit(accelerator.distributed_type.name)
        bare, inner = unwrapped(model, optimizer)
        self._connected, self._hooks = ExitStack(), ExitStack()
        if transport is None:
            transport = self._connected.enter_context(replica_of_each_rank(model))
        try:
            super().__init__(bare, inner, transport=transport, **arguments)
        except BaseException:
            self._connected.__exit__(*sys.exc_info())
            raise
        self._accelerator, self._inner = accelerator, inner
        self._watch = StepWatch(inner)
        self._hooks.callback(self._watch.close)
        self._hooks.callback(accelerator.register_save_state_pre_hook(self._save).remove)
        self._hooks.callback(accelerator.register_load_state_pre_hook(self._note_folder).remove)
        replace_method(self._hooks, accelerator, "load_state", self._load)

    def begin(self, trained: float = 1.0) -> None:
        """Run the first half of `step`; do nothing while gradients are accumulated."""
        # a loop that accumulates by itself takes no optimizer step, but neither does a scaler that skips one
        stepped = self._watch.taken or self._accelerator.scaler is not None
        self._counts = self._accelerator.sync_gradients and stepped
        if self._counts:
            super().begin(trained * self._watch.trained())

    def finish(self) -> None:
        """Run the second half of `step`; do nothing while gradients are accumulated."""
        if self._counts:
            super().finish()

    def close(self) -> None:
        """Remove all hooks from the optimizer and the accelerator. Leaving a ``with`` block does the same."""
        self._hooks.close()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            super().__exit__(kind, *error)
            if kind is None:
                hold(self, self.global_values())
        finally:  # also if a round in flight has failed
            self.close()
            self._connected.__exit__(*sys.exc_info())

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        save_state(Path(folder), self, inner=self._inner)

    def _note_folder(self, models: list[nn.Module], folder: str) -> None:
        self._folder = Path(folder)

    def _load(self, loading: Callable[..., None], *given: Any, **more: Any) -> None:
        self._require_nothing_in_flight("loading a state")
        loading(*given, **more)  # the model and the optimizer, which may be those of another rank that is a replica
        load_state(self._folder, self, check_model=False, inner=self._inner)
