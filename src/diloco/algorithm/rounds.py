"""The contributions of replicas to a round, the verdict on the round, and the mean that every replica gets from it.

A contribution of norm n keeps its weight, but its values are multiplied by ``min(1, max_norm / n)``. So a faulty or
malicious replica moves the mean by at most its weight times ``max_norm``. Norms must have equal bits on all replicas,
or these would diverge. The summation order of a library depends on the processor's vector width, so norms are summed
here in float64 by elementwise additions of halves.

`judge` and `weighted_mean` are pure functions of the contributions and independent of the transport.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from diloco.algorithm.codec.base import Codec, divisor, largest_magnitude
from diloco.algorithm.digest import digest_tensors
from diloco.algorithm.exchange import PLAIN_MEAN, Exchange, MeanCodec, Uplink, plan_exchange
from diloco.devices import empty
from diloco.errors import CodecError, DivergedError

LARGEST_MEAN = 2.0**100  # a larger mean makes the round void: momentum and outer steps would overflow

_CHUNK_VALUES = 1 << 20  # whose squares are summed at a time; it defines the order of summation

LEAST_WEIGHT, GREATEST_WEIGHT = 1e-18, 1e18
"""Bounds of weights. Weights multiply float32 values, where far smaller or larger ones would become 0 or infinite."""

LEAST_GRADIENTS, WEIGHTS_DIGEST, WEIGHTS = -3, -4, -5
"""Fragments below 0: gradients, which are -1 and less for further attempts after a void round; digests of all weights,
where replicas begin; and the weights themselves, if they differ."""

LEAST_FRAGMENT = WEIGHTS
"""The least fragment number."""

_KINDS = "values", "floating buffers", "integer buffers"

_MAX_WINDOWS = 8  # the full windows that a contribution may weigh: its own and the work of seven void rounds


@runtime_checkable
class AverageRule(Protocol):
    """A rule that averages the contributions of a round. Equal inputs must give equal bits on every replica."""

    @property
    def elementwise(self) -> bool:
        """Whether each value of the average depends only on the same value of the contributions.

        Other rules need whole tensors, which the ranks of a sharded model (FSDP) do not have.
        """

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        """Return the average of the contributions, ``(numel,)`` float32, sharing no memory with them.

        Args:
            contributions: The weight and the values, ``(numel,)`` float32, of each contributor in ascending order of
                replicas. There is at least one. Fetching the next one overwrites the values.
            tensors: The sizes of the tensors that the values consist of, in order.
        """


@dataclass(frozen=True)
class SendersMean:
    """The weighted mean of each value over those contributors whose value is not zero, or 0 if all are zero.

    If every replica sends different values, as with `topk2`, each value counts in full: the result is up to M times the
    mean over all replicas. Templar's code, which trained a 72B model, does this; the SparseLoCo paper divides by the
    number of all replicas.

    >>> SendersMean().combine([(3.0, torch.tensor([4.0, 0.0, 3.0])), (1.0, torch.tensor([2.0, 0.0, 0.0]))], [3])
    tensor([3.5000, 0.0000, 3.0000])
    """

    elementwise = True

    def combine(self, contributions: Iterable[tuple[float, Tensor]], tensors: Sequence[int]) -> Tensor:
        total = sent = torch.zeros((), dtype=torch.float32, device="cpu")
        for weight, values in contributions:
            if not total.dim():
                total, sent = torch.zeros_like(values), torch.zeros_like(values)
            total.add_(values * weight)
            sent.add_((values != 0).to(torch.float32).mul_(weight))
        return total.div_(sent.masked_fill_(sent == 0, 1.0))


class RoundId(NamedTuple):
    """One exchange of one fragment.

    Attributes:
        fragment: p; -1 for the gradients of a data-parallel step, -2 for its second attempt after a void round, and so
            on; -4 and -5 for the digest of all weights, and the weights.
        outer_step: The number of earlier synchronisations of the fragment; the inner step if it is below 0.
    """

    fragment: Annotated[int, Meta(ge=LEAST_FRAGMENT, le=1 << 53)]
    outer_step: Annotated[int, Meta(ge=0, le=1 << 53)]

    def __str__(self) -> str:
        if self.fragment in (WEIGHTS_DIGEST, WEIGHTS):
            return f"{'digests of the ' if self.fragment == WEIGHTS_DIGEST else ''}weights after step {self.outer_step}"
        if self.fragment < 0:
            attempt = f", attempt {-self.fragment}" if self.fragment < -1 else ""
            return f"gradients of step {self.outer_step}{attempt}"
        return f"fragment {self.fragment}, outer step {self.outer_step}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Contribution:
    """The contribution of replica m to one round."""

    round: RoundId
    replica: int
    codec: Codec  # the codec of ``payload``
    numel: int  # the number of values that the payload encodes
    payload: Tensor  # ``(codec.payload_bytes(numel),)`` uint8
    weight: float = 1.0  # this replica's weight in the mean, 1e-18 to 1e18
    base_weight: float = 1.0  # the weight of a full window of this replica; see `bounded_weights`
    digest: str = ""  # the digest of the fragment's global parameters and outer state on this replica
    buffers: Tensor | None = None  # ``(n,)`` float32, the model's floating-point buffers, or None
    integers: Tensor | None = None  # ``(n,)`` uint8, the bytes of its integer buffers, or None
    withdrawn: str = ""  # why the sender excludes it from the mean, or ""
    max_norm: float | None = None  # the largest norm of a contribution, or no bound; the same on all replicas
    average_rule: AverageRule | None = None  # None: the weighted mean; the same on all replicas
    tensors: tuple[int, ...] = ()  # the sizes of the tensors that the values consist of, for ``average_rule``
    mean: MeanCodec = PLAIN_MEAN  # the codec of means in a reduce-scatter; the same on all replicas
    transfer_steps: float = math.inf  # see `SyncSchedule`; infinite: the uplinks change no means
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable; where a payload in host memory is averaged

    @property
    def whole(self) -> bool:
        """Whether averaging needs whole contributions, so that each is sent to every replica."""
        return self.max_norm is not None or self.average_rule is not None

    @property
    def layout(self) -> tuple[int | None, ...]:
        """The sizes that all contributions to a round must share, in the order of `_KINDS`."""
        return self.numel, *(None if part is None else part.numel() for part in (self.buffers, self.integers))

    def checked(self) -> Contribution:
        """Return the contribution, withdrawn if its payload is none."""
        try:
            self.codec.validate(self.payload, self.numel)
        except CodecError as error:
            return replace(self, withdrawn=self.withdrawn or str(error))
        return self

    @property
    def extra_bytes(self) -> int:
        """The bytes sent in addition to the payload."""
        return sum(extra.nbytes for extra in (self.buffers, self.integers) if extra is not None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Mean:
    """The result of a round, the same on every replica."""

    values: Tensor  # ``(numel,)`` float32, shared by the replicas of one process; must not be changed
    contributors: tuple[int, ...]  # the replicas in the mean, ascending
    weight: float  # the sum of their weights, the divisor
    buffers: Tensor | None = None  # ``(n,)`` float32, the mean of the floating-point buffers, or None
    integers: Tensor | None = None  # ``(n,)`` uint8, the integer buffers of the first contributor, or None
    clipped: tuple[int, ...] = ()  # the contributors whose values were scaled down, ascending

    def digest(self) -> str:
        """Return the digest of everything that the mean would change."""
        parts = {f"{self.contributors} {self.weight!r}": self.values}
        if self.buffers is not None:
            parts["buffers"] = self.buffers
        if self.integers is not None:
            parts["integers"] = self.integers
        return digest_tensors(parts)


@dataclass(frozen=True)
class Verdict:
    """The decision about a round. The same contributions give the same verdict on every replica."""

    contributors: tuple[int, ...]  # the replicas whose contributions are averaged; empty if the round is void
    reason: str = ""  # why the round is void or which replicas it excludes; empty if neither
    diverged: tuple[int, ...] = ()  # replicas whose digest differs from the majority's; any makes the round void
    donor: int = -1  # a replica with the majority's state
    refused: tuple[int, ...] = ()  # replicas with contributions that no honest replica sends; see ``reason``

    @property
    def void(self) -> bool:
        return not self.contributors

    def divergence(self, round_id: RoundId, digest: str) -> DivergedError:
        """Return the error for a replica whose digest differs. ``digest`` is that of the donor's state."""
        message = f"{round_id}: {self.reason}. The round is void for all."
        return DivergedError(message, donor=self.donor, digest=digest, round=str(round_id), replicas=self.diverged)


