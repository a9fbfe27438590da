"""What the programs share: their arguments, text, a tiny model, and the line that they print at their end."""

import argparse
import hashlib
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from diloco import connect_tcp
from diloco.outer import DiLoCo
from diloco.transport import Transport


def arguments(description: str | None) -> argparse.Namespace:
    """Return which replica this is, where to meet, where to write, what to resume, and the text to train on."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--join", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", default="")
    parser.add_argument("--text", type=Path)
    return parser.parse_args()


def connect(given: argparse.Namespace) -> AbstractContextManager[Transport]:
    return connect_tcp(replica=given.replica, num_replicas=2, rendezvous=given.join, ranks="whole")


def rows(text: Path, length: int = 32) -> list[dict[str, Tensor]]:
    """Return a text as rows of bytes."""
    tokens = torch.tensor(list(text.read_bytes()[: 400 * length]))
    return [{"input_ids": row, "labels": row} for row in torch.split(tokens, length) if len(row) == length]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        attention_dropout=0.0, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Normed(nn.Module):
    """A classifier with BatchNorm, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def points(number: int, seed: int) -> list[dict[str, Tensor]]:
    """Return points with the place of the largest of their first four coordinates."""
    x = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))
    return [{"x": each, "labels": label} for each, label in zip(x, x[:, :4].argmax(1), strict=True)]


def finish(diloco: DiLoCo | None, model: Any, **more: Any) -> None:
    """Print what the processes of a run are compared by: the digest of the global parameters, and the model as left."""
    assert diloco is not None
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
    print(
        "\nEND " + json.dumps({"digest": diloco.digest(), "model": digest, "rounds": diloco.rounds_committed, **more})
    )
