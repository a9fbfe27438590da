"""The traffic of training: the model, the bytes of each fragment, and the time from which they may be sent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm import PLAIN_MEAN, Codec, MeanEncoding, SyncSchedule, Uplink, plan_exchange
from diloco.errors import ConfigurationError
from diloco.model import ModelSettings, count_parameters
from diloco.train import LAYERS_PER_FRAGMENT

__all__ = [
    "AT_END_OF_STEP",
    "Parcel",
    "Release",
    "Releases",
    "Traffic",
    "Workload",
    "data_parallel_traffic",
    "gradient_ready",
    "layer_releases",
    "outer_traffic",
]

Releases = tuple[tuple[float, float], ...]
"""Pairs (fraction of the sending step, share of the bytes that may be sent from then on), ordered by time. The shares
add up to 1."""

AT_END_OF_STEP: Releases = ((1.0, 1.0),)
"""Everything is sent after the step, when the inner optimizer has updated the parameters, as in the trainer."""


@dataclass(frozen=True)
class Parcel:
    """The traffic of one round of one fragment."""

    sent_bytes: NDArray[np.float64]  # by replica, broadcastable to ``(..., M)``
    received_bytes: NDArray[np.float64]
    releases: Releases = AT_END_OF_STEP  # when parts may be sent
    numel: int = 0  # number of values in the fragment, which determines the cost of encoding and merging


@dataclass(frozen=True)
class Traffic:
    """A schedule and the parcel of each of its fragments."""

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
    mean: MeanEncoding = PLAIN_MEAN,
    uplinks: Sequence[Uplink] = (),
) -> Traffic:
    """Return the traffic of DiLoCo or Streaming DiLoCo: encoded pseudo-gradients, by the cheaper exchange.

    Args:
        schedule: the schedule of sends and merges.
        fragment_sizes: the number of values in each fragment.
        codecs: one scenario for each; a single codec adds no scenario axis.
        num_replicas: M.
        positions: the replicas to simulate. Default: all. Two are enough if all are alike.
        releases: one for each fragment. Default: everything at the end of the step.
        clipping: whether contributions are clipped, so that every replica needs each contribution whole.
        mean, uplinks: as for `plan_exchange`.

    >>> from diloco.algorithm import make_codec
    >>> schedule = SyncSchedule(inner_steps=100)
    >>> outer_traffic(schedule, [1000], [make_codec("float32")], 2).parcels[0].sent_bytes
    array([4000., 4000.])
    """
    chosen = list(range(num_replicas) if positions is None else positions)
    by_size: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    for numel in set(fragment_sizes):
        exchanges = [
            plan_exchange(codec, numel, num_replicas, mean=mean, whole=clipping, uplinks=uplinks) for codec in codecs
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
    """Return the traffic of a ring all-reduce of ``gradient_bytes`` at every step.

    Each replica sends and receives ``2 (M - 1) / M`` times the gradients.
    """
    each_way = np.full(num_replicas, 2 * (num_replicas - 1) / num_replicas * gradient_bytes)
    return Traffic(SyncSchedule(inner_steps=1), (Parcel(each_way, each_way, releases),))


def gradient_ready(num_layers: int) -> tuple[float, ...]:
    """Return, for each layer, the fraction of an inner step after which the gradient of its parameters is ready.

    The compute graph is that of Streaming DiLoCo's simulator (2501.18512, section 3.1) with 4L - 1 nodes: L forward
    passes, then for each layer, from last to first, the gradient of its parameters, the reduction of that gradient
    (which uses the link, not the device), and the gradient of its activations. The first layer does not need the last
    of these. The 3L - 1 compute nodes take equal time, as matrix products do, and run one after the other.

    >>> [round(part, 3) for part in gradient_ready(2)]      # the last layer is ready first
    [1.0, 0.6]
    """
    nodes = 3 * num_layers - 1
    return tuple((num_layers + 2 * (num_layers - 1 - layer) + 1) / nodes for layer in range(num_layers))


def layer_releases(num_layers: int, layers: Sequence[int]) -> Releases:
    """Return the releases of a fragment of ``layers`` of equal size, each sent when its gradient is ready."""
    ready = gradient_ready(num_layers)
    return tuple(sorted((ready[layer], 1 / len(layers)) for layer in layers))


Release = Literal["layer", "step"]
"""When a fragment may be sent. layer: each layer when its gradient is ready, within the sending step, as in the paper's
simulator; step: the whole fragment after the step, as in this trainer."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of equal layers, and how long an inner step of it takes."""

    parameters: int  # number of trainable values
    layers: int  # L
    step_time_s: float  # compute time of one inner step
    outside: int = 0  # number of values in no layer (embeddings, head, final norm), which form a separate fragment

    @classmethod
    def of_model(cls, model: ModelSettings, vocab_size: int, step_time_s: float) -> Workload:
        """Return the workload of the native decoder, with the fragments of `diloco.algorithm.fragments.partition`.

        >>> Workload.of_model(ModelSettings(layers=2, width=8, ffn_width=16, heads=2), 10, 1.0).fragment_sizes(3)
        (168, 656, 656)
        """
        parameters = count_parameters(model, vocab_size)
        layer = count_parameters(dataclasses.replace(model, layers=model.layers + 1), vocab_size) - parameters
        outside = parameters - model.layers * layer
        return cls(parameters=parameters, layers=model.layers, outside=outside, step_time_s=step_time_s)

    def __post_init__(self) -> None:
        fits = self.layers >= 1 and 0 <= self.outside <= self.parameters - self.layers
        if not fits or not 0 < self.step_time_s < math.inf:
            raise ConfigurationError(
                f"parameters={self.parameters}, layers={self.layers}, outside={self.outside} and "
                f"step_time_s={self.step_time_s} do not describe a model: it needs at least one layer, a parameter in "
                "each layer, and a time above 0."
            )

    @property
    def default_fragments(self) -> int:
        """P: one fragment per three layers, and one for the values in no layer."""
        return math.ceil(self.layers / LAYERS_PER_FRAGMENT) + bool(self.outside)

    def fragment_layers(self, num_fragments: int) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each strided fragment (Streaming DiLoCo, Fig. 2).

        The first fragment has no layers if there are values in no layer, which it holds.

        >>> Workload(parameters=10, layers=4, outside=2, step_time_s=1.0).fragment_layers(3)
        ((), (0, 2), (1, 3))
        """
        if num_fragments == 1:
            return (tuple(range(self.layers)),)
        blocks = num_fragments - bool(self.outside)
        if not 1 <= blocks <= self.layers:
            raise ConfigurationError(
                f"{self.layers} layers cannot be split into {num_fragments} fragments. Choose 1 to "
                f"{self.layers + bool(self.outside)}."
            )
        strided = tuple(tuple(range(first, self.layers, blocks)) for first in range(blocks))
        return ((), *strided) if self.outside else strided

    def fragment_sizes(self, num_fragments: int) -> tuple[int, ...]:
        """Return the number of values in each fragment; they add up to all parameters.

        >>> Workload(parameters=10, layers=4, outside=2, step_time_s=1.0).fragment_sizes(3)
        (2, 4, 4)
        """
        if num_fragments == 1:
            return (self.parameters,)
        in_layers = self.parameters - self.outside
        edges = [layer * in_layers // self.layers for layer in range(self.layers + 1)]
        return tuple(
            sum(edges[layer + 1] - edges[layer] for layer in layers) if layers else self.outside
            for layers in self.fragment_layers(num_fragments)
        )

    def traffic(
        self,
        schedule: SyncSchedule,
        codecs: Sequence[Codec],
        num_replicas: int,
        *,
        release: Release = "step",
        positions: Sequence[int] | None = None,
        clipping: bool = False,
        mean: MeanEncoding = PLAIN_MEAN,
        uplinks: Sequence[Uplink] = (),
    ) -> Traffic:
        """Return the traffic of DiLoCo or Streaming DiLoCo; the arguments are as for `outer_traffic`."""
        releases = [
            layer_releases(self.layers, layers or (0,)) if release == "layer" else AT_END_OF_STEP
            for layers in self.fragment_layers(schedule.num_fragments)
        ]
        sizes = self.fragment_sizes(schedule.num_fragments)
        return outer_traffic(
            schedule,
            sizes,
            codecs,
            num_replicas,
            positions=positions,
            releases=releases,
            clipping=clipping,
            mean=mean,
            uplinks=uplinks,
        )

    def gradients(self, codec: Codec, num_replicas: int) -> Traffic:
        """Return the traffic of data-parallel training, with each layer sent when its gradient is ready."""
        releases = layer_releases(self.layers, range(self.layers))
        return data_parallel_traffic(codec.payload_bytes(self.parameters), num_replicas, releases)
