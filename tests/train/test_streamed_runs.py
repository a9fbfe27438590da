"""Runs that read, tokenise and pack while training: the same bits after a stop, and no repeated document."""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from pathlib import Path

import fsspec
import pytest
import torch

from diloco.checkpoint import open_checkpoint
from diloco.data import DocumentStream
from diloco.errors import CheckpointError
from diloco.events import Note
from tests.data.streams import numbered, packed, trained
from tests.lazy import Lazy
from tests.runs import Listener, train

datasets = Lazy("datasets")

STREAMING = "--data.streaming --data.heldout-fraction 0.2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in numbered(120)))
    return path


@pytest.fixture(scope="module")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two files of a data set, whose border lies within a block."""
    folder = tmp_path_factory.mktemp("set")
    for number, texts in enumerate((numbered(50), numbered(120)[50:])):
        rows = datasets.Dataset.from_dict({"text": texts})
        rows.to_parquet(str(folder / f"train-0000{number}-of-00002.parquet"))
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def bucket(data: Path) -> str:
    """Two compressed files in a store, named by a pattern."""
    store, lines = fsspec.filesystem("memory"), data.read_bytes().splitlines(keepends=True)
    for number, part in enumerate((lines[:50], lines[50:])):
        store.pipe(f"/bucket/{number}.jsonl.gz", gzip.compress(b"".join(part)))
    return "memory://bucket/*.jsonl.gz"


@pytest.mark.parametrize("kind", ["file", "data set", "bucket"])
def test_stopping_and_resuming_is_never_stopping(
    data: Path, data_set: str, bucket: str, tmp_path: Path, kind: str
) -> None:
    data = {"file": data, "data set": data_set, "bucket": bucket}[kind]  # type: ignore[assignment]
    whole = train(data, tmp_path / "whole", f"{STREAMING}")
    train(data, tmp_path / "run", f"{STREAMING} --stop-after 5")
    resumed = train(data, tmp_path / "run", f"{STREAMING} --resume {tmp_path / 'run'}")
    for name in ("global_params_digest", "heldout_loss", "epochs"):
        assert resumed[name] == whole[name]
    assert not [thread for thread in threading.enumerate() if "batches" in thread.name], "all threads have ended"


def test_no_document_twice_in_an_epoch_while_replicas_come_and_go(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2, 4, 1 and then 3 replicas, each new set goes on after the furthest block that was begun."""
    targets: list[int] = []
    draw = DocumentStream.next_batch

    def watched(self: DocumentStream) -> tuple[torch.Tensor, torch.Tensor]:
        batch = draw(self)
        targets.extend(batch[1].flatten().tolist())
        return batch

    monkeypatch.setattr(DocumentStream, "next_batch", watched)
    fixed, run = f"{STREAMING} --steps 30", tmp_path / "run"
    listener = Listener()
    for replicas, stop in ((2, 6), (4, 13), (1, 17), (3, 30)):
        more = f" --resume {run}" if stop > 6 else ""
        train(data, run, f"{fixed} --replicas {replicas} --stop-after {stop}{more}", sink=listener)
    assert len(targets) == 32 * (6 * 2 + 7 * 4 + 4 * 1 + 13 * 3)
    once = Counter(packed(trained(numbered(120))).tolist())
    cursors = [open_checkpoint(run).load(f"replica-{m}")["sampler"]["sources"][0] for m in range(3)]
    epochs = -(-max(cursor["block"] + 1 for cursor in cursors) // cursors[0]["blocks"])
    assert epochs >= 2
    assert all(count <= once[token] * epochs for token, count in Counter(targets).items())
    notes = [event.text for event in listener.of(Note)]
    assert any(text.startswith("4 replicas continue where 2 stopped") for text in notes)
    assert any("All of the data has been read" in text for text in notes)


def test_a_stream_of_other_documents_is_refused(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "run", f"{STREAMING} --stop-after 2")
    with pytest.raises(CheckpointError, match="saved by a run with data = "):
        train(data, tmp_path / "run", f"{STREAMING} --data.heldout-fraction 0.3 --resume {tmp_path / 'run'}")
