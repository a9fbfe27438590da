"""One replica whose loop a framework drives: what its callbacks have in common, from the beginning of the training to
its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, get_args

import torch
from torch import Tensor, nn

from diloco.algorithm.clipping import Clipping
from diloco.algorithm.codec import Codec
from diloco.algorithm.fragments import Fragment
from diloco.algorithm.merge import MergeRule
from diloco.algorithm.outer_optimizer import OuterOptimizer
from diloco.algorithm.schedule import SyncSchedule
from diloco.errors import ConfigurationError
from diloco.events import Event
from diloco.integrations.figures import Figures
from diloco.integrations.host import StepWatch, unwrapped
from diloco.integrations.values import GlobalsInModel, Parameters, hold_values
from diloco.outer.diloco import DiLoCo
from diloco.transport.base import Transport

__all__ = ["DiLoCoArguments", "HostedReplica"]


class DiLoCoArguments(TypedDict, total=False):
    """What of `DiLoCo`'s arguments an integration passes on; its docstring tells them."""

    schedule: SyncSchedule | None
    fragments: Sequence[Fragment] | None
    outer_optimizer: OuterOptimizer | None
    merge: MergeRule | None
    codec: Codec | str
    error_feedback: bool
    global_device: torch.device | str | None
    weight: float
    clipping: Clipping | None
    on_event: Callable[[Event], None] | None


class HostedReplica:
    """A `DiLoCo` that is made when a framework begins to train, and whose values the model holds until it has ended.

    Args:
        parameters: whose values the model holds where it is evaluated and saved, and at the end.
        arguments: of `DiLoCo`.

    Attributes:
        diloco: once training has begun.
        training: whether training has begun, and has not ended.

    Raises:
        ConfigurationError: if ``parameters`` are neither global nor local.
    """

    def __init__(self, parameters: Parameters, arguments: DiLoCoArguments) -> None:
        if parameters not in get_args(Parameters):
            raise ConfigurationError(
                f"parameters={parameters!r} was given; global or local would work. Nothing was started."
            )
        self.parameters = parameters
        self.diloco: DiLoCo | None = None
        self.training = False
        self._arguments = arguments
        self._figures = Figures(arguments.get("on_event"))

    def begin(self, model: nn.Module, optimizer: Any, transport: Transport | None) -> DiLoCo:
        """Make the `DiLoCo` of what a framework has wrapped.

        Raises:
            ConfigurationError: if it can't serve the model, the optimizer or the transport.
        """
        bare, inner = unwrapped(model, optimizer, transport)
        arguments = self._arguments | {"on_event": self._figures.handle}
        self.diloco = DiLoCo(bare, inner, transport=transport, **arguments)
        self._globals = GlobalsInModel(self.diloco)
        self._watch = StepWatch(inner)
        self.training = True
        return self.diloco

    def step(self) -> None:
        """The optimizer has stepped, or a gradient scaler has skipped the step."""
        self._begun.step(self._watch.trained())

    def figures(self) -> dict[str, float]:
        """For the framework's logs; see `Figures`."""
        return self._figures.of(self._begun)

    def show(self) -> None:
        """The model takes the parameters that are to be evaluated or saved; where none is trained, nothing is done."""
        if self.training and self.parameters == "global":
            self._globals.show()

    def hide(self) -> None:
        """Training goes on with the local parameters; where none is trained, nothing is done."""
        if self.training:
            self._globals.hide()

    @property
    def shows_globals(self) -> bool:
        """Whether the model holds the global parameters in place of the local ones."""
        return self.training and self._globals.shown

    def local(self) -> dict[str, Tensor]:
        """Parameter name -> the local value, wherever it is now; not copied."""
        return self._globals.local()

    def end(self, instead: Mapping[str, Tensor] | None = None) -> None:
        """Merge what is in flight, and leave the model with the parameters that were asked for, or ``instead``."""
        self.hide()
        self._begun.drain()
        if instead is not None:
            hold_values(self._begun.model, instead)
        elif self.parameters == "global":
            self._globals.keep()
        self.abandon()

    def abandon(self) -> None:
        """Leave the model with the local parameters, and the optimizer as it was; where none is trained, nothing."""
        if self.training:
            self._globals.hide()
            self._watch.close()
            self.training = False

    @property
    def _begun(self) -> DiLoCo:
        assert self.diloco is not None, "training has begun"
        return self.diloco
