"""What can be set about the algorithm. No torch here: `diloco train --help` stays quick.

``None`` means "derived from the algorithm or the preset"; what it became is printed at the start of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError

__all__ = [
    "AUTO_MEANS_FROM_REPLICAS",
    "CodecSettings",
    "FragmentSettings",
    "MergeSettings",
    "OuterSettings",
    "ScheduleSettings",
]

AUTO_MEANS_FROM_REPLICAS = 8  # from so many on the mean codec "auto" encodes means


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """When each fragment is sent and merged."""

    inner_steps: Annotated[int, arg(aliases=["--inner-steps"])] = 100
    """Inner optimizer steps between two synchronisations of the same fragment (H)."""
    overlap_steps: Annotated[int | None, arg(aliases=["--overlap-steps"])] = None
    """Inner steps between sending a fragment and merging its average (tau), 0 <= tau <= H; H, a whole round late, with
    the rebase merge only. Default: 1 for streaming, 0 for diloco."""
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
                'strategy "patterns" needs them and the others take none.'
            )


@dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """The outer optimizer, which moves the global parameters by the mean pseudo-gradient."""

    name: str = "nesterov"
    """nesterov: SGD with Nesterov momentum (the papers'); sgd; adam; or module:class, your own."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of your own outer optimizer, as a table, beside `learning_rate` and `momentum` where it takes them."""
    learning_rate: float | None = None
    """Outer learning rate. Default: 0.7 for diloco, 0.4 for streaming (the papers')."""
    gain: float | None = None
    """Another way to give the outer learning rate: gain * (1 - momentum). So many times equal means move the
    parameters once the momentum has built up: 4 with 0.4 and 0.9. For nesterov and sgd."""
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
    average: str = "mean"
    """mean: weighted, over all contributors; rda: direction and length averaged apart, for each tensor; senders: each
    value over those who sent one that is not zero, for topk2; or module:class, your own. All but the mean send every
    payload to every replica."""
    average_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of your own average, as a table."""
    max_norm: float | None = None
    """A contribution whose L2 norm exceeds this is scaled down to it before it is averaged. Default: no such bound."""
    median_norm_factor: float | None = None
    """A contribution whose L2 norm exceeds this multiple of the median of a round's norms is scaled down to that;
    without effect with fewer than three contributors. Default: no such bound."""
    telemetry: bool = True
    """Measure each round: norm of the mean, its cosines to the last one and to the momentum, the gain in effect, and
    the spread between replicas."""

    @property
    def whole_contributions(self) -> bool:
        """Whether averages need whole contributions, so that every payload goes to every replica."""
        return self.average != "mean" or self.max_norm is not None or self.median_norm_factor is not None

    @property
    def lasting_momentum(self) -> float | None:
        """mu; 0 for plain SGD, None for Adam, which has no gain."""
        return {"nesterov": self.momentum, "sgd": 0.0}.get(self.name)

    @property
    def lasting_gain(self) -> float | None:
        """``lr / (1 - mu)`` of resolved settings; None for Adam."""
        momentum, learning_rate = self.lasting_momentum, self.learning_rate
        return None if momentum is None or learning_rate is None else round(learning_rate / (1 - momentum), 12)


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """What becomes of the local parameters when an average arrives."""

    rule: str | None = None
    """alpha: local <- alpha * local + (1 - alpha) * global; rebase: local <- global + (local - local at sending);
    or module:class, your own. Default: alpha when `alpha` is given, else rebase for streaming and alpha for diloco."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of your own merge rule, as a table."""
    alpha: Annotated[float | None, arg(aliases=["--merge-alpha"])] = None
    """Weight of the local parameters, 0..1: 0 takes the global ones, 1 never listens. Default: 0."""


@dataclass(frozen=True, kw_only=True)
class CodecSettings:
    """What turns a pseudo-gradient into bytes and back."""

    name: Annotated[str | None, arg(aliases=["--codec"])] = None
    """float32, float16, bfloat16, int8, fp4, int2, topk2, or module:class, your own. Default: fp4 for streaming,
    float32 for diloco."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of your own codec, as a table."""
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

    def parameters(self) -> Mapping[str, Any]:
        """The codec's own, by name."""
        if self.arguments:
            return self.arguments
        return {"block_size": self.block_size} if self.name in ("int8", "fp4", "int2") else {}
