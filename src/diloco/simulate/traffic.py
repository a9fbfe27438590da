"""What travels: the parcels of a method, by fragment, with the codecs' own sizes and the trainer's own schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm.codec import Codec
from diloco.algorithm.exchange import Exchange, plan_exchange
from diloco.algorithm.schedule import SyncSchedule
from diloco.simulate.compute_graph import StepGraph

__all__ = [
    "AT_END_OF_STEP",
    "Parcel",
    "Traffic",
    "data_parallel_traffic",
    "fragment_layers",
    "layer_releases",
    "outer_traffic",
]

AT_END_OF_STEP = ((1.0, 1.0),)
"""All may leave after the step, when the inner optimizer has moved the parameters: what the trainer does."""


@dataclass(frozen=True)
class Parcel:
    """What one round of one fragment moves.

    Attributes:
        sent_bytes: by replica, ``(..., M)``, or what broadcasts to it.
        received_bytes: likewise.
        releases: (part of the step of sending, share of the bytes): what may leave when, in the order of time. The
            shares add up to 1.
        numel: values in the fragment, for what encoding and merging cost.
    """

    sent_bytes: NDArray[np.float64]
    received_bytes: NDArray[np.float64]
    releases: tuple[tuple[float, float], ...] = AT_END_OF_STEP
    numel: int = 0


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
    releases: Sequence[tuple[tuple[float, float], ...]] | None = None,
    clipping: bool = False,
) -> Traffic:
    """DiLoCo's and Streaming DiLoCo's traffic: pseudo-gradients through a codec, by the cheaper exchange.

    Args:
        schedule: when what is sent.
        fragment_sizes: values in each fragment.
        codecs: one scenario for each; a single one needs no scenario axis.
        num_replicas: M.
        positions: the replicas to be told apart; default: all. Equal ones need only two of them.
        releases: by fragment; default: all at the end of the step.
        clipping: contributions are clipped, so that every replica needs all of them whole.

    >>> from diloco.algorithm.codec import make_codec
    >>> schedule = SyncSchedule(inner_steps=100)
    >>> outer_traffic(schedule, [1000], [make_codec("float32")], 2).parcels[0].sent_bytes
    array([4000., 4000.])
    """
    by_size: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    for numel in set(fragment_sizes):
        exchanges = [plan_exchange(codec, numel, num_replicas, whole=clipping) for codec in codecs]
        by_size[numel] = _bytes(exchanges, positions)
    parcels = [
        Parcel(*by_size[numel], AT_END_OF_STEP if releases is None else releases[index], numel)
        for index, numel in enumerate(fragment_sizes)
    ]
    return Traffic(schedule, tuple(parcels))


def data_parallel_traffic(
    gradient_bytes: float, num_replicas: int, releases: tuple[tuple[float, float], ...] = AT_END_OF_STEP
) -> Traffic:
    """Gradients at every step by a ring all-reduce, ``2 (M - 1) / M`` times their bytes each way.

    Args:
        gradient_bytes: of one replica.
        num_replicas: M.
        releases: when what may leave; gradients overlapped with the backward pass are `StepGraph.releases`.
    """
    each_way = np.full(num_replicas, 2 * (num_replicas - 1) / num_replicas * gradient_bytes)
    return Traffic(SyncSchedule(inner_steps=1), (Parcel(each_way, each_way, releases),))


def fragment_layers(num_layers: int, num_fragments: int) -> tuple[tuple[int, ...], ...]:
    """The layers of each strided fragment, none of them for what is outside the layers (Streaming DiLoCo, Fig. 2).

    >>> fragment_layers(6, 2)
    ((0, 2, 4), (1, 3, 5))
    """
    return tuple(tuple(range(first, num_layers, num_fragments)) for first in range(num_fragments))


def layer_releases(graph: StepGraph, layers: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """Releases of a fragment that consists of ``layers``, equal in size, each when its gradient is there."""
    return graph.releases([1 / len(layers) if layer in layers else 0.0 for layer in range(graph.num_layers)])


def _bytes(
    exchanges: Sequence[Exchange], positions: Sequence[int] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    chosen = range(len(exchanges[0].sent)) if positions is None else positions
    sent = np.array([[exchange.sent[position] for position in chosen] for exchange in exchanges], dtype=np.float64)
    received = np.array([[exchange.received[position] for position in chosen] for exchange in exchanges], dtype=float)
    return (sent, received) if len(exchanges) > 1 else (sent[0], received[0])
