"""Sources of documents: every kind reads from any position; what can't be read is reported."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.data import BEGINNING, DataSettings, Source, SourceSettings, build_corpus
from diloco.errors import ConfigurationError, DataError
from tests.data.streams import numbered
from tests.lazy import Lazy

datasets = Lazy("datasets")

TEXTS = [*numbered(250), "", "last"]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        datasets.disable_progress_bars()
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    rows = datasets.Dataset.from_dict({"text": TEXTS, "body": [text.upper() for text in TEXTS]})
    rows.save_to_disk(str(folder / "saved"))
    (folder / "hub").mkdir()
    for number in range(2):  # at a place that is no multiple of a block
        half = rows.select(range(100) if number == 0 else range(100, len(TEXTS)))
        half.to_parquet(str(folder / "hub" / f"train-0000{number}-of-00002.parquet"))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


KINDS: dict[str, Callable[[Path], SourceSettings]] = {
    "jsonl": lambda f: SourceSettings(data=(str(f / "a.jsonl"),)),
    "text": lambda f: SourceSettings(data=(str(f / "*.txt"),)),
    "saved": lambda f: SourceSettings(data=(f"hf:{f / 'saved'}",)),
    "folder": lambda f: SourceSettings(data=(f"hf:{f / 'hub'}",)),
    "folder, streamed": lambda f: SourceSettings(data=(f"hf:{f / 'hub'}",), streaming=True),
}
TWICE = {
    "two": lambda f: SourceSettings(data=(f"hf:{f / 'saved'}", str(f / "a.jsonl"))),
    "two the other way": lambda f: SourceSettings(data=(str(f / "a.jsonl"), f"hf:{f / 'saved'}")),
}


@pytest.mark.parametrize("kind", [*KINDS, *TWICE])
def test_records_come_in_one_order_from_any_place_on(kind: str, files: Path) -> None:
    """Also while another reader of the same source is at another place."""
    source = Source((KINDS | TWICE)[kind](files))
    assert list(source.documents()) == [text for text in TEXTS if text] * (2 if kind in TWICE else 1)
    reader, places, blocks = source.blocks(64), [BEGINNING], []
    while not blocks or blocks[-1]:
        block, place = next(reader)
        blocks.append(block)
        places.append(json.loads(json.dumps(dict(place))))
    for number, place in enumerate(places[:-2]):
        again = source.blocks(64, place)
        assert [next(again)[0] for _ in blocks[number:]] == blocks[number:]
        assert next(again)[0] == blocks[0], "after the end it begins again"


def test_field_split_and_config_are_those_that_were_asked_for(files: Path) -> None:
    tenth = SourceSettings(data=(f"hf:{files / 'hub'}:train[:10%]",), text_field="body")
    assert list(Source(tenth).documents()) == [text.upper() for text in TEXTS[:25]]


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        ("hf:nobody/nothing", "text", "cannot be read: .* and the connection to the hub"),
        ("hf:{files}/hub:test", "text", "cannot be read: .*test"),
        ("hf:{files}/saved", "txt", r"no field 'txt' .*did you mean 'text'"),
        ("hf:{files}/hub", "txt", r"no field 'txt' .*did you mean 'text'"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_not_there_is_told(files: Path, data: str, field: str, words: str, streaming: bool) -> None:
    with pytest.raises(DataError, match=words):
        Source(SourceSettings(data=(data.format(files=files),), text_field=field, streaming=streaming))


def test_places_become_absolute_and_names_stay(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    sources = {
        "a": {"data": ["hf:saved:train", "a.jsonl", "hf:org/name"], "weight": 2},
        "b": {"data": ["./*.jsonl", "s3://x/*.jsonl"]},
    }
    there = DataSettings(sources=sources).absolute().sources
    assert there["a"]["data"] == (f"hf:{files}/saved:train", f"{files}/a.jsonl", "hf:org/name")
    assert there["b"]["data"] == (f"{files}/*.jsonl", "s3://x/*.jsonl")
    plain = DataSettings(paths=("hf:saved", "a.jsonl", "hf:org/name:train"), tokenizer="hf:gpt2")
    assert plain.absolute().paths == (f"hf:{files}/saved", f"{files}/a.jsonl", "hf:org/name:train")
    assert plain.absolute().tokenizer == "hf:gpt2"


def test_a_corpus_is_the_same_from_files_and_from_datasets(files: Path) -> None:
    corpora = [
        build_corpus(DataSettings(paths=(place,)))
        for place in (str(files / "a.jsonl"), f"hf:{files / 'saved'}", f"hf:{files / 'hub'}")
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sources": {"a": {}}}, "data.sources.a must be a table such as .* data ="),
        ({"sources": {"a": {"data": "x", "weight": math.nan}}}, "weight"),
        ({"sources": {"a": {"data": "hf:x", "split": "train"}}}, "unknown key 'split'; hf:NAME/CONFIG:SPLIT names it"),
        ({"paths": ("x",), "sources": {"a": {"data": "x"}}}, "were both given"),
        ({"format": "chat"}, "needs conversations"),
        ({"format": "chat", "paths": ("x",), "streaming": True}, "can't be combined with data.format='chat'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DataSettings(**settings)
