"""Sources of documents: every kind reads from any position; what can't be read is reported."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.data import DataSettings, SourceSettings, build_corpus, open_source, open_stream, parse_hub_name
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
    datasets.Dataset.from_dict({"text": TEXTS}, split=datasets.Split.TEST).save_to_disk(str(folder / "named"))
    datasets.DatasetDict({"train": rows, "few": rows.select(range(5))}).save_to_disk(str(folder / "splits"))
    (folder / "hub").mkdir()
    rows.to_parquet(str(folder / "hub" / "train-00000-of-00001.parquet"))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "b.txt").write_text("\n\n".join(TEXTS))
    return folder


KINDS: dict[str, Callable[[Path], SourceSettings]] = {
    "jsonl": lambda f: SourceSettings(data=(str(f / "a.jsonl"),)),
    "text": lambda f: SourceSettings(data=(str(f / "b.txt"),), document_separator="\n\n"),
    "saved": lambda f: SourceSettings(data=(f"hf:{f / 'saved'}",)),
    "saved splits": lambda f: SourceSettings(data=(f"hf:{f / 'splits'}:train",)),
    "folder": lambda f: SourceSettings(data=(f"hf:{f / 'hub'}",)),
    "folder, streamed": lambda f: SourceSettings(data=(f"hf:{f / 'hub'}",), streaming=True),
    "loader": lambda f: SourceSettings(data=("hf:json",), data_files=(str(f / "a.jsonl"),)),
    "loader, streamed": lambda f: SourceSettings(data=("hf:json",), data_files=(str(f / "*.jsonl"),), streaming=True),
}
TWICE = {
    "two": lambda f: SourceSettings(data=(f"hf:{f / 'saved'}", str(f / "a.jsonl"))),
    "two the other way": lambda f: SourceSettings(data=(str(f / "a.jsonl"), f"hf:{f / 'saved'}")),
}


@pytest.mark.parametrize("kind", [*KINDS, *TWICE])
def test_records_come_in_one_order_from_any_place_on(kind: str, files: Path) -> None:
    source = open_source((KINDS | TWICE)[kind](files))
    records = list(source.records())
    assert [text for text in records if text] == [text for text in TEXTS if text] * (2 if kind in TWICE else 1)
    assert source.size in (None, len(records))
    for start in (0, 1, 99, 100, 251, len(records) - 1, len(records), len(records) + 5):
        assert list(source.records(start)) == records[start:]


def test_field_split_and_config_are_those_that_were_asked_for(files: Path) -> None:
    few = SourceSettings(data=(f"hf:{files / 'splits'}",), split="few", text_field="body")
    assert list(open_source(few).records()) == [text.upper() for text in TEXTS[:5]]
    tenth = SourceSettings(data=(f"hf:{files / 'hub'}:train[:10%]",))
    assert open_source(tenth).size == 25
    assert parse_hub_name("hf:a/b/c:d") == ("a/b", "c", "d")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("hf:nobody/nothing", "hub can't be reached|cannot be read by datasets"),
        ("hf:{files}/hub:test", "cannot be read by datasets: .*test"),
    ],
)
def test_what_is_not_there_is_told(data: str, words: str, files: Path) -> None:
    with pytest.raises(DataError, match=words):
        open_source(SourceSettings(data=(data.format(files=files),)))


def test_a_field_that_is_not_there_is_told(files: Path) -> None:
    for kind in ("saved", "folder", "folder, streamed"):
        about = KINDS[kind](files)
        with pytest.raises(DataError, match=r"no field 'txt' .*did you mean 'text'"):
            list(open_source(SourceSettings(data=about.data, text_field="txt", streaming=about.streaming)).records())


@pytest.mark.parametrize("name", ["hf:", "hf:a//b", "hf:a/b/c/d", "hf:./absent"])
def test_names_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="is neither the name of a data set, hf:NAME"):
        parse_hub_name(name)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"a": "x"}, "data.sources.a must be a table"),
        ({"a": {}}, "data.sources.a needs the key data, such as data ="),
        ({"a": {"data": "x", "wieght": 1}}, "key 'wieght'; did you mean 'weight'"),
        *(
            ({"a": {"data": "x", "weight": w}}, "a positive number")
            for w in (0, -1.0, math.nan, math.inf, 10**400, True)
        ),
        ({"a": {"data": [1]}}, "a string or a list of strings"),
        ({"a": {"data": "x", "split": ""}}, "a string that is not empty"),
        ({"a": {"data": "x", "streaming": 1}}, "true or false"),
    ],
)
def test_malformed_tables_are_refused(sources: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DataSettings(sources=sources)


def test_paths_and_sources_together_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="were both given"):
        DataSettings(paths=(Path("x"),), sources={"a": {"data": "x"}})


def test_places_become_absolute_and_names_stay(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    sources = {
        "a": {"data": ["hf:saved:train", "a.jsonl", "hf:org/name"], "weight": 2},
        "b": {"data": "hf:json", "data_files": ["./*.jsonl", "data/*.jsonl", "https://x/*.jsonl"]},
    }
    there = DataSettings(sources=sources).absolute().sources
    assert there["a"]["data"] == (f"hf:{files}/saved:train", f"{files}/a.jsonl", "hf:org/name")
    assert there["b"]["data_files"] == (f"{files}/*.jsonl", "data/*.jsonl", "https://x/*.jsonl")
    plain = DataSettings(paths=(Path("hf:saved"), Path("a.jsonl"), Path("hf:org/name:train")), tokenizer="hf:gpt2")
    assert list(map(str, plain.absolute().paths)) == [f"hf:{files}/saved", f"{files}/a.jsonl", "hf:org/name:train"]
    assert plain.absolute().tokenizer == "hf:gpt2"


def test_a_corpus_is_the_same_from_files_and_from_datasets(files: Path) -> None:
    corpora = [
        build_corpus(DataSettings(paths=(Path(place),)))
        for place in (str(files / "a.jsonl"), f"hf:{files / 'saved'}", f"hf:{files / 'hub'}")
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == 1


def test_a_stream_is_opened_without_reading_all_of_it(files: Path) -> None:
    class Counts:
        size = None
        read = 0

        def records(self, start: int = 0) -> Any:
            for text in TEXTS[start:]:
                Counts.read += 1
                yield text

    settings = DataSettings(paths=(files / "a.jsonl",), streaming=True, streaming_heldout=2, heldout_fraction=0.2)
    import diloco.data.corpus as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_source", lambda about: Counts())
        corpus = open_stream(settings)
    assert (corpus.heldout_documents, len(corpus.train)) == (2, 0)
    assert Counts.read < 40


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer": "bpe"}, "data.bpe_documents, the number"),
        ({"max_documents": 9}, "can't be combined with data.streaming"),
        ({"sharding": "contiguous"}, "can't be combined with data.streaming"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(files: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        open_stream(DataSettings(paths=(files / "a.jsonl",), streaming=True, **settings))


def test_a_bpe_for_a_stream_is_trained_on_its_first_documents(files: Path) -> None:
    settings = DataSettings(
        paths=(files / "a.jsonl",), streaming=True, tokenizer="bpe", bpe_vocab_size=260, bpe_documents=50
    )
    assert open_stream(settings).tokenizer.vocab_size == 260
    assert open_stream(settings).fingerprint == open_stream(settings).fingerprint


@pytest.mark.parametrize(
    ("data", "split", "expected"),
    [
        ("saved", None, TEXTS),
        ("saved", "train", TEXTS),
        ("saved", "train[:10%]", TEXTS[:25]),
        ("saved:train[36:]", None, TEXTS[36:]),
        ("named", None, TEXTS),
        ("named", "test[:2]", TEXTS[:2]),
        ("splits", "few[-3:]+train[:1]", [*TEXTS[2:5], TEXTS[0]]),
    ],
)
def test_a_part_of_what_was_saved_is_that_part(files: Path, data: str, split: str | None, expected: list[str]) -> None:
    source = open_source(SourceSettings(data=(f"hf:{files}/{data}",), split=split))
    assert list(source.records()) == expected
    assert list(source.records(1)) == expected[1:]


@pytest.mark.parametrize("data", ["saved:validation", "named:train", "splits:train[:ten]", "splits:other"])
def test_a_split_that_is_not_there_is_told(files: Path, data: str) -> None:
    with pytest.raises(DataError, match=r"has no split '\S+'. It has '\w+'.*, and parts of them such as \w+\[:10%\]"):
        open_source(SourceSettings(data=(f"hf:{files}/{data}",)))


@pytest.mark.parametrize(("data", "more"), [("splits:few", {"split": "train"}), ("a/b/en", {"config": "de"})])
def test_two_answers_to_one_question_are_refused(
    files: Path, data: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    with pytest.raises(ConfigurationError, match="Give only one"):
        open_source(SourceSettings(data=(f"hf:{data}",), **more))


@pytest.mark.parametrize("more", [{"split": "test"}, {"config": "en"}, {"data_files": "x.json"}])
def test_what_only_data_sets_have_is_refused_of_files(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"a sets {next(iter(more))}, which only hf: names can have"):
        DataSettings(sources={"a": {"data": "text/", **more}})
    DataSettings(sources={"a": {"data": ["text/", "hf:json"], **more}})
