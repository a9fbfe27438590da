"""The command line of a small run, and the error messages of commands."""

import dataclasses
import json
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco.checkpoint import open_checkpoint, read_manifest, write_manifest
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


def write_documents(folder: Path) -> None:
    """Write ``text.jsonl``, the text of a small run."""
    lines = (json.dumps({"text": f"document {n}: " + "abc " * n}) + "\n" for n in range(1, 40))
    (folder / "text.jsonl").write_text("".join(lines))


def describe(run: Path, versions: Mapping[str, str] | None = None, **about: Any) -> None:
    """Let the newest checkpoint of a run, or the one at this path, describe another run."""
    folder = open_checkpoint(run).path
    manifest = read_manifest(folder)
    (folder / "manifest.json").unlink()
    changed = dataclasses.replace(manifest, about={**manifest.about, **about})
    write_manifest(folder, changed if versions is None else dataclasses.replace(changed, versions=versions))


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond a kilobyte, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
