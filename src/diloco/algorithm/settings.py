"""The settings of the algorithm. This module imports no torch, so that `diloco train --help` is quick.

``None`` means that the value is derived from the algorithm or the preset; each run prints the derived values when it
starts.
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

AUTO_MEANS_FROM_REPLICAS = 8  # the least number of replicas for which the mean codec "auto" encodes means


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Settings of when each fragment is sent and merged."""

    inner_steps: Annotated[int, arg(aliases=["--inner-steps"])] = 100
    """Inner optimizer steps between two synchronisations of the same fragment (H)."""
    overlap_steps: Annotated[int | None, arg(aliases=["--overlap-steps"])] = None
    """Inner steps between sending a fragment and merging its average (tau), 0 <= tau <= H. tau = H merges a whole round
    late and needs the rebase merge. Default: 1 for streaming, 0 for diloco."""
    offsets: tuple[int, ...] | None = None
    """Step at which each fragment's cycle begins (t_p), 0 <= t_p < H. Default: spread evenly."""


@dataclass(frozen=True, kw_only=True)
class FragmentSettings:
    """Settings of how the parameters are divided into fragments that are sent together."""

    num_fragments: Annotated[int | None, arg(aliases=["--fragments"])] = None
    """Number of fragments (P). Default: 1 for diloco; for streaming one per three layers and one for the embeddings."""
    strategy: Literal["strided", "sequential", "balanced", "patterns"] = "strided"
    """strided or sequential: blocks of whole layers, plus one fragment for all parameters outside the layers;
    balanced: parameters packed into fragments of nearly equal size; patterns: as listed in `patterns`.
    A single fragment holds the whole model under every strategy."""
    patterns: tuple[tuple[str, ...], ...] = ()
    """For strategy "patterns": the shell-style patterns of the parameter names of each fragment."""

    def __post_init__(self) -> None:
        if (self.strategy == "patterns") != bool(self.patterns):
            raise ConfigurationError(
                f'fragments.patterns must be set if, and only if, fragments.strategy is "patterns"; got '
                f"fragments.strategy={self.strategy!r} with {len(self.patterns)} lists of patterns."
            )


@dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """Settings of the outer optimizer, which updates the global parameters with the mean pseudo-gradient."""

    name: str = "nesterov"
    """nesterov: SGD with Nesterov momentum (the papers'); sgd; adam; or module:class for your own."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of your own outer optimizer, as a table. It also gets `learning_rate` and `momentum` if it has them."""
    learning_rate: float | None = None
    """Outer learning rate. Default: 0.7 for diloco, 0.4 for streaming (the papers')."""
    gain: float | None = None
    """An alternative to the outer learning rate, which is then gain * (1 - momentum). Once the momentum has built up,
    equal means move the parameters by gain times each mean: 4 for 0.4 and 0.9. For nesterov and sgd."""
    momentum: float = 0.9
    """Nesterov momentum (mu)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of adam's two moments."""
    epsilon: float = 0.1
    """Epsilon of adam; the DiLoCo paper found that it needs 0.1."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the outer learning rate decays over the run."""
    learning_rate_final_ratio: float = 0.0
    """Final value of the schedule, as a fraction of the outer learning rate."""
    momentum_warmup_outer_steps: int = 0
    """Outer steps over which the momentum rises linearly from 0."""
    average: str = "mean"
    """mean: the weighted mean of all contributors; senders: each value averaged over the replicas that sent a nonzero
    value, for topk2; or module:class for your own. All rules except mean send every payload to every replica."""
    average_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of your own average, as a table."""
    max_norm: float | None = None
    """A contribution whose L2 norm exceeds this is scaled down to it before averaging. Default: no bound."""
    telemetry: bool = True
    """Measure each round: the norm of the mean, its cosines with the last mean and the momentum, the effective gain,
    and the spread between replicas."""

    @property
    def whole_contributions(self) -> bool:
        """Whether averages need whole contributions, so that every payload is sent to every replica."""
        return self.average != "mean" or self.max_norm is not None

    @property
    def lasting_momentum(self) -> float | None:
        """The momentum mu; 0 for plain SGD, None for Adam, which has no gain."""
        return {"nesterov": self.momentum, "sgd": 0.0}.get(self.name)

    @property
    def lasting_gain(self) -> float | None:
        """The gain ``lr / (1 - mu)`` of resolved settings; None for Adam."""
        momentum, learning_rate = self.lasting_momentum, self.learning_rate
        return None if momentum is None or learning_rate is None else round(learning_rate / (1 - momentum), 12)


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """Settings of how an average is merged into the local parameters."""

    rule: str | None = None
    """alpha: local <- alpha * local + (1 - alpha) * global; rebase: local <- global + (local - local when sent);
    or module:class for your own. Default: alpha if `alpha` is given, else rebase for streaming and alpha for diloco."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of your own merge rule, as a table."""
    alpha: Annotated[float | None, arg(aliases=["--merge-alpha"])] = None
    """Weight of the local parameters, 0..1: 0 adopts the global ones, 1 ignores them. Default: 0."""


@dataclass(frozen=True, kw_only=True)
class CodecSettings:
    """Settings of the codec, which encodes pseudo-gradients as bytes."""

    name: Annotated[str | None, arg(aliases=["--codec"])] = None
    """float32, float16, bfloat16, int8, fp4, topk2, or module:class for your own. Default: fp4 for streaming,
    float32 for diloco."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of your own codec, as a table."""
    block_size: int = 256
    """Values that share one scale (int8, fp4)."""
    error_feedback: bool = False
    """Add the quantisation error to the next pseudo-gradient. Costs 4 bytes per parameter."""
    error_feedback_decay: float = 1.0
    """Fraction of the quantisation error that each round keeps: 1 keeps all of it; SparseLoCo uses 0.95."""

    @property
    def kept_loss(self) -> float:
        """The value of `DiLoCo`'s ``error_feedback``."""
        return self.error_feedback_decay if self.error_feedback else 0.0
