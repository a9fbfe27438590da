"""What a table of a source says is done, or refused: nothing of it is passed over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import pytest

from diloco.data.settings import DataSettings, SourceSettings
from diloco.data.sources import open_source
from diloco.errors import ConfigurationError, DataError

TEXTS = [f"Row {number}." for number in range(40)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    rows.save_to_disk(str(folder / "alone"))
    datasets.Dataset.from_dict({"text": TEXTS}, split=datasets.Split.TEST).save_to_disk(str(folder / "named"))
    datasets.DatasetDict({"train": rows, "few": rows.select(range(30, 40))}).save_to_disk(str(folder / "splits"))
    return folder


@pytest.mark.parametrize(
    ("data", "split", "expected"),
    [
        ("alone", None, TEXTS),
        ("alone", "train", TEXTS),
        ("alone", "train[:10%]", TEXTS[:4]),
        ("alone:train[36:]", None, TEXTS[36:]),
        ("named", None, TEXTS),
        ("named", "test[:2]", TEXTS[:2]),
        ("splits", "few[-3:]+train[:1]", [*TEXTS[-3:], TEXTS[0]]),
    ],
)
def test_a_part_of_what_was_saved_is_that_part(files: Path, data: str, split: str | None, expected: list[str]) -> None:
    source = open_source(SourceSettings(data=(f"hf:{files}/{data}",), split=split))
    assert list(source.records()) == expected
    assert list(source.records(1)) == expected[1:]


@pytest.mark.parametrize("data", ["alone:validation", "named:train", "splits:train[:ten]", "splits:other"])
def test_a_split_that_is_not_there_is_told(files: Path, data: str) -> None:
    with pytest.raises(DataError, match=r"has no split '\S+'. It has '\w+'.*, and parts of them such as \w+\[:10%\]"):
        open_source(SourceSettings(data=(f"hf:{files}/{data}",)))


@pytest.mark.parametrize(("data", "more"), [("splits:few", {"split": "train"}), ("a/b/en", {"config": "de"})])
def test_two_answers_to_one_question_are_refused(
    files: Path, data: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    with pytest.raises(ConfigurationError, match="give only one"):
        open_source(SourceSettings(data=(f"hf:{data}",), **more))


@pytest.mark.parametrize("more", [{"split": "test"}, {"config": "en"}, {"data_files": "x.json"}])
def test_what_only_data_sets_have_is_refused_of_files(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"a has {next(iter(more))}, which only hf: names can have"):
        DataSettings(sources={"a": {"data": "text/", **more}})
    DataSettings(sources={"a": {"data": ["text/", "hf:json"], **more}})


@pytest.mark.parametrize("weight", [0, -1.0, math.nan, math.inf, 10**400, True])
def test_weights_are_positive_numbers(weight: Any) -> None:
    with pytest.raises(ConfigurationError, match="a positive number"):
        DataSettings(sources={"a": {"data": "x", "weight": weight}})
