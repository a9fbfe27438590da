"""DiLoCo in a loop of Hugging Face Accelerate: around what ``accelerator.prepare`` gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from torch import nn

from diloco.errors import from_extra
from diloco.integrations.host import StepWatch, refuse_unfit, unwrapped
from diloco.integrations.hosted_replica import DiLoCoArguments, Figures, load_state, save_state
from diloco.outer.diloco import DiLoCo
from diloco.transport.base import Transport

with from_extra("hf", "AcceleratedDiLoCo needs accelerate"):
    from accelerate import Accelerator

__all__ = ["AcceleratedDiLoCo"]


class AcceleratedDiLoCo(DiLoCo):
    """`DiLoCo` for a model and an optimizer that an `Accelerator` prepared.

    `step` may be called after every micro-batch: under ``accelerator.accumulate`` it counts only where gradients were
    synchronised, once for each step of the optimizer. A step that the gradient scaler of ``mixed_precision="fp16"``
    skipped counts as one that trained nothing.

    ``accelerator.save_state`` and ``load_state`` save and load its state, too, in files beside theirs. The model that
    they save has the local parameters; for the global ones use ``with diloco.global_model() as model``.

    Args:
        accelerator: that prepared both.
        model: as prepared.
        optimizer: as prepared.
        transport: this replica's way to the others; None: alone.
        arguments: of `DiLoCo`.

    Raises:
        ConfigurationError: for what can't work, such as DeepSpeed.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        transport: Transport | None = None,
        **arguments: Unpack[DiLoCoArguments],
    ) -> None:
        kind = accelerator.distributed_type.name
        refuse_unfit([kind], f"an Accelerator for {kind}")
        bare, inner = unwrapped(model, optimizer, transport)
        self.figures = Figures(arguments.get("on_event"))
        super().__init__(bare, inner, transport=transport, **(arguments | {"on_event": self.figures.handle}))
        self._accelerator = accelerator
        self._watch = StepWatch(inner)
        self._hooks = (
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        )

    def begin(self, trained: float = 1.0) -> None:
        """The first half of `step`; does nothing while gradients are accumulated."""
        # a loop that accumulates by itself takes no step; a scaler may have skipped one
        stepped = self._watch.taken or self._accelerator.scaler is not None
        if self._accelerator.sync_gradients and stepped:
            super().begin(trained * self._watch.trained())

    def finish(self) -> None:
        """The second half of `step`; does nothing while gradients are accumulated."""
        if self._accelerator.sync_gradients:
            super().finish()

    def logs(self) -> dict[str, float]:
        """Figures of the rounds so far, for ``accelerator.log``."""
        return self.figures.of(self)

    def close(self) -> None:
        """Leave optimizer and accelerator as they were; leaving a ``with`` does the same."""
        self._watch.close()
        for hook in self._hooks:
            hook.remove()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        super().__exit__(kind, *error)
        self.close()

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        save_state(Path(folder), self)

    def _load(self, models: list[nn.Module], folder: str) -> None:
        load_state(Path(folder), self, check_model=False)
