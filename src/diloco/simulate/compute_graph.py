"""One inner step as a graph: what is computed when, and from when on a layer's gradient could travel.

The simulator of Streaming DiLoCo (2501.18512, section 3.1): per layer a forward node, a backward node with regard to
activations, one with regard to parameters, and a reduction of the gradient: 4L - 1 nodes, since nobody needs the
activation gradient of the first layer's input. Compute nodes run one after the other; a reduction follows its layer's
parameter gradient and takes the link instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.errors import ConfigurationError

__all__ = ["Node", "NodeKind", "StepGraph"]

NodeKind = Literal["forward", "backward-activations", "backward-parameters", "reduction"]


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        kind: what is done.
        layer: counted from 0.
        start, stop: when, as parts of a step that lasts from 0 to 1. A reduction begins at its ``start`` at the
            earliest; how long it takes is up to the link, so its ``stop`` is the same.
    """

    kind: NodeKind
    layer: int
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """The graph of a model whose layers are alike.

    Args:
        num_layers: L.
        forward: what a layer's forward pass costs, in any unit.
        backward_activations: its backward pass with regard to activations, in the same unit.
        backward_parameters: and with regard to parameters. One to one to one is what matrix products cost.

    >>> graph = StepGraph(num_layers=24)
    >>> len(graph.nodes)        # 4L - 1
    95
    >>> [round(fraction, 3) for fraction in StepGraph(num_layers=2).ready]      # the last layer is ready first
    [1.0, 0.6]
    """

    num_layers: int
    forward: float = 1.0
    backward_activations: float = 1.0
    backward_parameters: float = 1.0

    def __post_init__(self) -> None:
        costs = (self.forward, self.backward_activations, self.backward_parameters)
        if self.num_layers < 1 or min(costs) < 0 or not 0 < sum(costs) < float("inf"):
            raise ConfigurationError(
                f"{self.num_layers} layers with costs {costs} were given; at least one layer, and costs of 0 or more "
                "that are not all 0, would work. Nothing was computed."
            )

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, in the order in which they begin."""
        last = self.num_layers - 1
        order: list[tuple[NodeKind, int, float]] = [("forward", layer, self.forward) for layer in range(last + 1)]
        for layer in reversed(range(last + 1)):
            # parameters first: what has to travel is then ready as early as can be
            order.append(("backward-parameters", layer, self.backward_parameters))
            order.append(("reduction", layer, 0.0))
            if layer:
                order.append(("backward-activations", layer, self.backward_activations))
        total = sum(cost for _, _, cost in order)
        nodes, done = [], 0.0
        for kind, layer, cost in order:
            nodes.append(Node(kind, layer, done / total, (done + cost) / total))
            done += cost
        return tuple(nodes)

    @property
    def ready(self) -> tuple[float, ...]:
        """By layer, the part of the step after which its parameter gradient is there."""
        return tuple(node.start for node in sorted(self.nodes, key=lambda node: node.layer) if node.kind == "reduction")

    def releases(self, shares: Sequence[float]) -> tuple[tuple[float, float], ...]:
        """When the parts of what is sent may leave, for `diloco.simulate.traffic.Parcel`.

        Args:
            shares: by layer, which part of the payload belongs to it; 0 for layers that do not take part.

        Returns:
            (part of the step, share) in the order of time.
        """
        return tuple(sorted((ready, share) for ready, share in zip(self.ready, shares, strict=True) if share))
