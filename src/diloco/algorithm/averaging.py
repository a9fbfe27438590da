"""What a replica gives to a round, how a round is judged, and the one mean that every replica gets from it.

Pure: `judge` and `weighted_mean` take contributions and return values, whatever brought the contributions together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from diloco.algorithm.average_rules import AverageRule
from diloco.algorithm.clipping import UNCLIPPED, Clipping, check_mean, scale_factors, vector_norm
from diloco.algorithm.codec import Codec
from diloco.algorithm.mean_encoding import PLAIN_MEAN, MeanEncoding, Residual
from diloco.algorithm.telemetry import sampled_stretches, spread, spread_terms
from diloco.algorithm.weighting import GREATEST_WEIGHT, LEAST_WEIGHT, bounded_weights
from diloco.errors import CodecError, DivergedError

__all__ = ["Contribution", "Mean", "RoundId", "Verdict", "combined", "judge", "mean_of_buffers", "weighted_mean"]

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True, order=True)
class RoundId:
    """One exchange of one fragment.

    Attributes:
        fragment: p; -1 for the gradients of a data-parallel step, -2 where that round is void and tried again, and so
            on.
        outer_step: the fragment's synchronisations before this one; the inner step for gradients.
    """

    fragment: int
    outer_step: int

    def __str__(self) -> str:
        if self.fragment < 0:
            attempt = f", attempt {-self.fragment}" if self.fragment < -1 else ""
            return f"gradients of step {self.outer_step}{attempt}"
        return f"fragment {self.fragment}, outer step {self.outer_step}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Contribution:
    """What one replica gives to one round."""

    round: RoundId  # which round
    replica: int  # m
    codec: Codec  # how ``payload`` was encoded
    numel: int  # values behind the payload
    payload: Tensor  # ``(codec.payload_bytes(numel),)`` uint8
    weight: float = 1.0  # this replica's weight in the mean; 1e-18 to 1e18
    base_weight: float = 1.0  # what a full window of this replica weighs; see `bounded_weights`
    digest: str = ""  # of the fragment's global parameters and outer state, as this replica holds them
    buffers: Tensor | None = None  # ``(n,)`` float32, the model's floating buffers, or None
    integers: Tensor | None = None  # ``(n,)`` uint8, the bytes of its integer buffers, or None
    withdrawn: str = ""  # why the sender itself does not want it averaged, or ""
    clipping: Clipping = UNCLIPPED  # how large the contributions of the round may be; the same for all replicas
    # how the contributions are averaged; None: the weighted mean. The same for all replicas.
    average_rule: AverageRule | None = None
    tensors: tuple[int, ...] = ()  # sizes of the tensors that the values are, one after the other, for ``average_rule``
    telemetry: bool = False  # whether the spread of the round's contributions is measured, where they are at hand
    # how the mean of a stretch travels in a reduce-scatter, where that applies to the round; the same for all replicas
    mean: MeanEncoding = PLAIN_MEAN
    residual: Residual | None = None  # what this replica has not sent yet of earlier means, or None

    @property
    def whole(self) -> bool:
        """Whether the average needs whole contributions, so that each goes to every replica."""
        return self.clipping.active or self.average_rule is not None

    @property
    def extra_bytes(self) -> int:
        """What travels beside the payload."""
        extras = (self.buffers, self.integers)
        return sum(extra.numel() * extra.element_size() for extra in extras if extra is not None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Mean:
    """What every replica gets from a round."""

    values: Tensor  # ``(numel,)`` float32; shared between replicas of one process, so never to be changed
    contributors: tuple[int, ...]  # replicas in the mean, ascending
    weight: float  # sum of their weights, the divisor
    buffers: Tensor | None = None  # ``(n,)`` float32 mean of the floating buffers, or None
    integers: Tensor | None = None  # ``(n,)`` uint8, the integer buffers of the first contributor, or None
    clipped: tuple[int, ...] = ()  # contributors whose values were scaled down, ascending
    # of the contributions, see `diloco.algorithm.telemetry.spread`; None where it was not measured
    spread: float | None = None
    # what this replica has not sent yet of the means that it encoded, should the round be committed
    residual: Residual | None = None


@dataclass(frozen=True)
class Verdict:
    """The decision about a round, the same wherever the same contributions are seen."""

    contributors: tuple[int, ...]  # replicas whose contributions are averaged; empty when the round is void
    reason: str = ""  # why the round is void, or who was left out; empty when all is well
    # replicas whose digest differs from the majority's; the round is void when there are any
    diverged: tuple[int, ...] = ()
    donor: int = -1  # a replica that holds what the majority holds
    # replicas whose contribution is one that no honest replica sends; ``reason`` says why
    refused: tuple[int, ...] = ()

    @property
    def void(self) -> bool:
        return not self.contributors

    def divergence(self, round_id: RoundId, digest: str) -> DivergedError:
        """What a replica whose digest differs gets; ``digest``: of what `donor` holds."""
        words = f"{round_id}: {self.reason}. The round is void for all."
        return DivergedError(words, donor=self.donor, digest=digest, round=str(round_id), replicas=self.diverged)


def _layout(contribution: Contribution) -> tuple[str, ...]:
    """Describe the sizes and types that contributions to one round must have in common."""
    held = [f"{contribution.numel} values"]
    for kind, buffers in (("floating", contribution.buffers), ("integer", contribution.integers)):
        what = "no" if buffers is None else f"{tuple(buffers.shape)} {buffers.dtype}"
        held.append(f"{what} {kind} buffers")
    return tuple(held)


def _refusal(contribution: Contribution, expected: Sequence[str], *, contents: bool) -> str:
    """Why ``contribution`` can't be averaged with those of the ``expected`` layout, or "" when it can."""
    if contribution.withdrawn:
        return contribution.withdrawn
    for held, wanted in zip(_layout(contribution), expected, strict=True):
        if held != wanted:
            return f"it holds {held} instead of {wanted}"
    for name, weight in (("weight", contribution.weight), ("base weight", contribution.base_weight)):
        if not LEAST_WEIGHT <= weight <= GREATEST_WEIGHT:
            return f"has the {name} {weight}, which is not from {LEAST_WEIGHT:g} to {GREATEST_WEIGHT:g}"
    if not contents:
        return ""
    if contribution.buffers is not None and not bool(torch.isfinite(contribution.buffers).all()):
        return "holds model buffers that are not finite"
    try:
        contribution.codec.validate(contribution.payload, contribution.numel)
    except CodecError as error:
        return str(error)
    return ""


