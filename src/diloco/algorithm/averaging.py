"""What a replica gives to a round, how a round is judged, and the one mean that every replica gets from it.

Pure: `judge` and `weighted_mean` take contributions and return values, whatever brought the contributions together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from diloco.algorithm.clipping import UNCLIPPED, Clipping, scale_factors, vector_norm
from diloco.algorithm.codec import Codec
from diloco.errors import CodecError

__all__ = ["Contribution", "Mean", "RoundId", "Verdict", "judge", "weighted_mean"]

LEAST_WEIGHT, GREATEST_WEIGHT = 1e-18, 1e18
"""Weights multiply values in float32: far beyond these, they would become 0 or infinite there."""

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True, order=True)
class RoundId:
    """One exchange of one fragment.

    Attributes:
        fragment: p; -1 for the gradients of a data-parallel step.
        outer_step: the fragment's synchronisations before this one; the inner step for gradients.
    """

    fragment: int
    outer_step: int

    def __str__(self) -> str:
        if self.fragment < 0:
            return f"gradients of step {self.outer_step}"
        return f"fragment {self.fragment}, outer step {self.outer_step}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Contribution:
    """What one replica gives to one round.

    Attributes:
        round: which round.
        replica: m.
        codec: how ``payload`` was encoded.
        numel: values behind the payload.
        payload: ``(codec.payload_bytes(numel),)`` uint8.
        weight: this replica's weight in the mean; 1e-18 to 1e18.
        digest: of the fragment's global parameters and outer state, as this replica holds them.
        buffers: ``(n,)`` float32, the model's floating buffers, or None.
        integers: ``(n,)`` uint8, the bytes of its integer buffers, or None.
        withdrawn: why the sender itself does not want it averaged, or "".
        clipping: how large the contributions of the round may be; the same for all replicas.
    """

    round: RoundId
    replica: int
    codec: Codec
    numel: int
    payload: Tensor
    weight: float = 1.0
    digest: str = ""
    buffers: Tensor | None = None
    integers: Tensor | None = None
    withdrawn: str = ""
    clipping: Clipping = UNCLIPPED

    @property
    def extra_bytes(self) -> int:
        """What travels beside the payload."""
        extras = (self.buffers, self.integers)
        return sum(extra.numel() * extra.element_size() for extra in extras if extra is not None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Mean:
    """What every replica gets from a round.

    Attributes:
        values: ``(numel,)`` float32; shared between replicas of one process, so never to be changed.
        contributors: replicas in the mean, ascending.
        weight: sum of their weights, the divisor.
        buffers: ``(n,)`` float32 mean of the floating buffers, or None.
        integers: ``(n,)`` uint8, the integer buffers of the first contributor, or None.
        clipped: contributors whose values were scaled down, ascending.
    """

    values: Tensor
    contributors: tuple[int, ...]
    weight: float
    buffers: Tensor | None = None
    integers: Tensor | None = None
    clipped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The decision about a round, the same wherever the same contributions are seen.

    Attributes:
        contributors: replicas whose contributions are averaged; empty when the round is void.
        reason: why the round is void, or who was left out; empty when all is well.
        diverged: replicas whose digest differs from the majority's; the round is void when there are any.
        donor: a replica that holds what the majority holds.
    """

    contributors: tuple[int, ...]
    reason: str = ""
    diverged: tuple[int, ...] = ()
    donor: int = -1

    @property
    def void(self) -> bool:
        return not self.contributors


class _Layout(NamedTuple):
    """How much a contribution holds."""

    numel: int
    buffers: str
    integers: str

    @classmethod
    def of(cls, contribution: Contribution) -> _Layout:
        return cls(contribution.numel, _describe(contribution.buffers), _describe(contribution.integers))


