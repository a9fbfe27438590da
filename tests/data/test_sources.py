"""Sources of documents: every kind reads in one order, from a saved state on; what can't be read is reported."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from diloco.data import DataSettings, Source, build_corpus
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


@pytest.mark.parametrize(
    "data", [("{}/a.jsonl",), ("{}/*.txt",), ("hf:{}/saved",), ("hf:{}/hub",), ("hf:{}/saved", "{}/a.jsonl")]
)
def test_records_come_in_one_order_also_from_a_saved_state_on(data: tuple[str, ...], files: Path) -> None:
    settings = DataSettings(paths=tuple(place.format(files) for place in data))
    assert list(Source(settings).documents()) == [text for text in TEXTS if text] * len(data)
    if len(data) == 1:
        source = Source(replace(settings, streaming=True))
        rows = source.stream()
        before = [row["text"] for row in islice(rows, 130)]
        after = Source(replace(settings, streaming=True)).stream()
        after.load_state_dict(json.loads(json.dumps(rows.state_dict())))
        assert [*before, *(row["text"] for row in after)] == TEXTS
    else:
        with pytest.raises(ConfigurationError, match="reads files or one data set"):
            Source(replace(settings, streaming=True))


def test_field_split_and_config_are_those_that_were_asked_for(files: Path) -> None:
    tenth = DataSettings(paths=(f"hf:{files / 'hub'}:train[:10%]",), text_field="body")
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
        Source(DataSettings(paths=(data.format(files=files),), text_field=field, streaming=streaming))


def test_places_become_absolute_and_names_stay(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    places = ("hf:saved:train", "a.jsonl", "hf:org/name:train", "./*.jsonl", "s3://x/*.jsonl")
    there = DataSettings(paths=places, tokenizer="hf:gpt2").absolute()
    absolute = (
        f"hf:{files}/saved:train",
        f"{files}/a.jsonl",
        "hf:org/name:train",
        f"{files}/*.jsonl",
        "s3://x/*.jsonl",
    )
    assert (there.paths, there.tokenizer) == (absolute, "hf:gpt2")


def test_a_corpus_is_the_same_from_files_and_from_datasets(files: Path) -> None:
    corpora = [
        build_corpus(DataSettings(paths=(place,)))
        for place in (str(files / "a.jsonl"), f"hf:{files / 'saved'}", f"hf:{files / 'hub'}")
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"format": "chat"}, "needs conversations"),
        ({"format": "chat", "paths": ("x",), "streaming": True}, "can't be combined with data.format='chat'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DataSettings(**settings)
