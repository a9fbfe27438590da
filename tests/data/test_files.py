"""Files of every type, encoding and compression: what is read of them, and how the others are named."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from diloco.data import DataSettings, build_corpus, heldout_rows, read_documents, read_records
from diloco.errors import DataError, NoDataError
from tests.lazy import Lazy

pyarrow, parquet = Lazy("pyarrow"), Lazy("pyarrow.parquet")

BOM = b"\xef\xbb\xbf"
LINES = b'{"text": "one"}\n{"text": "two"}\n'
INDENTED = json.dumps([{"text": "one"}, {"text": "two"}], indent=2).encode()
READ = ["one", "two"]


def in_zstandard(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def in_tar(content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        about = tarfile.TarInfo("a.jsonl")
        about.size = len(content)
        archive.addfile(about, io.BytesIO(content))
    return packed.getvalue()


def in_zip(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.jsonl", content)
    return packed.getvalue()


def in_parquet(**columns: Any) -> bytes:
    packed = io.BytesIO()
    parquet.write_table(pyarrow.table(columns or {"text": READ}), packed)
    return packed.getvalue()


COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": in_zstandard}
PACKED = (("a.jsonl", BOM + LINES, READ), ("a.json", INDENTED, READ), ("a.txt", b"one", ["one"]))
FILES: dict[str, tuple[str, bytes, list[str]]] = {
    "lines": ("a.jsonl", LINES, READ),
    "lines in upper case": ("A.JSONL", LINES, READ),
    "ndjson": ("a.ndjson", LINES, READ),
    "lines with a mark": ("a.jsonl", BOM + LINES, READ),
    "jsonlines": ("a.jsonlines", LINES, READ),
    "joined files with marks": ("a.jsonl", (BOM + LINES.splitlines()[0] + b"\n") * 2, ["one", "one"]),
    "lines of Windows": ("a.jsonl", LINES.replace(b"\n", b"\r\n"), READ),
    "no last line end": ("a.jsonl", LINES[:-1], READ),
    "empty lines": ("a.jsonl", b"\n \n" + LINES + b"\n\n", READ),
    "a long line": ("a.jsonl", b'{"text": "' + b"x" * (3 << 20) + b'"}', ["x" * (3 << 20)]),
    "lines in .json": ("a.json", LINES, READ),
    "lines in .json with a mark": ("a.json", BOM + LINES, READ),
    "array": ("a.json", INDENTED, READ),
    "array in one line": ("a.json", json.dumps([{"text": "one"}, {"text": "two"}]).encode(), READ),
    "array with a mark": ("a.json", BOM + INDENTED, READ),
    "array of one in lines": ("a.json", b'[\n{"text": "one"}\n]', ["one"]),
    "record": ("a.json", json.dumps({"text": "one"}, indent=1).encode(), ["one"]),
    "record in a line": ("a.json", b'{"text": "one"}', ["one"]),
    "text": ("a.txt", b"one", ["one"]),
    "text with a mark": ("a.txt", BOM + b"one", ["one"]),
    "text without a suffix": ("README", "é".encode(), ["é"]),
    "parquet": ("a.parquet", b"", READ),
    "parquet, zstd": ("a.parquet.zst", b"", READ),
    **{
        f"{name}{suffix}": (f"{name}{suffix}", pack(content), documents)
        for suffix, pack in COMPRESSIONS.items()
        for name, content, documents in PACKED
    },
    "gzip by its long name": ("a.jsonl.gzip", gzip.compress(LINES), READ),
    "zstd by its long name": ("a.jsonl.zstd", in_zstandard(LINES), READ),
    "zstd after a frame to skip": ("a.jsonl.zst", b"\x50\x2a\x4d\x18\4\0\0\0size" + in_zstandard(LINES), READ),
    "two members": ("a.jsonl.gz", gzip.compress(LINES[:16]) + gzip.compress(LINES[16:]), READ),
    "two frames": ("a.jsonl.zst", in_zstandard(LINES[:16]) + in_zstandard(LINES[16:]), READ),
    "compressed without a suffix": ("a.jsonl", gzip.compress(LINES), READ),
    "suffix without compression": ("a.jsonl.gz", LINES, READ),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_of_every_type_are_read(tmp_path: Path, kind: str) -> None:
    name, content, documents = FILES[kind]
    if ".parquet" in name:
        content = in_parquet() if name.endswith("parquet") else in_zstandard(in_parquet())
    (tmp_path / name).write_bytes(content)
    assert list(read_documents([tmp_path / name])) == documents


def test_a_separator_divides_compressed_text_after_its_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(BOM + b"one\n\ntwo"))
    assert list(read_documents([tmp_path / "a.txt.gz"], document_separator="\n\n")) == READ


CUT_OFF = "cannot be read: .*(ended before|truncated|cut off)"
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "UTF-16": ("a.txt", "one".encode("utf-16"), "begins like UTF-16 or UTF-32 text. Convert it to UTF-8"),
    "UTF-16 lines": ("a.jsonl", LINES.decode().encode("utf-16"), "begins like UTF-16"),
    "UTF-16 in .json": ("a.json", LINES.decode().encode("utf-16"), "begins like UTF-16"),
    "UTF-16, compressed": ("a.jsonl.gz", gzip.compress(LINES.decode().encode("utf-16")), "begins like UTF-16"),
    "UTF-16 without a mark": ("a.txt", "one two".encode("utf-16-le"), "looks like UTF-16 text"),
    "UTF-16 without a mark, big": ("a.txt", "one two".encode("utf-16-be"), "looks like UTF-16 text"),
    "UTF-32": ("a.txt", "one".encode("utf-32-be"), "looks like UTF-16 text|begins like"),
    "Latin 1": ("a.txt", BOM + "é".encode("latin-1"), "is not UTF-8: byte 3 is 0xe9"),
    "Latin 1, compressed": ("a.txt.gz", gzip.compress("aé".encode("latin-1")), "is not UTF-8: byte 1 is 0xe9"),
    "zip": ("a.jsonl", b"zip", "is a zip archive. Give the files in it"),
    "tar": ("a.tar", b"tar", "is a tar archive"),
    "tar.gz": ("a.tar.gz", b"tar.gz", "is a tar archive"),
    "parquet by another name": ("a.txt", b"parquet", "is a Parquet file. Give it the suffix"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(LINES)[:-9], CUT_OFF),
    "cut bzip2": ("a.jsonl.bz2", bz2.compress(LINES)[:-9], CUT_OFF),
    "cut xz": ("a.jsonl.xz", lzma.compress(LINES)[:-9], CUT_OFF),
    "cut zstandard": ("a.jsonl.zst", in_zstandard(LINES)[:-5], CUT_OFF),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(LINES)[:20] + b"\0" * 30, "cannot be read"),
    "cut parquet": ("a.parquet", b"PAR1 cut", "cannot be read as Parquet"),
    "broken array": ("a.json", b'[{"text": "one"},', "is not JSON"),
    "broken record": ("a.json", b'{\n "text": "one",\n}', "is not JSON"),
    "number": ("a.json", b"3", "must be a JSON object"),
    "array of texts": ("a.json", b'["one"]', "record 0 must be a JSON object"),
    "not a number": ("a.jsonl", b'{"text": NaN}', ":1: the field 'text' holds float"),
    "empty": ("a.jsonl", b"", "holds no text"),
    "empty .json": ("a.json", b"\n", "holds no text"),
    "empty, compressed": ("a.txt.gz", gzip.compress(b""), "holds no text"),
    "empty array": ("a.json", b"[]", "holds no text"),
    "empty parquet": ("a.parquet", b"", "cannot be read as Parquet"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_named_with_its_cause(tmp_path: Path, kind: str) -> None:
    name, content, words = REFUSED[kind]
    special = {b"zip": lambda: in_zip(LINES), b"tar": lambda: in_tar(LINES), b"parquet": in_parquet}
    special[b"tar.gz"] = lambda: gzip.compress(in_tar(LINES))
    (tmp_path / name).write_bytes(special.get(content, lambda: content)())
    with pytest.raises(DataError, match=rf"{name}.*({words})"):
        list(read_documents([tmp_path / name]))


PLACES: dict[str, tuple[Any, str]] = {
    "missing": (lambda path: None, "does not exist"),
    "link to nothing": (lambda path: path.symlink_to("absent"), r"a link to absent\) does not exist"),
    "link to itself": (lambda path: path.symlink_to(path), "cannot be read: Too many levels"),
    "pipe": (os.mkfifo, "is a pipe, socket or device"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a pipe, socket or device"),
    "empty folder": (lambda path: path.mkdir(), "holds no text"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_place_without_data_is_named(tmp_path: Path, kind: str) -> None:
    make, words = PLACES[kind]
    make(tmp_path / "a.jsonl")
    for read in (read_documents, read_records):
        with pytest.raises(DataError, match=rf"a\.jsonl.*({words.replace('text', '(text|records)')})"):
            list(read([tmp_path / "a.jsonl"]))


@pytest.mark.parametrize("path", ["x" * 300, "~nobody-of-this-name/a.txt"])
def test_a_name_that_no_file_can_have_is_an_error_of_the_data(path: str) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(read_documents([Path(path)]))


def test_a_folder_may_be_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    (tmp_path / "x.jsonl" / "a.jsonl").write_bytes(LINES)
    assert list(read_documents([tmp_path])) == list(read_documents([tmp_path / "x.jsonl"])) == READ


def test_a_folder_names_once_what_it_holds_besides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.jsonl.gz", "b.txt"):
        (tmp_path / name).write_bytes(gzip.compress(LINES) if name.endswith("gz") else b"three")
    for name in ("c.csv", "d.json", ".hidden.txt"):
        (tmp_path / name).write_bytes(LINES)
    (tmp_path / ".git").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    for _ in range(2):
        assert list(read_documents([tmp_path])) == [*READ, "three"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert all(name in told[0] for name in (".git/", ".hidden.txt", "link/", "c.csv", "d.json", "and 1 more"))
    assert len(list(read_records([tmp_path]))) == 2


def test_a_broken_link_with_the_name_of_data_is_no_file_to_leave_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"b\.txt cannot be read: No such file"):
        list(read_documents([tmp_path]))


@pytest.mark.parametrize("name", ["data", "a.jsonl.txt", "a.jsonl.1"])
def test_records_that_are_read_as_text_are_named(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / name).write_bytes(LINES)
    assert list(read_documents([tmp_path / name])) == [LINES.decode()]
    assert f"{name} is read as one text, but looks like JSON Lines" in caplog.text


def test_bad_rows_are_counted_where_not_all_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": null}\n' + LINES)
    documents = read_documents([tmp_path / "a.jsonl"], skip_bad=True)
    assert next(documents) == "one"
    documents.close()  # type: ignore[attr-defined]
    assert "1 of 2 rows can't be used and are left out" in caplog.text


@pytest.mark.parametrize("form", [b"%s\n%s", b"[%s, %s]"])
def test_a_key_that_is_there_twice_is_named_once(tmp_path: Path, form: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.json").write_bytes(form % (2 * (b'{"text": "one", "text": "two"}',)))
    assert list(read_documents([tmp_path / "a.json"])) == ["two", "two"]
    (told,) = [record.getMessage() for record in caplog.records]
    assert "a.json: an object has the field 'text' twice; the last one is used" in told


BAD_ROWS: dict[str, tuple[str, bytes]] = {
    "null": ("a.jsonl", b'{"text": "one"}\n{"text": null}\n{"text": "two"}\n'),
    "no field": ("a.jsonl", b'{"text": "one"}\n{}\n{"text": "two"}\n'),
    "broken": ("a.jsonl", b'{"text": "one"}\n{"text": \n{"text": "two"}\n'),
    "not UTF-8": ("a.jsonl", b'{"text": "one"}\n{"text": "\xff"}\n{"text": "two"}\n'),
    "surrogate": ("a.jsonl", b'{"text": "one"}\n{"text": "\\ud800"}\n{"text": "two"}\n'),
    "no object": ("a.jsonl", b'{"text": "one"}\n["text"]\n{"text": "two"}\n'),
    "in an array": ("a.json", b'[{"text": "one"}, {"text": 3}, {"text": "two"}]'),
    "in lines of .json": ("a.json", b'{"text": "one"}\n{"text": \n{"text": "two"}\n'),
    "parquet": ("a.parquet", b""),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_refused_by_its_place_or_left_out_counted_and_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, content = BAD_ROWS[kind]
    (tmp_path / name).write_bytes(content or in_parquet(text=["one", None, "two"]))
    place = rf"{name}(:2|, record 1|, row 1| is not UTF-8: byte 26)"
    with pytest.raises(DataError, match=rf"{place}.*--data\.skip-bad"):
        list(read_documents([tmp_path / name]))
    assert list(read_documents([tmp_path / name], skip_bad=True)) == READ
    assert "1 of 3 rows can't be used and are left out" in caplog.text
    assert caplog.text.count(name) >= 1


def test_a_corpus_is_that_of_its_good_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    lines = [json.dumps({"text": f"document {number}"}) for number in range(40)]
    good.write_text("\n".join(lines))
    bad.write_text("\n".join(['{"text": null}', *lines[:20], "[]", *lines[20:]]))
    fingerprints = {
        build_corpus(DataSettings(paths=(path,), heldout_fraction=0.3, skip_bad=True)).fingerprint
        for path in (good, bad)
    }
    assert len(fingerprints) == 1
    assert "2 of 42 rows can't be used" in caplog.text
    tables = {"a": {"data": str(bad), "skip_bad": True}}
    assert build_corpus(DataSettings(sources=tables, heldout_fraction=0.3)).train_documents > 0


def test_rows_of_a_library_keep_their_numbers_when_one_is_left_out(tmp_path: Path) -> None:
    import datasets

    from diloco.data import SourceSettings, open_source

    datasets.Dataset.from_dict({"text": ["one", None, "two"]}).save_to_disk(str(tmp_path / "saved"))
    about = SourceSettings(data=(f"hf:{tmp_path}/saved",), skip_bad=True)
    assert list(open_source(about).records()) == ["one", "", "two"]
    assert list(open_source(about).records(2)) == ["two"]


def test_no_records_at_all_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(NoDataError, match="holds no records"):
        heldout_rows(DataSettings(), None, 8, [tmp_path / "a.jsonl"])  # type: ignore[arg-type]
