"""What travels: the bytes of each fragment, from the codecs' own sizes, and from when on they may leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm.codec import Codec
from diloco.algorithm.exchange import plan_exchange
from diloco.algorithm.mean_encoding import PLAIN_MEAN
from diloco.algorithm.schedule import SyncSchedule

__all__ = [
    "AT_END_OF_STEP",
    "Parcel",
    "Releases",
    "Traffic",
    "data_parallel_traffic",
    "gradient_ready",
    "layer_releases",
    "outer_traffic",
]

Releases = tuple[tuple[float, float], ...]
"""(part of the step of sending, share of the bytes): what may leave when, by time. The shares add up to 1."""

AT_END_OF_STEP: Releases = ((1.0, 1.0),)
"""Everything leaves after the step, once the inner optimizer has moved the parameters, as in the trainer."""


@dataclass(frozen=True)
class Parcel:
    """What one round of one fragment moves."""

    sent_bytes: NDArray[np.float64]  # by replica, ``(..., M)``, or what broadcasts to it
    received_bytes: NDArray[np.float64]
    releases: Releases = AT_END_OF_STEP  # what may leave when
    numel: int = 0  # values in the fragment, which determine the cost of encoding and merging


@dataclass(frozen=True)
class Traffic:
    """A schedule, and what each of its fragments moves."""

    schedule: SyncSchedule
    parcels: tuple[Parcel, ...]

    def __post_init__(self) -> None:
        assert len(self.parcels) == self.schedule.num_fragments, "one parcel for each fragment"


def outer_traffic(
    schedule: SyncSchedule,
    fragment_sizes: Sequence[int],
    codecs: Sequence[Codec],
    num_replicas: int,
    *,
    positions: Sequence[int] | None = None,
    releases: Sequence[Releases] | None = None,
    clipping: bool = False,
    mean_codec: Codec = PLAIN_MEAN.codec,
) -> Traffic:
    """DiLoCo's and Streaming DiLoCo's traffic: encoded pseudo-gradients, by the cheaper exchange.

    Args:
        schedule: what is sent when.
        fragment_sizes: values in each fragment.
        codecs: one scenario for each; a single codec adds no scenario axis.
        num_replicas: M.
        positions: the replicas to tell apart; default: all. Two are enough where all are alike.
        releases: by fragment; default: everything at the end of the step.
        clipping: contributions are clipped, so every replica needs each of them whole.
        mean_codec: encodes the means in a reduce-scatter.

    >>> from diloco.algorithm.codec import make_codec
    >>> schedule = SyncSchedule(inner_steps=100)
    >>> outer_traffic(schedule, [1000], [make_codec("float32")], 2).parcels[0].sent_bytes
    array([4000., 4000.])
    """
    chosen = list(range(num_replicas) if positions is None else positions)
    by_size: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    for numel in set(fragment_sizes):
        exchanges = [
            plan_exchange(codec, numel, num_replicas, mean_codec=mean_codec, whole=clipping) for codec in codecs
        ]
        sent = np.array([each.sent for each in exchanges], dtype=np.float64)[:, chosen]
        received = np.array([each.received for each in exchanges], dtype=np.float64)[:, chosen]
        by_size[numel] = (sent, received) if len(codecs) > 1 else (sent[0], received[0])
    parcels = [
        Parcel(*by_size[numel], AT_END_OF_STEP if releases is None else releases[index], numel)
        for index, numel in enumerate(fragment_sizes)
    ]
    return Traffic(schedule, tuple(parcels))


def data_parallel_traffic(gradient_bytes: float, num_replicas: int, releases: Releases = AT_END_OF_STEP) -> Traffic:
    """Gradients of ``gradient_bytes`` at every step by a ring all-reduce: ``2 (M - 1) / M`` times that each way."""
    each_way = np.full(num_replicas, 2 * (num_replicas - 1) / num_replicas * gradient_bytes)
    return Traffic(SyncSchedule(inner_steps=1), (Parcel(each_way, each_way, releases),))


def gradient_ready(num_layers: int) -> tuple[float, ...]:
    """By layer, the part of an inner step after which its parameter gradient is there.

    The compute graph of Streaming DiLoCo's simulator (2501.18512, section 3.1), 4L - 1 nodes: L forward passes, then
    for each layer, the last one first, the gradient of its parameters, the reduction of that gradient (which takes the
    link, not the device), and the gradient of its activations. Nobody needs the last of these in the first layer. The
    3L - 1 compute nodes cost the same, as matrix products do, and run one after the other.

    >>> [round(part, 3) for part in gradient_ready(2)]      # the last layer is ready first
    [1.0, 0.6]
    """
    nodes = 3 * num_layers - 1
    return tuple((num_layers + 2 * (num_layers - 1 - layer) + 1) / nodes for layer in range(num_layers))


def layer_releases(num_layers: int, layers: Sequence[int]) -> Releases:
    """Releases of a fragment made of ``layers`` of equal size, each sent once its gradient is there."""
    ready = gradient_ready(num_layers)
    return tuple(sorted((ready[layer], 1 / len(layers)) for layer in layers))
