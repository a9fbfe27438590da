"""Data that a checkpoint was saved with: the same is the same wherever it is and whenever it was written; what changed
is named, in every way of reading it."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import main
from diloco.data import build_corpus
from diloco.errors import CheckpointError
from tests.lazy import Lazy
from tests.runs import settings_of, train

datasets = Lazy("datasets")

WORDS = "".join(f"{number} alpha beta gamma delta. " for number in range(6))


def write(folder: Path, files: int = 3, *, changed: str = "", number: int = 60) -> None:
    folder.mkdir(exist_ok=True)
    for name in range(files):
        lines = (json.dumps({"text": f"{name}.{line}{changed} {WORDS}"}) for line in range(number))
        (folder / f"train-{name}.jsonl").write_text("\n".join(lines))


def rewrite_end(folder: Path) -> None:
    """Change the last document of a file, behind all that was read so far, without another size."""
    path = folder / "train-1.jsonl"
    path.write_text(path.read_text().replace("1.59 ", "1.5x "))


def append(folder: Path) -> None:
    path = folder / "train-1.jsonl"
    path.write_text(path.read_text() + '\n{"text": "one more"}')


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another file": (lambda folder: write(folder, 4), "this run has data = train-3.jsonl"),
    "a file less": (lambda folder: (folder / "train-2.jsonl").unlink(), r"has data = train-2.jsonl \("),
    "a longer file": (append, "this run has data = train-1.jsonl"),
    "other text of the same size": (rewrite_end, "this run has data = train-1.jsonl"),
    "other text everywhere": (lambda folder: write(folder, changed="x"), "this run has data = train-0.jsonl"),
}


def touch(folder: Path) -> None:
    for each in folder.iterdir():
        os.utime(each, (1, 1))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("how", ["", "--data.streaming", "hf: --data.streaming"])
def test_a_change_is_named_and_a_copy_goes_on(tmp_path: Path, how: str) -> None:
    folder, run = tmp_path / "data", tmp_path / "run"
    prefix, _, flags = how.rpartition(" ") if how.startswith("hf:") else ("", "", how)
    data: Any = f"{prefix}{folder}{':train' if prefix else ''}"
    write(folder)
    whole = train(data, tmp_path / "whole", flags)["global_params_digest"]
    train(data, run, f"{flags} --stop-after 6")
    for change, words in CHANGES.values():
        change(folder)
        with pytest.raises(CheckpointError, match=words):
            train(data, run, f"{flags} --resume {run}")
        shutil.rmtree(folder)
        write(folder)
    touch(folder)
    assert train(data, run, f"{flags} --resume {run}")["global_params_digest"] == whole


def test_data_that_moved_is_named_anew_and_must_be_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data")
    small = "--model.arguments.layers 1 --model.arguments.width 16 --model.arguments.heads 2 --sequence-length 16 "
    small += "--steps 8 --data-parallel-steps 0 --inner-steps 4 --device cpu --monitor.console quiet --replicas 1"
    run = tmp_path / "run"
    begin = f"train --data {tmp_path / 'data'} --data.streaming --out {run} --stop-after 4 --fragments 1 {small}"
    assert main(begin.split()) == 0
    shutil.move(tmp_path / "data", tmp_path / "moved")
    assert main(f"train --resume {run} --monitor.console quiet".split()) == 2
    assert "does not exist" in capsys.readouterr().err
    write(tmp_path / "others", changed="x")
    assert main(f"train --resume {run} --data {tmp_path / 'others'} --monitor.console quiet".split()) == 1
    assert "this run has data = train-0.jsonl" in " ".join(capsys.readouterr().err.split())
    assert main(f"train --resume {run} --data {tmp_path / 'moved'} --monitor.console quiet".split()) == 0


def test_the_same_file_compressed_is_the_same_corpus_but_not_the_same_stream(tmp_path: Path) -> None:
    write(tmp_path / "plain", 1)
    (tmp_path / "packed").mkdir()
    packed = gzip.compress((tmp_path / "plain" / "train-0.jsonl").read_bytes())
    (tmp_path / "packed" / "train-0.jsonl.gz").write_bytes(packed)
    for flags, same in (("", True), ("--data.streaming", False)):
        corpora = [build_corpus(settings_of(tmp_path / name, flags).data) for name in ("plain", "packed")]
        assert (corpora[0].fingerprint == corpora[1].fingerprint) is same


def test_a_large_file_is_told_apart_by_blocks_of_it(tmp_path: Path) -> None:
    prints = set()
    for place in (0, 2_400_000, 4_999_999):
        text = bytearray(b"a" * 5_000_000)
        text[place] = ord("b")
        (tmp_path / "a.txt").write_bytes(text)
        prints.add(build_corpus(settings_of(tmp_path / "a.txt").data).files)
    assert len(prints) == 3