def _describe(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def _refusal(contribution: Contribution, expected: _Layout, *, contents: bool) -> str:
    """Why ``contribution`` can't be averaged with those of the ``expected`` layout, or "" when it can."""
    if contribution.withdrawn:
        return contribution.withdrawn
    layout = _Layout.of(contribution)
    if layout.numel != expected.numel:
        return f"holds {layout.numel} values instead of {expected.numel}"
    if layout.buffers != expected.buffers:
        return f"holds floating buffers of {layout.buffers} instead of {expected.buffers}"
    if layout.integers != expected.integers:
        return f"holds integer buffers of {layout.integers} instead of {expected.integers}"
    if not LEAST_WEIGHT <= contribution.weight <= GREATEST_WEIGHT:
        return f"has the weight {contribution.weight}, which is not from {LEAST_WEIGHT:g} to {GREATEST_WEIGHT:g}"
    if not contents:
        return ""
    if contribution.buffers is not None and not bool(torch.isfinite(contribution.buffers).all()):
        return "holds model buffers that are not finite"
    try:
        contribution.codec.validate(contribution.payload, expected.numel)
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
) -> Verdict:
    """Decide about a round, once something is known of every member.

    Args:
        contributions: replica -> what arrived from it.
        members: the replicas of the view.
        min_contributors: fewer usable contributions than this make the round void.
        absent: replica -> why nothing arrived from it.
        contents: whether payloads and buffers are here to be checked; False where only their headers have come, and
            the rest is checked on arrival.

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
    if diverged:
        names = ", ".join(str(replica) for replica in diverged)
        reason = f"global parameters or outer state of replica {names} differ from those of replica {donor}"
        return Verdict((), reason, diverged, donor)
    expected = _most_frequent([_Layout.of(contributions[replica]) for replica in ordered])
    for replica in ordered:
        if why := _refusal(contributions[replica], expected, contents=contents):
            reasons[replica] = f"the contribution of replica {replica} was refused: {why}"
    usable = tuple(replica for replica in ordered if replica not in reasons)
    reason = "; ".join(reasons[replica] for replica in sorted(reasons))
    if len(usable) < min_contributors:
        return Verdict((), f"{len(usable)} of {len(members)} contributions, {min_contributors} needed: {reason}")
    return Verdict(usable, reason, donor=donor)


def _most_frequent(values: Sequence[Value]) -> Value:
    counts = Counter(values)
    return max(counts, key=lambda value: counts[value])  # the first of equals: Counter keeps the order


def weighted_mean(contributions: Sequence[Contribution], clipping: Clipping = UNCLIPPED) -> Mean:
    """``sum_m w_m f_m decode(payload_m) / sum_m w_m`` in float32, in ascending order of replicas.

    Quantised addends and one float32 sum (Streaming DiLoCo, section 2.4): partial sums are never quantised again, and
    the divisor is the weight that arrived. f_m is 1, but for contributions that ``clipping`` scales down; model buffers
    are never scaled.
    """
    ordered = sorted(contributions, key=lambda contribution: contribution.replica)
    first = ordered[0]
    total = sum(contribution.weight for contribution in ordered)
    values = torch.zeros(first.numel, dtype=torch.float32, device=first.payload.device)
    factors: dict[int, float] = {}
    if clipping.active:
        factors = scale_factors(
            clipping,
            {each.replica: vector_norm(each.codec.decode(each.payload, each.numel)) for each in ordered},
        )
    for contribution in ordered:
        weight = contribution.weight * factors.get(contribution.replica, 1.0)
        contribution.codec.accumulate(contribution.payload, values, weight)
    buffers = None
    if first.buffers is not None:
        buffers = torch.zeros_like(first.buffers)
        for contribution in ordered:
            assert contribution.buffers is not None
            buffers.add_(contribution.buffers * contribution.weight)
        buffers.div_(total)
    return Mean(
        values=values.div_(total),
        contributors=tuple(contribution.replica for contribution in ordered),
        weight=total,
        buffers=buffers,
        integers=first.integers,
        clipped=tuple(factors),
    )
