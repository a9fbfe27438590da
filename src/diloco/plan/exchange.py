"""What replicas send each other, and when."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm import PLAIN_MEAN, Codec, MeanEncoding, SyncSchedule, Uplink, make_codec, plan_exchange
from diloco.errors import ConfigurationError
from diloco.train import RunSettings, make_schedule, outer_components

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Parcel:
    """The traffic of one round of one fragment."""

    sent_bytes: Floats  # by replica, ``(M,)``
    received_bytes: Floats
    numel: int = 0  # number of values in the fragment, which determines the work of encoding and merging
    # (fraction of the sending step, share of the bytes that may be sent from then on), by time; the shares add up to 1.
    # The trainer sends after the step, when the inner optimizer has updated the parameters.
    releases: tuple[tuple[float, float], ...] = ((1.0, 1.0),)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What replicas send each other, and when."""

    schedule: SyncSchedule
    fragment_sizes: tuple[int, ...]  # number of values of each fragment
    codec: Codec
    mean: MeanEncoding = PLAIN_MEAN
    whole: bool = False  # whether every replica needs whole contributions
    dynamic_steps: bool = False  # whether slow replicas skip steps
    gradients: bool = False  # whether these are the gradients of data-parallel steps, whose work is not counted

    @classmethod
    def of(cls, settings: RunSettings, fragment_sizes: Sequence[int]) -> Exchange:
        """Return the exchange of resolved ``settings`` for a model with these fragments."""
        if settings.algorithm == "data-parallel":
            return cls.of_gradients(sum(fragment_sizes), settings.sync.codec or "float32")
        components = outer_components(settings.sync)
        return cls(
            schedule=make_schedule(settings),
            fragment_sizes=tuple(fragment_sizes),
            codec=components["codec"],
            mean=MeanEncoding.of(components["mean_codec"]),
            whole=settings.sync.whole_contributions,
            dynamic_steps=settings.network.straggler == "dynamic",
        )

    @classmethod
    def of_gradients(cls, parameters: int, codec: str = "float32") -> Exchange:
        """Return the exchange of data-parallel steps, as the trainer takes them: all gradients after the step."""
        schedule = SyncSchedule(inner_steps=1)
        return cls(schedule=schedule, fragment_sizes=(parameters,), codec=make_codec(codec), gradients=True)

    def parcels(self, num_replicas: int, uplinks: Sequence[Uplink] = ()) -> tuple[Parcel, ...]:
        """Return what ``num_replicas`` replicas send, by the exchange that transports choose for their ``uplinks``.

        >>> exchange = Exchange(schedule=SyncSchedule(inner_steps=9), fragment_sizes=(1000,), codec=make_codec("fp4"))
        >>> exchange.parcels(2)[0].sent_bytes
        array([504., 504.])
        """
        parcels: dict[int, Parcel] = {}
        for numel in set(self.fragment_sizes):
            plan = plan_exchange(self.codec, numel, num_replicas, mean=self.mean, whole=self.whole, uplinks=uplinks)
            parcels[numel] = Parcel(np.array(plan.sent, float), np.array(plan.received, float), numel)
        return tuple(parcels[numel] for numel in self.fragment_sizes)


def fragment_sizes(parameters: int, layers: int, num_fragments: int) -> tuple[int, ...]:
    """Return the number of values in each strided fragment (Streaming DiLoCo, Fig. 2) of a model of equal layers.

    Raises:
        ConfigurationError: there are not as many layers, or not as many parameters.

    >>> fragment_sizes(10, 4, 2)
    (4, 6)
    """
    if not 1 <= num_fragments <= layers <= parameters:
        raise ConfigurationError(
            f"{parameters} parameters in {layers} layers cannot be split into {num_fragments} fragments."
        )
    edges = [layer * parameters // layers for layer in range(layers + 1)]
    sizes = [end - begin for begin, end in itertools.pairwise(edges)]
    return tuple(sum(sizes[first::num_fragments]) for first in range(num_fragments))
