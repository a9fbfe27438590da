"""Memory that replicas of one process share, and memory of each replica."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs import write_text
from tests.train.test_session_state import make_session


def held(tensors: list[torch.Tensor]) -> int:
    """Return the number of values in distinct memory."""
    return sum({tensor.data_ptr(): tensor.numel() for tensor in tensors}.values())


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_eight_replicas_hold_once_what_they_agree_on(tmp_path: Path, precision: str) -> None:
    """While gradients are averaged they share everything, then the global parameters and their momentum."""
    arguments = f"--replicas 8 --data-parallel-steps 2 --steps 8 --precision {precision}"
    session = make_session(write_text(tmp_path), arguments)
    session.step()
    models = {id(replica.model): replica.model for replica in session.replicas}
    assert len(models) == (8 if precision == "float16" else 1), "a scaler checks the gradients of each replica"
    assert len({id(replica.inner) for replica in session.replicas}) == len(models)
    if len(models) == 1:
        assert all(parameter.grad is None for parameter in session.replicas[0].model.parameters())
    for _ in range(7):
        session.step()
    session.drain()
    models = {id(replica.model): replica.model for replica in session.replicas}
    assert len(models) == 8
    numel = session.replicas[0].model.num_trained()
    assert held([parameter for model in models.values() for parameter in model.parameters()]) == 8 * numel
    loops = [replica.diloco.outer_loop for replica in session.replicas if replica.diloco]
    assert len(loops) == 8
    moments = [state.slots["momentum"] for loop in loops for state in loop.outer_states]
    assert held([values for loop in loops for values in loop.global_params] + moments) == 2 * numel
    assert len({replica.diloco.digest() for replica in session.replicas if replica.diloco}) == 1
