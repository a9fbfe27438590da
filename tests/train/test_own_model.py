"""The user's own model, from a function: its training in a run, and the messages about mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from diloco.checkpoint import open_checkpoint
from diloco.config import plan_run
from diloco.errors import CheckpointError, ConfigurationError
from diloco.trained import load_trained
from tests.command_lines import command_line
from tests.train.source_runs import plan_of, trained

NETS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, hidden):
        so_far = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]
        return hidden + self.mix(so_far).tanh()

class Net(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab_size))
        self.scale = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens):
        if self.training:
            self.seen += tokens.numel()
        return self.head(self.blocks(self.embedding(tokens) * self.scale))

def build(vocab_size, width=8):
    return Net(vocab_size, width)
"""


def test_a_function_of_ones_own(data: Path, tmp_path: Path) -> None:
    """The layers of a plain module are found though its head is larger; frozen parameters and buffers are kept."""
    file = tmp_path / "nets.py"
    file.write_text(NETS, encoding="utf-8")
    plan = plan_of(f"{file}:build", data, model__arguments={"width": 12})
    summary = trained(tmp_path / "run", plan)
    assert plan.configuration.sync.num_fragments == 3  # four layers, three per fragment, and the rest
    again = load_trained(tmp_path / "run", source=f"{file}:build").model
    assert (again.num_layers, again.vocab_size, again.wrapped.embedding.weight.shape[1]) == (4, 257, 12)
    checkpoint = open_checkpoint(tmp_path / "run")
    synchronised = {name for fragment in checkpoint.about["fragments"] for name in fragment["parameters"]}
    assert synchronised == {name for name, p in again.named_parameters() if p.requires_grad}
    assert "wrapped.scale" not in synchronised
    state = checkpoint.load("replica-0-values")
    assert torch.equal(again.wrapped.scale, state["model/wrapped.scale"])  # type: ignore[arg-type]
    assert float(again.wrapped.seen) == float(state["model/wrapped.seen"]) > 0  # type: ignore[arg-type]
    straight = trained(tmp_path / "run-2", plan_of(f"{file}:build", data, model__arguments={"width": 12}))
    assert summary["global_params_digest"] == straight["global_params_digest"]
    with pytest.raises(ConfigurationError, match="has no argument `documents`"):
        again(torch.zeros(1, 4, dtype=torch.int64), documents=torch.zeros(1, 4, dtype=torch.int64))
    counted = 2 * 257 * 12 + 4 * 12 * 12
    assert again.flops_per_token(16) == 6 * (counted - 257 * 12)

    written_ns = file.stat().st_mtime_ns
    file.write_text(NETS.replace("range(4)", "range(5)"), encoding="utf-8")
    os.utime(file, ns=(written_ns, written_ns))  # bytecode in `__pycache__` detects an edit by size and second
    with pytest.raises(CheckpointError, match="was saved by a run with model = "):
        trained(
            tmp_path / "run",
            plan_run(command_line(checkpoint__resume=tmp_path / "run", train__steps=16, model__source=f"{file}:build")),
        )


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch about quantised and sparse tensors
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("torch.eye(8).to_sparse()", "is not dense"),
        ("torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)", "is quantised"),
    ],
)
def test_a_frozen_parameter_that_no_checkpoint_can_hold_is_refused_before_training(
    value: str, why: str, data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "nets.py"
    file.write_text(NETS.replace("torch.rand(width), requires_grad", f"{value}, requires_grad"), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=rf"'scale' of .* {why}.*no checkpoint can hold it"):
        trained(tmp_path / "run", plan_of(f"{file}:build", data))
    assert not (tmp_path / "run" / "checkpoints").exists()
