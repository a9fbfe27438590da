"""A model by numbers, and the methods of training it, as traffic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.algorithm.codec import Codec
from diloco.algorithm.schedule import SyncSchedule
from diloco.errors import ConfigurationError
from diloco.model.presets import count_parameters
from diloco.model.settings import ModelSettings
from diloco.simulate.compute_graph import StepGraph
from diloco.simulate.traffic import (
    AT_END_OF_STEP,
    Traffic,
    data_parallel_traffic,
    fragment_layers,
    layer_releases,
    outer_traffic,
)

__all__ = ["METHODS", "Method", "Release", "Workload", "method_named"]

Release = Literal["layer", "step"]
"""When a fragment may leave: layer: each layer when its gradient is there in the step of sending, as the paper's
simulator has it; step: all of it after the step, as this trainer does it."""

LAYERS_PER_FRAGMENT = 3
"""Streaming DiLoCo, Fig. 6."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of layers that are alike, and how long an inner step of it takes.

    Attributes:
        parameters: trainable values in all.
        layers: L.
        outside: values that are in no layer (embeddings, head, final norm); they are a fragment of their own.
        step_time_s: of one inner step, without any communication.
    """

    parameters: int
    layers: int
    step_time_s: float
    outside: int = 0

    @classmethod
    def of_model(cls, model: ModelSettings, vocab_size: int, step_time_s: float) -> Workload:
        """The native decoder, to the value: its fragments are those of `diloco.algorithm.fragments.partition`.

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
                f"step_time_s={self.step_time_s} were given; at least one layer with at least one parameter each, and "
                "a time above 0, would work. Nothing was computed."
            )

    @property
    def default_fragments(self) -> int:
        """P: one per three layers, and one for what is outside them."""
        return math.ceil(self.layers / LAYERS_PER_FRAGMENT) + bool(self.outside)

    def fragment_layers(self, num_fragments: int) -> tuple[tuple[int, ...], ...]:
        """The layers in each strided fragment; the first has none where there is something outside the layers.

        >>> Workload(parameters=10, layers=4, outside=2, step_time_s=1.0).fragment_layers(3)
        ((), (0, 2), (1, 3))
        """
        blocks = num_fragments - bool(self.outside)
        if num_fragments == 1:
            return (tuple(range(self.layers)),)
        if not 1 <= blocks <= self.layers:
            raise ConfigurationError(
                f"{num_fragments} fragments were asked of {self.layers} layers; 1 to "
                f"{self.layers + bool(self.outside)} would work. Nothing was computed."
            )
        return ((),) * bool(self.outside) + fragment_layers(self.layers, blocks)

    def fragment_sizes(self, num_fragments: int) -> tuple[int, ...]:
        """Values in each fragment; together they are all parameters.

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
    ) -> Traffic:
        """What DiLoCo or Streaming DiLoCo sends, one scenario for each codec (none in front for a single one)."""
        graph = StepGraph(num_layers=self.layers)
        releases = [
            layer_releases(graph, layers or (0,)) if release == "layer" else AT_END_OF_STEP
            for layers in self.fragment_layers(schedule.num_fragments)
        ]
        sizes = self.fragment_sizes(schedule.num_fragments)
        return outer_traffic(
            schedule, sizes, codecs, num_replicas, positions=positions, releases=releases, clipping=clipping
        )

    def gradients(self, codec: Codec, num_replicas: int, *, release: Release = "layer") -> Traffic:
        """What data-parallel training sends at every step."""
        graph = StepGraph(num_layers=self.layers)
        releases = layer_releases(graph, range(self.layers)) if release == "layer" else AT_END_OF_STEP
        return data_parallel_traffic(codec.payload_bytes(self.parameters), num_replicas, releases)


@dataclass(frozen=True)
class Method:
    """A row of the paper's Table 4.

    Attributes:
        name: as the command line has it.
        title: as the table has it.
        streaming: fragments in turn; else the whole model at once.
        overlap_steps: tau.
        codec: what its payloads are by default.
        data_parallel: gradients at every step instead.
    """

    name: str
    title: str
    streaming: bool = False
    overlap_steps: int = 0
    codec: str = "bfloat16"
    data_parallel: bool = False

    def schedule(
        self,
        workload: Workload,
        inner_steps: int,
        *,
        num_fragments: int | None = None,
        overlap_steps: int | None = None,
    ) -> SyncSchedule:
        """The schedule of this method; by default P is `Workload.default_fragments`, at most H, and tau its own.

        P and tau count where fragments take turns, tau where the method overlaps.
        """
        number = num_fragments or min(workload.default_fragments, inner_steps)
        overlap = self.overlap_steps if overlap_steps is None or not self.overlap_steps else overlap_steps
        return SyncSchedule(
            inner_steps=inner_steps,
            num_fragments=number if self.streaming else 1,
            overlap_steps=overlap if overlap_steps is not None else min(overlap, inner_steps - 1),
        )


METHODS = (
    Method("data-parallel", "Data-Parallel", data_parallel=True),
    Method("diloco", "vanilla DiLoCo"),
    Method("streaming", "Streaming DiLoCo", streaming=True),
    Method("streaming-overlap", "+ overlapped", streaming=True, overlap_steps=1),
    Method("streaming-overlap-fp4", "+ overlapped, FP4", streaming=True, overlap_steps=1, codec="fp4"),
)


def method_named(name: str) -> Method:
    """The method called ``name``.

    Raises:
        ConfigurationError: for another name.
    """
    for method in METHODS:
        if method.name == name:
            return method
    names = ", ".join(method.name for method in METHODS)
    raise ConfigurationError(f"there is no method {name!r}; {names} would work. Nothing was computed.")
