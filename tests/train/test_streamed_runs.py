"""Runs that read, tokenise and pack while training: the same bits after a stop."""

import gzip
import json
import threading
from pathlib import Path

import fsspec
import pytest

from tests.lazy import Lazy
from tests.runs import numbered, train

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
    data = {"file": data, "data set": data_set, "bucket": bucket}[kind]  # type: ignore[assignment]  # a path or a name
    whole = train(data, tmp_path / "whole", f"{STREAMING}")
    train(data, tmp_path / "run", f"{STREAMING} --stop-after 5")
    resumed = train(data, tmp_path / "run", f"{STREAMING} --resume {tmp_path / 'run'}")
    for name in ("global_params_digest", "heldout_loss", "epochs"):
        assert resumed[name] == whole[name]
    assert not [thread for thread in threading.enumerate() if "batches" in thread.name], "all threads have ended"
