"""A model described by numbers, and what training it sends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.algorithm.codec import Codec
from diloco.algorithm.mean_encoding import PLAIN_MEAN
from diloco.algorithm.schedule import SyncSchedule
from diloco.errors import ConfigurationError
from diloco.model.presets import count_parameters
from diloco.model.settings import ModelSettings
from diloco.simulate.traffic import AT_END_OF_STEP, Traffic, data_parallel_traffic, layer_releases, outer_traffic

__all__ = ["Release", "Workload"]

Release = Literal["layer", "step"]
"""When a fragment may leave. layer: each layer once its gradient is there, within the step of sending, as the paper's
simulator has it; step: all of it after the step, as in this trainer."""

LAYERS_PER_FRAGMENT = 3  # Streaming DiLoCo, Fig. 6.


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of equal layers, and how long an inner step of it takes."""

    parameters: int  # trainable values in all
    layers: int  # L
    step_time_s: float  # of one inner step, without any communication
    outside: int = 0  # values in no layer (embeddings, head, final norm), which form a fragment of their own

    @classmethod
    def of_model(cls, model: ModelSettings, vocab_size: int, step_time_s: float) -> Workload:
        """The native decoder, exactly: its fragments are those of `diloco.algorithm.fragments.partition`.

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
                "each layer, and a time above 0. Nothing was computed."
            )

    @property
    def default_fragments(self) -> int:
        """P: one for every three layers, and one for what is outside the layers."""
        return math.ceil(self.layers / LAYERS_PER_FRAGMENT) + bool(self.outside)

    def fragment_layers(self, num_fragments: int) -> tuple[tuple[int, ...], ...]:
        """The layers of each strided fragment (Streaming DiLoCo, Fig. 2); the first has none if it is the outside.

        >>> Workload(parameters=10, layers=4, outside=2, step_time_s=1.0).fragment_layers(3)
        ((), (0, 2), (1, 3))
        """
        if num_fragments == 1:
            return (tuple(range(self.layers)),)
        blocks = num_fragments - bool(self.outside)
        if not 1 <= blocks <= self.layers:
            raise ConfigurationError(
                f"{self.layers} layers cannot be split into {num_fragments} fragments; choose 1 to "
                f"{self.layers + bool(self.outside)}. Nothing was computed."
            )
        strided = tuple(tuple(range(first, self.layers, blocks)) for first in range(blocks))
        return ((), *strided) if self.outside else strided

    def fragment_sizes(self, num_fragments: int) -> tuple[int, ...]:
        """Values in each fragment; their sum is all parameters.

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
        mean_codec: Codec = PLAIN_MEAN.codec,
    ) -> Traffic:
        """What DiLoCo or Streaming DiLoCo sends; arguments as for `outer_traffic`."""
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
            mean_codec=mean_codec,
        )

    def gradients(self, codec: Codec, num_replicas: int) -> Traffic:
        """What data-parallel training sends at every step, each layer once its gradient is there."""
        releases = layer_releases(self.layers, range(self.layers))
        return data_parallel_traffic(codec.payload_bytes(self.parameters), num_replicas, releases)
