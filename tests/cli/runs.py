"""The command line of a small run, and the error messages of commands."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import main

SMALL = """
algorithm = "streaming"
[train]
steps = 8
batch_size = 1
sequence_length = 16
data_parallel_steps = 2
device = "cpu"

[sync]
inner_steps = 3
num_fragments = 2

[network]
replicas = 2

[model.arguments]
layers = 1
width = 8
ffn_width = 16
heads = 2

[data]
heldout_fraction = 0.3

[evaluation]
every_steps = 0
sequences = 4

[checkpoint]
every_steps = 0

[monitor]
console = "quiet"
"""


def train(files: Path, *flags: str) -> list[str]:
    """Return the arguments of a small run."""
    return ["train", str(files / "run.toml"), "--data", str(files / "text.jsonl"), *flags]


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run a command that must end with ``code``, print no traceback and nothing on stdout; return its stderr."""
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert "│" not in captured.err, "tyro's box must become a sentence"
    return " ".join(captured.err.split())


def read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value
