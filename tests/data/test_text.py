"""Every input of text, with files made here, and the error messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from diloco.data import read_documents, read_standard_library
from diloco.errors import ConfigurationError
from tests.lazy import Lazy

pyarrow, parquet = Lazy("pyarrow"), Lazy("pyarrow.parquet")


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_parquet(path: Path, **columns: Sequence[object]) -> Path:
    parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), path)
    return path


def test_a_folder_is_searched_to_the_bottom_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.py", "c.TXT", "a.rst"):
        write(tmp_path / name, name)
    for name in (".hidden.txt", ".git/x.txt", "a/.cache/x.txt", "picture.png", "no_suffix"):
        write(tmp_path / name, "not this")
    write(tmp_path / "empty.txt", "")
    assert list(read_documents([tmp_path])) == ["a.rst", "a/b/c.py", "a/z.md", "b.txt", "c.TXT"]


def test_a_separator_cuts_text_files_only(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "one\n\ntwo\nlines\n\n\n\nthree")
    records = write(tmp_path / "b.jsonl", json.dumps({"text": "not\n\ncut"}))
    documents = list(read_documents([text, records], document_separator="\n\n"))
    assert documents == ["one", "two\nlines", "three", "not\n\ncut"]


def test_jsonl_reads_the_named_field_and_skips_blank_lines(tmp_path: Path) -> None:
    # U+2028 and a carriage return alone end a line for str.splitlines, but not here
    lines = ['{"body": "a\u2028b", "id": 1}', "", '{"body": ""}', '{"id": 2, "body":\r"c\\n\\u00e9"}\r', "  "]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert list(read_documents([path], text_field="body")) == ["a\u2028b", "c\né"]


def test_parquet_reads_the_named_column_across_batches(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(2500)]
    path = write_parquet(tmp_path / "a.parquet", other=list(range(2500)), body=texts)
    assert list(read_documents([path], text_field="body")) == texts


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