def judge(
    contributions: Mapping[int, Contribution],
    *,
    members: Sequence[int],
    min_contributors: int,
    absent: Mapping[int, str],
    contents: bool = True,
    holders: int = 1,
) -> Verdict:
    """Decide about a round, once something is known of every member.

    Args:
        contributions: replica -> what arrived from it.
        members: the replicas of the view.
        min_contributors: fewer usable contributions than this make the round void.
        absent: replica -> why nothing arrived from it.
        contents: whether payloads and buffers are here to be checked; False where only their headers have come, and
            the rest is checked on arrival.
        holders: so many replicas at least must hold a state for it to be the majority's, as more than could lie.

    Returns:
        The verdict. A replica is diverged when its digest is not the most frequent one; on a tie the digest of the
        lowest replica counts as the majority's, on every replica alike. Sizes are decided in the same way, and a
        contribution of another size is refused.
    """
    reasons = {replica: f"replica {replica} {why}" for replica, why in absent.items()}
    if not contributions:
        return Verdict((), "; ".join(reasons[replica] for replica in sorted(reasons)) or "nobody contributed")
    ordered = sorted(contributions)
    majority = _most_frequent([contributions[replica].digest for replica in ordered])
    donor = next(replica for replica in ordered if contributions[replica].digest == majority)
    diverged = tuple(replica for replica in ordered if contributions[replica].digest != majority)
    if len(ordered) - len(diverged) < min(holders, len(ordered)):
        names = ", ".join(map(str, ordered))
        reason = f"global parameters or outer state of replicas {names} differ, and no {holders} of them hold the same"
        return Verdict((), reason)
    if diverged:
        names = ", ".join(map(str, diverged))
        reason = f"global parameters or outer state of replica {names} differ from those of replica {donor}"
        return Verdict((), reason, diverged, donor)
    expected = _most_frequent([_layout(contributions[replica]) for replica in ordered])
    for replica in ordered:
        if why := _refusal(contributions[replica], expected, contents=contents):
            reasons[replica] = f"the contribution of replica {replica} was refused: {why}"
    usable = tuple(replica for replica in ordered if replica not in reasons)
    refused = tuple(each for each in ordered if each in reasons and not contributions[each].withdrawn)
    reason = "; ".join(reasons[replica] for replica in sorted(reasons))
    if len(usable) < min_contributors:
        few = f"{len(usable)} of {len(members)} contributions, {min_contributors} needed: {reason}"
        return Verdict((), few, refused=refused)
    return Verdict(usable, reason, donor=donor, refused=refused)