def _refusal(contribution: Any, expected: Sequence[int | None]) -> str:
    """Return why ``contribution`` can't be averaged with those of the ``expected`` layout, or "" if it can."""
    if contribution.withdrawn:
        return str(contribution.withdrawn)
    for kind, mine, theirs in zip(_KINDS, contribution.layout, expected, strict=True):
        if mine != theirs:
            sizes = [f"{'no' if size is None else size} {kind}" for size in (mine, theirs)]
            return f"it holds {' instead of '.join(sizes)}"
    for name, weight in (("weight", contribution.weight), ("base weight", contribution.base_weight)):
        if not LEAST_WEIGHT <= weight <= GREATEST_WEIGHT:
            return f"its {name} is {weight}, which is not from {LEAST_WEIGHT:g} to {GREATEST_WEIGHT:g}"
    return ""


def judge(
    contributions: Mapping[int, Any],
    *,
    members: Sequence[int],
    min_contributors: int,
    absent: Mapping[int, str],
) -> Verdict:
    """Decide about a round, given the `Contribution.checked` of each member, or its header, or why it is absent.

    A replica has diverged if its digest is not the most frequent one, which at least half must hold; on a tie the
    digest of the lowest replica counts. The most frequent sizes are determined in the same way, and contributions of
    other sizes are refused.

    Args:
        min_contributors: The round is void with fewer usable contributions than this.
        absent: Replica -> why its contribution is missing.
    """
    reasons = {replica: f"replica {replica} {why}" for replica, why in absent.items()}
    if not contributions:
        return Verdict((), "; ".join(reasons[replica] for replica in sorted(reasons)) or "no replica contributed")
    ordered = sorted(contributions)
    ((majority, _),) = Counter(contributions[replica].digest for replica in ordered).most_common(1)  # first of equals
    diverged = tuple(replica for replica in ordered if contributions[replica].digest != majority)
    donor = next(replica for replica in ordered if replica not in diverged)
    what = "global parameters or outer state of"
    if 2 * len(diverged) > len(ordered):
        names = ", ".join(map(str, ordered))
        return Verdict((), f"{what} replicas {names} differ, and less than half of them hold the same")
    if diverged:
        names = ", ".join(map(str, diverged))
        return Verdict((), f"{what} replica {names} differ from those of replica {donor}", diverged, donor)
    ((layout, _),) = Counter(contributions[replica].layout for replica in ordered).most_common(1)
    for replica in ordered:
        if why := _refusal(contributions[replica], layout):
            reasons[replica] = f"the contribution of replica {replica} was refused: {why}"
    usable = tuple(replica for replica in ordered if replica not in reasons)
    refused = tuple(replica for replica in ordered if replica in reasons and not contributions[replica].withdrawn)
    reason = "; ".join(reasons[replica] for replica in sorted(reasons))
    if len(usable) < min_contributors:
        few = f"{len(usable)} of {len(members)} contributions are usable, {min_contributors} are needed: {reason}"
        return Verdict((), few, refused=refused)
    return Verdict(usable, reason, donor=donor, refused=refused)


