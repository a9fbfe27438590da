"""Every input of text, with files made here, and the error messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from diloco.data import FOLDER_SUFFIXES, read_documents, read_standard_library
from diloco.errors import ConfigurationError, DataError
from tests.lazy import Lazy

pyarrow, parquet = Lazy("pyarrow"), Lazy("pyarrow.parquet")


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_parquet(path: Path, **columns: Sequence[object]) -> Path:
    parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), path)
    return path


def test_a_file_is_a_document_and_keeps_every_character(tmp_path: Path) -> None:
    text = "one\r\n\n  zwei é 漢 \U0001f600\n"
    assert list(read_documents([write(tmp_path / "a.unknown", text)])) == [text]


def test_paths_are_read_in_the_order_given(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.txt", name) for name in "ba"]
    assert list(read_documents(files)) == ["b", "a"]
    assert list(read_documents(files[::-1])) == ["a", "b"]


def test_a_folder_is_searched_to_the_bottom_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.py", "c.TXT", "a.rst"):
        write(tmp_path / name, name)
    for name in (".hidden.txt", ".git/x.txt", "a/.cache/x.txt", "picture.png", "no_suffix"):
        write(tmp_path / name, "not this")
    write(tmp_path / "empty.txt", "")
    assert list(read_documents([tmp_path])) == ["a.rst", "a/b/c.py", "a/z.md", "b.txt", "c.TXT"]


def test_a_folder_may_mix_text_and_records(tmp_path: Path) -> None:
    write(tmp_path / "1.txt", "text")
    write(tmp_path / "2.jsonl", '{"text": "record"}\n')
    write_parquet(tmp_path / "3.parquet", text=["row"])
    assert list(read_documents([tmp_path])) == ["text", "record", "row"]


def test_a_separator_cuts_text_files_only(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "one\n\ntwo\nlines\n\n\n\nthree")
    records = write(tmp_path / "b.jsonl", json.dumps({"text": "not\n\ncut"}))
    documents = list(read_documents([text, records], document_separator="\n\n"))
    assert documents == ["one", "two\nlines", "three", "not\n\ncut"]


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent does not exist"):
        list(read_documents([tmp_path / "absent"]))


@pytest.mark.parametrize("content", [b"", b"\n\n"], ids=["nothing", "separators alone"])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"empty\.txt holds no text"):
        list(read_documents([write(tmp_path / "empty.txt", content)], document_separator="\n"))


def test_a_folder_without_text_says_which_files_count(tmp_path: Path) -> None:
    write(tmp_path / "data.bin", "x")
    with pytest.raises(DataError, match=r"holds no text.*\.jsonl.*\.txt") as caught:
        list(read_documents([tmp_path]))
    assert all(suffix in str(caught.value) for suffix in FOLDER_SUFFIXES)


def test_a_path_without_text_is_refused_though_others_have_some(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good.txt", "text"), write(tmp_path / "bad.txt", "")
    with pytest.raises(DataError, match=r"bad\.txt holds no text"):
        list(read_documents([good, bad]))


def test_bytes_that_are_not_utf8_are_named_with_their_offset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8: byte 5 is 0xff"):
        list(read_documents([write(tmp_path / "a.txt", "é abc"[:4].encode() + b"\xff")]))


def test_jsonl_reads_the_named_field_and_skips_blank_lines(tmp_path: Path) -> None:
    # U+2028 and a carriage return alone end a line for str.splitlines, but not here
    lines = ['{"body": "a\u2028b", "id": 1}', "", '{"body": ""}', '{"id": 2, "body":\r"c\\n\\u00e9"}\r', "  "]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert list(read_documents([path], text_field="body")) == ["a\u2028b", "c\né"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"a\.jsonl:2 is not JSON"),
        ("[" * 100_000, r"a\.jsonl:2 is not JSON"),
        ('["text"]', r"a\.jsonl:2 must be a JSON object with the fields of a record, got a list"),
        ('{"txt": "x", "id": 1}', r"a\.jsonl:2 has no field 'text'.*did you mean 'txt'\?"),
        ('{"text": 3}', r"a\.jsonl:2: the field 'text' holds int, not text"),
        ('{"text": null}', r"a\.jsonl:2: the field 'text' holds NoneType, not text"),
        (r'{"text": "half \ud800"}', r"a\.jsonl:2: the field 'text' holds U\+D800, half of a surrogate pair"),
        (b'{"text": "\xff"}', r"a\.jsonl is not UTF-8: byte 27 is 0xff"),
    ],
    ids=["broken", "deep", "list", "missing", "number", "null", "surrogate", "bytes"],
)
def test_bad_jsonl_is_named_by_file_and_line(tmp_path: Path, line: str | bytes, message: str) -> None:
    first = b'{"text": "good"}\n'
    path = write(tmp_path / "a.jsonl", first + (line.encode() if isinstance(line, str) else line) + b"\n")
    with pytest.raises(DataError, match=message):
        list(read_documents([path]))


def test_parquet_reads_the_named_column_across_batches(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(2500)]
    path = write_parquet(tmp_path / "a.parquet", other=list(range(2500)), body=texts)
    assert list(read_documents([path], text_field="body")) == texts


def test_bad_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no field 'text'.*did you mean 'texts'\?"):
        list(read_documents([write_parquet(tmp_path / "a.parquet", texts=["x"])]))
    with pytest.raises(DataError, match=r"b\.parquet, row 1: the field 'text' holds NoneType, not text"):
        list(read_documents([write_parquet(tmp_path / "b.parquet", text=["x", None])]))
    with pytest.raises(DataError, match=r"c\.parquet, row 0: the field 'text' holds int, not text"):
        list(read_documents([write_parquet(tmp_path / "c.parquet", text=[1])]))
    with pytest.raises(DataError, match=r"d\.parquet cannot be read as Parquet"):
        list(read_documents([write(tmp_path / "d.parquet", "not parquet at all")]))


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'diloco\[parquet\]'"):
        list(read_documents([path]))


def test_the_standard_library_leaves_out_what_differs_between_machines(tmp_path: Path) -> None:
    for name in ("json/tool.py", "abc.py", "zipfile.py"):
        write(tmp_path / name, name)
    left_out = "site-packages/a.py json/tests/a.py test/a.py idlelib/a.py _sysconfigdata_linux.py sitecustomize.py"
    for name in [*left_out.split(), "config-3.11-x86/a.py", "encodings/cp1250.py", "LICENSE.txt", "lib.so"]:
        write(tmp_path / name, "not this")
    write(tmp_path / "latin.py", b"# \xe9")
    write(tmp_path / "empty.py", b"")
    assert list(read_standard_library(tmp_path)) == ["abc.py", "json/tool.py", "zipfile.py"]


def test_no_paths_give_the_running_pythons_standard_library() -> None:
    documents = list(read_documents([]))
    assert documents == list(read_standard_library())
    assert Path(json.__file__).read_text("utf-8") in documents
    assert sum(len(document.encode()) for document in documents) > 4_000_000


@pytest.mark.parametrize("exists", [True, False])
def test_a_python_without_source_is_refused(tmp_path: Path, exists: bool) -> None:
    with pytest.raises(DataError, match=r"No standard library was found.*data\.paths"):
        list(read_standard_library(tmp_path if exists else tmp_path / "python311.zip"))