def _most_frequent(values: Sequence[Value]) -> Value:
    counts = Counter(values)
    return max(counts, key=lambda value: counts[value])  # the first of equals: Counter keeps the order


def weighted_mean(contributions: Sequence[Contribution], clipping: Clipping = UNCLIPPED) -> Mean:
    """``sum_m w_m f_m decode(payload_m) / sum_m w_m`` in float32, in ascending order of replicas.

    Quantised addends and one float32 sum (Streaming DiLoCo, section 2.4): partial sums are never quantised again, and
    the divisor is the weight that arrived. f_m is 1, but for contributions that ``clipping`` scales down; model buffers
    are never scaled. w_m are the `bounded_weights`. Contributions with an ``average_rule`` are combined by it instead,
    and only the buffers are a weighted mean.

    Raises:
        CodecError: the mean is not finite, or too large; it names the replica that contributed most to it.
    """
    ordered = sorted(contributions, key=lambda contribution: contribution.replica)
    first = ordered[0]
    weights = bounded_weights(
        {each.replica: each.weight for each in ordered}, {each.replica: each.base_weight for each in ordered}
    )
    total = sum(weights.values())
    factors: dict[int, float] = {}
    if clipping.active:
        norms = {each.replica: vector_norm(each.codec.decode(each.payload, each.numel)) for each in ordered}
        factors = scale_factors(clipping, norms)
    scaled = {replica: weight * factors.get(replica, 1.0) for replica, weight in weights.items()}
    if first.average_rule is None:
        values = torch.zeros(first.numel, dtype=torch.float32, device=first.payload.device)
        for each in ordered:
            each.codec.accumulate(each.payload, values, scaled[each.replica])
        values.div_(total)
    else:
        decoded = ((each.replica, each.codec.decode(each.payload, each.numel)) for each in ordered)
        values = combined(first.average_rule, decoded, weights, factors, first.tensors)
    check_mean(values, {each.replica: (each.codec, each.payload, scaled[each.replica]) for each in ordered})
    held = {each.replica: each.buffers for each in ordered if each.buffers is not None}
    return Mean(
        values=values,
        contributors=tuple(contribution.replica for contribution in ordered),
        weight=total,
        buffers=mean_of_buffers(held, weights) if held else None,
        integers=first.integers,
        clipped=tuple(factors),
        spread=_spread(ordered, weights) if first.telemetry else None,
    )


def mean_of_buffers(buffers: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
    """The weighted mean of ``(n,)`` float32 buffers, contributors ascending; `CodecError` if it is not finite."""
    mean = torch.zeros_like(next(iter(buffers.values())))
    for replica, values in buffers.items():
        mean.add_(values * weights[replica])
    mean.div_(sum(weights[replica] for replica in buffers))
    if not bool(torch.isfinite(mean).all()):
        raise CodecError("the mean of the model's buffers is not finite")
    return mean


def combined(
    rule: AverageRule,
    decoded: Iterable[tuple[int, Tensor]],
    weights: Mapping[int, float],
    factors: Mapping[int, float],
    tensors: Sequence[int],
) -> Tensor:
    """What ``rule`` makes of contributions.

    Args:
        decoded: replica and values, ``(numel,)`` float32, ascending; the values may be overwritten.
        weights: replica -> weight.
        factors: replica -> by what its values are multiplied, where that is not 1.
        tensors: sizes of the tensors that the values are.
    """
    return rule.combine(
        ((weights[replica], values.mul_(factors.get(replica, 1.0))) for replica, values in decoded), tensors
    )


def _spread(contributions: Sequence[Contribution], weights: Mapping[int, float]) -> float | None:
    codec, numel = contributions[0].codec, contributions[0].numel
    payloads = [(weights[each.replica], each.payload) for each in contributions]
    terms = spread_terms(codec, payloads, numel, sampled_stretches(numel, codec.block_size))
    return spread(*terms, sum(weights.values()))