def weighted_mean(contributions: Sequence[Contribution]) -> Mean:
    """Return ``sum_m w_m f_m decode(payload_m) / sum_m w_m``, summed in float32 in ascending order of replicas.

    The addends are quantised and their sum is float32 (Streaming DiLoCo, section 2.4): partial sums are never quantised
    again. The divisor is the weight of the contributions present. w_m are the `bounded_weights`. f_m is 1 except for
    contributions that exceed their ``max_norm``; model buffers are never scaled. An ``average_rule`` of the
    contributions replaces the weighted mean of the values, but not that of the buffers.

    Raises:
        CodecError: if the mean is not finite or too large. The error names the replica that contributed most to it.
    """
    ordered = dict[int, Contribution]()
    for contribution in sorted(contributions, key=operator.attrgetter("replica")):
        ordered[contribution.replica] = contribution
    first = next(iter(ordered.values()))
    numel = first.numel
    weights = bounded_weights(
        {m: contribution.weight for m, contribution in ordered.items()},
        {m: contribution.base_weight for m, contribution in ordered.items()},
    )
    total = sum(weights.values())

    def decoded() -> Iterable[tuple[int, Tensor]]:
        return ((m, contribution.codec.decode(contribution.payload, numel)) for m, contribution in ordered.items())

    factors = scale_factors(first.max_norm, decoded())
    addends: dict[int, tuple[Codec, Tensor, float]] = {}
    for m, contribution in ordered.items():
        addends[m] = contribution.codec, contribution.payload, weights[m] * factors.get(m, 1.0)
    if first.average_rule is None:
        values = empty(numel, torch.float32, first.payload.device)
        mean_into_(values, addends.values(), total)
    else:
        pairs = ((weights[m], values.mul_(factors.get(m, 1.0))) for m, values in decoded())
        values = first.average_rule.combine(pairs, first.tensors).contiguous()
    check_mean(values, addends)
    buffers = {m: contribution.buffers for m, contribution in ordered.items() if contribution.buffers is not None}
    return Mean(
        values=values,
        contributors=tuple(ordered),
        weight=total,
        buffers=mean_of_buffers(buffers, weights) if buffers else None,
        integers=first.integers,
        clipped=tuple(factors),
    )


