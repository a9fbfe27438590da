"""The options of the commands that load a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.devices import check_device

if TYPE_CHECKING:
    from diloco.trained import Trained


@dataclass(frozen=True, kw_only=True)
class TrainedOptions:
    """Which trained model to load."""

    path: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """Run folder (its latest checkpoint), checkpoint, or transformers folder (Llama, Qwen3, Arcee, Apertus)."""
    model: Annotated[str | None, arg(metavar="MODULE:FUNCTION", help_behavior_hint="")] = None
    """For a run with a model of your own: the function that builds it, as in training."""
    checkpoint: Annotated[int | None, arg(metavar="STEP", help_behavior_hint="")] = None
    """Inner step of the checkpoint to load. Default: the latest."""
    replica: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Use the local parameters of this replica. Default: the global parameters."""

    def load(self, device: str = "cpu", *, dequantize: bool = False) -> Trained:
        """Load it, as `diloco.trained.load_trained` does."""
        from diloco.trained import load_trained

        return load_trained(
            self.path, device, step=self.checkpoint, replica=self.replica, source=self.model, dequantize=dequantize
        )


@dataclass(frozen=True, kw_only=True)
class AppliedOptions(TrainedOptions):
    """Which trained model to load, and how to apply it to text."""

    context: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Maximum context of the model in tokens. Default: as in training."""
    device: Annotated[str, arg(metavar="TEXT")] = "auto"
    """cpu, cuda, cuda:N, mps, or auto."""
    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print one JSON object at the end."""

    def __post_init__(self) -> None:
        check_device("--device", self.device)
