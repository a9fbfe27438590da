"""The graph of a step: its nodes, their order, and from when on what may leave."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigurationError
from diloco.simulate.compute_graph import StepGraph

layers = st.integers(1, 40)
cost = st.floats(0.01, 10)


@settings(deadline=None)
@given(layers, cost, cost, cost)
def test_the_papers_count_of_nodes_one_after_the_other(num_layers: int, f: float, a: float, p: float) -> None:
    graph = StepGraph(num_layers=num_layers, forward=f, backward_activations=a, backward_parameters=p)
    assert len(graph.nodes) == 4 * num_layers - 1
    compute = [node for node in graph.nodes if node.kind != "reduction"]
    assert compute[0].start == 0
    assert math.isclose(compute[-1].stop, 1)
    assert all(math.isclose(before.stop, after.start) for before, after in pairwise(compute))
    assert sum(node.layer == 0 and node.kind == "backward-activations" for node in graph.nodes) == 0


@settings(deadline=None)
@given(layers)
def test_the_last_layer_is_ready_first_and_the_first_at_the_end_of_the_step(num_layers: int) -> None:
    ready = StepGraph(num_layers=num_layers).ready
    assert math.isclose(ready[0], 1)
    assert all(earlier > later for earlier, later in pairwise(ready))
    assert min(ready) > 1 / 3 * 0.99, "nothing is ready before the forward pass is done"


def test_only_layers_that_take_part_are_released() -> None:
    graph = StepGraph(num_layers=3)
    assert graph.releases([0.5, 0.0, 0.5]) == ((graph.ready[2], 0.5), (graph.ready[0], 0.5))


@pytest.mark.parametrize(("num_layers", "forward"), [(0, 1.0), (3, -1.0), (3, math.inf)])
def test_graphs_that_are_none_are_refused(num_layers: int, forward: float) -> None:
    with pytest.raises(ConfigurationError, match="at least one layer"):
        StepGraph(num_layers=num_layers, forward=forward)