def mean_into_(values: Tensor, addends: Iterable[tuple[Codec, Tensor, float]], total: float) -> None:
    """Set ``values`` to the sum of the decoded payloads times their weights, divided by ``total``.

    On the CPU, NumPy computes what no codec does: unlike torch it starts no threads, which would multiply those of a
    caller that sums in several.
    """
    if values.is_cpu:
        values.numpy().fill(0.0)
    else:
        values.zero_()
    for codec, payload, weight in addends:
        codec.accumulate(payload, values, weight)
    if values.is_cpu:
        with np.errstate(all="ignore"):  # the mean is checked
            np.divide(values.numpy(), np.float32(total), out=values.numpy())
    else:
        values.div_(divisor(total, values))


def mean_of_buffers(buffers: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
    """Return the weighted mean of ``(n,)`` float32 buffers on the host, contributors ascending.

    Each value is the mean over the replicas where it is finite. Where it is finite on none, as in a mask of -inf, it is
    the first contributor's. Sums are float64, so that values that are equal on all replicas stay as they are.
    """
    first = next(iter(buffers.values()))
    total, weight = (torch.zeros_like(first, dtype=torch.float64) for _ in range(2))
    for replica, values in buffers.items():
        finite = values.isfinite()
        total += torch.where(finite, values, 0.0).double() * weights[replica]
        weight += finite.double() * weights[replica]
    return torch.where(weight > 0, (total / weight).float(), first)


def scale_factors(max_norm: float | None, decoded: Iterable[tuple[int, Tensor]]) -> dict[int, float]:
    """Return ``max_norm / n``, rounded to float32, for each replica whose values have a norm n above ``max_norm``.

    >>> scale_factors(1.0, [(0, torch.tensor([0.5])), (1, torch.tensor([1.0])), (2, torch.tensor([4.0]))])
    {2: 0.25}
    """
    if max_norm is None:
        return {}
    norms = {replica: vector_norm(values) for replica, values in decoded}
    return {m: float(np.float32(max_norm / norm)) for m, norm in norms.items() if norm > max_norm}


def vector_norm(values: Tensor) -> float:
    """Return the L2 norm of ``values``, ``(n,)`` float32, with equal bits on every processor.

    Squares are exact in float64. They are summed over ranges of 2^20 values, and then the sums of the ranges. Each sum
    folds: the second half is added to the first, value by value, until one value is left.

    >>> vector_norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    if not values.numel():
        return 0.0
    starts = range(0, values.numel(), _CHUNK_VALUES)
    sums = [_folded(values[start : start + _CHUNK_VALUES].to(torch.float64).square_()) for start in starts]
    return math.sqrt(float(_folded(torch.stack(sums))))


def _folded(values: Tensor) -> Tensor:
    """Return the sum of ``values``, ``(n,)`` float64 with n > 0, as a ``()`` tensor. Overwrites ``values``."""
    count = len(values)
    while count > 1:
        half = (count + 1) // 2
        values[: count - half] += values[half:count]  # an odd number's middle value waits for the next fold
        count = half
    return values[0]


def check_mean(values: Tensor, addends: Mapping[int, tuple[Codec, Tensor, float]]) -> None:
    """Raise `CodecError`, with the replica that contributed most, if a mean is not finite or above 2^100.

    It may overflow even if all addends are finite. ``addends``: replica -> codec, payload, and weight.
    """
    largest = largest_magnitude(values)
    if not largest <= LARGEST_MEAN:
        magnitudes = {
            replica: weight * largest_magnitude(codec.decode(payload, values.numel()))
            for replica, (codec, payload, weight) in sorted(addends.items())
        }
        replica = max(magnitudes, key=lambda replica: magnitudes[replica])  # the lowest on a tie
        what = "is not finite" if not math.isfinite(largest) else f"has values up to {largest:.3g}"
        raise CodecError(f"the mean {what}; replica {replica} contributed most to it", replica=replica)


def plan_round(contribution: Contribution, num_replicas: int, uplinks: Sequence[Uplink] = ()) -> Exchange:
    """Return `plan_exchange` for a round of ``num_replicas`` contributions like this one."""
    codec, numel, extra, how = contribution.codec, contribution.numel, contribution.extra_bytes, contribution.mean
    return plan_exchange(codec, numel, num_replicas, extra, mean=how, whole=contribution.whole, uplinks=uplinks)


def contribution_weight(base_weight: float, trained: float, scheduled: int) -> float:
    """Return ``w = base_weight * trained / scheduled``, bounded to 1e-18 to 1e18.

    The weight is exactly ``base_weight`` for a replica that trained all scheduled steps. A replica that trained nothing
    has the least weight, 1e-18: its part of the mean vanishes in rounding if others trained, and the mean is over all
    replicas if none did. Withdrawing its contribution instead would make a round void if all replicas are needed.

    >>> contribution_weight(1.0, 100.0, 100), contribution_weight(2.0, 25.0, 100), contribution_weight(1.0, 200.0, 100)
    (1.0, 0.5, 2.0)
    >>> contribution_weight(1.0, 0.0, 100)
    1e-18
    """
    if trained <= 0:
        return LEAST_WEIGHT
    return min(GREATEST_WEIGHT, max(LEAST_WEIGHT, base_weight * (trained / scheduled)))


def bounded_weights(weights: Mapping[int, float], base_weights: Mapping[int, float]) -> dict[int, float]:
    """Return ``min(w, 8 b)`` by replica, where b is its base weight, or the second largest base weight if that is less.

    Replicas report their own weights. The bound limits each to eight full windows, and its window to that of another
    replica. It affects an honest replica only after more than seven lost rounds in a row, or if its base weight is more
    than eight times that of any other.

    >>> bounded_weights({0: 1.0, 1: 1e18, 2: 2.0}, {0: 1.0, 1: 1e18, 2: 1.0})
    {0: 1.0, 1: 8.0, 2: 2.0}
    """
    bases = sorted(base_weights[replica] for replica in weights)
    second = bases[-2] if len(bases) > 1 else GREATEST_WEIGHT
    return {
        replica: min(weight, _MAX_WINDOWS * min(base_weights[replica], second)) for replica, weight in weights.items()
    }
