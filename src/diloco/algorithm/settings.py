"""What can be set about the algorithm. No torch here: `diloco train --help` stays quick.

``None`` means "derived from the algorithm or the preset"; what it became is printed at the start of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError

__all__ = ["CodecSettings", "FragmentSettings", "MergeSettings", "OuterSettings", "ScheduleSettings"]


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """When each fragment is sent and merged."""

    inner_steps: Annotated[int, arg(aliases=["--inner-steps"])] = 100
    """Inner optimizer steps between two synchronisations of the same fragment (H)."""
    overlap_steps: Annotated[int | None, arg(aliases=["--overlap-steps"])] = None
    """Inner steps between sending a fragment and merging its average (tau), 0 <= tau < H. Default: 1 for streaming,
    0 for diloco."""
    offsets: tuple[int, ...] | None = None
    """Step at which each fragment's cycle begins (t_p), 0 <= t_p < H. Default: spread evenly."""


@dataclass(frozen=True, kw_only=True)
class FragmentSettings:
    """How the parameters are divided into fragments that travel together."""

    num_fragments: Annotated[int | None, arg(aliases=["--fragments"])] = None
    """Number of fragments (P). Default: 1 for diloco; for streaming one per three layers and one for the embeddings."""
    strategy: Literal["strided", "sequential", "balanced", "patterns"] = "strided"
    """strided or sequential: blocks of whole layers, plus one fragment for everything that is in no layer;
    balanced: parameters packed into fragments of nearly equal size; patterns: as listed in `patterns`.
    One fragment is the whole model under every strategy."""
    patterns: tuple[tuple[str, ...], ...] = ()
    """For strategy "patterns": for each fragment, the shell-style patterns of the parameter names it holds."""

    def __post_init__(self) -> None:
        if (self.strategy == "patterns") != bool(self.patterns):
            raise ConfigurationError(
                f"fragments.strategy={self.strategy!r} came with {len(self.patterns)} lists in fragments.patterns; "
                'strategy "patterns" needs them and the others take none. Nothing was started.'
            )


@dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """The outer optimizer, which moves the global parameters by the mean pseudo-gradient."""

    name: Literal["nesterov", "sgd", "adam"] = "nesterov"
    """SGD with Nesterov momentum (the papers'), plain SGD, or Adam."""
    learning_rate: float | None = None
    """Outer learning rate. Default: 0.7 for diloco, 0.4 for streaming (the papers')."""
    momentum: float = 0.9
    """Nesterov momentum (mu)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam only."""
    epsilon: float = 0.1
    """Adam only; the DiLoCo paper found that it needs 0.1."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the outer learning rate falls over the run."""
    learning_rate_final_ratio: float = 0.0
    """What the schedule ends at, as a fraction of the outer learning rate."""
    momentum_warmup_outer_steps: int = 0
    """Outer steps over which the momentum rises linearly from 0."""
    max_norm: float | None = None
    """A contribution whose L2 norm exceeds this is scaled down to it before it is averaged. Default: no such bound."""
    median_norm_factor: float | None = None
    """A contribution whose L2 norm exceeds this multiple of the median of a round's norms is scaled down to that;
    without effect with fewer than three contributors. Default: no such bound."""


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """What becomes of the local parameters when an average arrives."""

    rule: Literal["alpha", "rebase"] | None = None
    """alpha: local <- alpha * local + (1 - alpha) * global; rebase: local <- global + (local - local at sending).
    Default: alpha when `alpha` is given, else rebase for streaming and alpha for diloco."""
    alpha: Annotated[float | None, arg(aliases=["--merge-alpha"])] = None
    """Weight of the local parameters, 0..1: 0 takes the global ones, 1 never listens. Default: 0."""


@dataclass(frozen=True, kw_only=True)
class CodecSettings:
    """What turns a pseudo-gradient into bytes and back."""

    name: Annotated[str | None, arg(aliases=["--codec"])] = None
    """float32, float16, bfloat16, int8, fp4, int2 or topk2. Default: fp4 for streaming, float32 for diloco."""
    block_size: int = 256
    """Values that share one scale (int8, fp4, int2)."""
    error_feedback: bool = False
    """Keep what the codec lost and add it to the next pseudo-gradient; 4 bytes per parameter more."""
    error_feedback_decay: float = 1.0
    """What is left, after each round, of what still waits to be sent: 1 all of it; SparseLoCo has 0.95."""

    @property
    def kept_loss(self) -> float:
        """`DiLoCo`'s ``error_feedback``."""
        return self.error_feedback_decay if self.error_feedback else 0.0

    def arguments(self) -> Mapping[str, int]:
        """The codec's own parameters, by name."""
        return {"block_size": self.block_size} if self.name in ("int8", "fp4", "int2") else {}
