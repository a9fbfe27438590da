"""The options of the commands that load a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    from diloco.trained import Trained

__all__ = ["TrainedOptions"]


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
