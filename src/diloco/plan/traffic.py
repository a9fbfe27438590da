"""What replicas send in a round, and from when on they may send it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm import PLAIN_MEAN, Codec, MeanEncoding, SyncSchedule, Uplink, plan_exchange
from diloco.errors import ConfigurationError
from diloco.train import LAYERS_PER_FRAGMENT


@dataclass(frozen=True)
class Parcel:
    """The traffic of one round of one fragment."""

    sent_bytes: NDArray[np.float64]  # by replica, broadcastable to ``(..., M)``
    received_bytes: NDArray[np.float64]
    numel: int = 0  # number of values in the fragment, which determines the work of encoding and merging
    # (fraction of the sending step, share of the bytes that may be sent from then on), by time; the shares add up to 1.
    # The trainer sends after the step, when the inner optimizer has updated the parameters.
    releases: tuple[tuple[float, float], ...] = ((1.0, 1.0),)


@dataclass(frozen=True)
class Traffic:
    """A schedule and the parcel of each of its fragments."""

    schedule: SyncSchedule
    parcels: tuple[Parcel, ...]


def outer_traffic(
    schedule: SyncSchedule,
    fragment_sizes: Sequence[int],
    codec: Codec,
    num_replicas: int,
    *,
    mean: MeanEncoding = PLAIN_MEAN,
    whole: bool = False,
    uplinks: Sequence[Uplink] = (),
) -> Traffic:
    """Return the traffic of replicas that average encoded values, by the exchange that transports choose.

    Args:
        schedule: the schedule of sends and merges.
        fragment_sizes: the number of values in each fragment.
        codec: the codec of the contributions.
        num_replicas: M.
        mean, whole, uplinks: as for `plan_exchange`.

    >>> from diloco.algorithm import SyncSchedule, make_codec
    >>> outer_traffic(SyncSchedule(inner_steps=100), [1000], make_codec("float32"), 2).parcels[0].sent_bytes
    array([4000., 4000.])
    """
    parcels: dict[int, Parcel] = {}
    for numel in set(fragment_sizes):
        exchange = plan_exchange(codec, numel, num_replicas, mean=mean, whole=whole, uplinks=uplinks)
        parcels[numel] = Parcel(np.array(exchange.sent, float), np.array(exchange.received, float), numel)
    return Traffic(schedule, tuple(parcels[numel] for numel in fragment_sizes))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of equal layers that is known only by its size, and how long an inner step of it takes."""

    parameters: int  # number of trainable values, all of them in layers
    layers: int  # L
    step_time_s: float = 1.0  # compute time of one inner step

    @property
    def default_fragments(self) -> int:
        """P: one fragment per three layers."""
        return math.ceil(self.layers / LAYERS_PER_FRAGMENT)

    def fragment_layers(self, num_fragments: int) -> tuple[range, ...]:
        """Return the layers of each strided fragment (Streaming DiLoCo, Fig. 2).

        Raises:
            ConfigurationError: there are not as many layers, or not as many parameters.

        >>> Workload(parameters=10, layers=4).fragment_layers(2)
        (range(0, 4, 2), range(1, 4, 2))
        """
        if not 1 <= num_fragments <= self.layers <= self.parameters:
            raise ConfigurationError(
                f"{self.parameters} parameters in {self.layers} layers cannot be split into {num_fragments} fragments."
            )
        return tuple(range(first, self.layers, num_fragments) for first in range(num_fragments))

    def fragment_sizes(self, num_fragments: int) -> tuple[int, ...]:
        """Return the number of values in each fragment; they add up to all parameters.

        >>> Workload(parameters=10, layers=4).fragment_sizes(2)
        (4, 6)
        """
        layers = self.fragment_layers(num_fragments)
        edges = [layer * self.parameters // self.layers for layer in range(self.layers + 1)]
        return tuple(sum(edges[layer + 1] - edges[layer] for layer in fragment) for fragment in layers)
