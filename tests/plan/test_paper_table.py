"""Table 4 of Streaming DiLoCo, cell by cell."""

from __future__ import annotations

from diloco.plan import GRID_GBIT_PER_S, PUBLISHED, TARGETS, paper_cells


def test_nearly_all_cells_are_the_published_ones() -> None:
    cells = paper_cells()
    assert len(cells) == 50 == len({(cell.model, cell.method, cell.target) for cell in cells})
    assert sum(cell.grid_steps == 0 for cell in cells) >= 45
    assert max(abs(cell.grid_steps) for cell in cells) <= 2


def test_a_cell_is_the_first_point_of_the_grid_that_suffices() -> None:
    for cell in paper_cells():
        assert cell.simulated_gbit_per_s in GRID_GBIT_PER_S
        assert cell.compute_utilization >= cell.target
        assert cell.published_gbit_per_s == PUBLISHED[cell.model, cell.method][TARGETS.index(cell.target)]


def test_the_published_values_are_points_of_the_grid_as_printed() -> None:
    """To one decimal, so the grid is that of the paper."""
    for values in PUBLISHED.values():
        for value in values:
            assert min(abs(value - point) for point in GRID_GBIT_PER_S) < 0.1
