"""Files of every type, encoding and compression: what is read of them, and how the others are named."""

import bz2
import functools
import gzip
import io
import json
import lzma
import os
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from diloco.data import DataSettings, Source, StandardLibrary, read_rows
from diloco.errors import ConfigurationError, DataError
from diloco.waiting import in_thread
from tests.lazy import Lazy

pyarrow, parquet = Lazy("pyarrow"), Lazy("pyarrow.parquet")

BOM = b"\xef\xbb\xbf"
LINES = b'{"text": "one"}\n{"text": "two"}\n'
INDENTED = json.dumps([{"text": "one"}, {"text": "two"}], indent=2).encode()
READ = ["one", "two"]


def in_zstandard(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def in_parquet(**columns: Any) -> bytes:
    packed = io.BytesIO()
    parquet.write_table(pyarrow.table(columns or {"text": READ}), packed)
    return packed.getvalue()


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def documents_of(places: list[Any], **settings: Any) -> list[str]:
    return list(Source(DataSettings(paths=tuple(map(str, places)), **settings)).documents())


COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": in_zstandard}
PACKED = (("a.jsonl", BOM + LINES, READ), ("a.json", INDENTED, READ), ("a.txt", b"one", ["one"]))
FILES: dict[str, tuple[str, bytes, list[str]]] = {
    "lines": ("a.jsonl", LINES, READ),
    "lines with a mark": ("a.jsonl", BOM + LINES, READ),
    "joined files with marks": ("a.jsonl", (BOM + LINES.splitlines()[0] + b"\n") * 2, ["one", "one"]),
    "lines of Windows": ("a.jsonl", LINES.replace(b"\n", b"\r\n"), READ),
    "empty lines": ("a.jsonl", b"\n \n" + LINES + b"\n\n", READ),
    "lines in .json with a mark": ("a.json", BOM + LINES, READ),
    "array": ("a.json", INDENTED, READ),
    "record": ("a.json", json.dumps({"text": "one"}, indent=1).encode(), ["one"]),
    "text with a mark": ("a.txt", BOM + b"one", ["one"]),
    "text without a suffix": ("README", "é".encode(), ["é"]),
    "parquet": ("a.parquet", b"", READ),
    **{
        f"{name}{suffix}": (f"{name}{suffix}", pack(content), documents)
        for suffix, pack in COMPRESSIONS.items()
        for name, content, documents in PACKED
    },
    "zstd after a frame to skip": ("a.jsonl.zst", b"\x50\x2a\x4d\x18\4\0\0\0size" + in_zstandard(LINES), READ),
    "two members": ("a.jsonl.gz", gzip.compress(LINES[:16]) + gzip.compress(LINES[16:]), READ),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_of_every_type_are_read_here_and_at_a_url(tmp_path: Path, kind: str) -> None:
    name, content, documents = FILES[kind]
    content = in_parquet() if name.endswith("parquet") else content
    write(tmp_path / name, content)
    fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/{name}", content)
    for place in (tmp_path / name, f"memory://{tmp_path.name}/{name}"):
        assert documents_of([place]) == documents


CUT_OFF = "cannot be read: .*(ended before|truncated|cut off)"
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "UTF-16": ("a.txt", "one".encode("utf-16"), "convert UTF-16 to UTF-8"),
    "UTF-16 of other letters": ("a.txt", "東京".encode("utf-16"), "is not UTF-8: byte 0 is 0xff"),
    "Latin 1": ("a.txt", BOM + "é".encode("latin-1"), "is not UTF-8: byte 3 is 0xe9"),
    "zip": ("a.zip", b"PK\3\4\0\0", "Unpack an archive"),
    "cut zstandard": ("a.jsonl.zst", in_zstandard(LINES)[:-3], CUT_OFF),
    "parquet by another name": ("a.txt", b"parquet", "give a table the suffix"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(LINES)[:-9], CUT_OFF),
    "cut parquet": ("a.parquet", b"PAR1 cut", "cannot be read"),
    "broken array": ("a.json", b'[{"text": "one"},', "is not JSON"),
    "array of texts": ("a.json", b'["one"]', "record 0 must be a JSON object"),
    "empty": ("a.jsonl", b"", "holds no text"),
    "gzip without a suffix": ("a.jsonl", gzip.compress(LINES), "is not UTF-8: byte 1 is 0x8b"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_named_with_its_cause(tmp_path: Path, kind: str) -> None:
    name, content, words = REFUSED[kind]
    write(tmp_path / name, in_parquet() if content == b"parquet" else content)
    with pytest.raises(DataError, match=rf"{name}.*({words})"):
        documents_of([tmp_path / name])


PLACES: dict[str, tuple[Any, str]] = {
    "missing": (lambda path: None, "does not exist"),
    "link to nothing": (lambda path: path.symlink_to("absent"), "does not exist"),
    "pipe": (os.mkfifo, "is a pipe, socket or device"),
    "empty folder": (lambda path: path.mkdir(), "holds no files to read"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_place_without_data_is_named(tmp_path: Path, kind: str) -> None:
    make, words = PLACES[kind]
    make(tmp_path / "a.jsonl")
    for read in (documents_of, read_rows):
        with pytest.raises(DataError, match=rf"a\.jsonl.*({words})"):
            list(read([str(tmp_path / "a.jsonl")]))


def test_a_pattern_and_a_url_name_many_files(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for number, text in enumerate(["one", "two", "three"]):
        write(tmp_path / f"{number}.jsonl", json.dumps({"text": text}))
        store.pipe(f"/{tmp_path.name}/b/{number}.jsonl.gz", gzip.compress(json.dumps({"text": text}).encode()))
    for place in (tmp_path / "[01].jsonl", f"memory://{tmp_path.name}/*/[01].jsonl.gz"):
        assert documents_of([place]) == ["one", "two"]
    assert documents_of([f"memory://{tmp_path.name}"]) == ["one", "two", "three"]
    with pytest.raises(DataError, match=r"memory://.*/no\*\.txt does not exist"):
        documents_of([f"memory://{tmp_path.name}/no*.txt"])


def test_a_broken_link_with_the_name_of_data_is_no_file_to_leave_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"b\.txt cannot be read: .*No such file"):
        documents_of([tmp_path])


BAD_ROWS: dict[str, tuple[str, bytes]] = {
    "null": ("a.jsonl", b'{"text": "one"}\n{"text": null}\n{"text": "two"}\n'),
    "no field": ("a.jsonl", b'{"text": "one"}\n{}\n{"text": "two"}\n'),
    "broken": ("a.jsonl", b'{"text": "one"}\n{"text": \n{"text": "two"}\n'),
    "not UTF-8": ("a.jsonl", b'{"text": "one"}\n{"text": "\xff"}\n{"text": "two"}\n'),
    "in an array": ("a.json", b'[{"text": "one"}, {"text": 3}, {"text": "two"}]'),
    "parquet": ("a.parquet", b""),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_refused_by_its_place_or_left_out_counted_and_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, content = BAD_ROWS[kind]
    (tmp_path / name).write_bytes(content or in_parquet(text=["one", None, "two"]))
    place = rf"{name}(:2|, record 1|, row 1)"
    with pytest.raises(DataError, match=rf"{place}.*--data\.skip-bad"):
        documents_of([tmp_path / name])
    assert documents_of([tmp_path / name], skip_bad=True) == READ
    assert "1 of 3 rows can't be used and are left out" in caplog.text
    assert caplog.text.count(name) >= 1


def test_jsonl_reads_the_named_field_and_skips_blank_lines(tmp_path: Path) -> None:
    # U+2028 and a carriage return alone end a line for str.splitlines, but not here
    lines = ['{"body": "a\u2028b", "id": 1}', "", '{"body": ""}', '{"id": 2, "body":\r"c\\n\\u00e9"}\r', "  "]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert documents_of([path], text_field="body") == ["a\u2028b", "c\né"]


def test_parquet_reads_the_named_column_across_batches(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(2500)]
    write(tmp_path / "a.parquet", in_parquet(other=list(range(2500)), body=texts))
    write(tmp_path / "0.parquet", in_parquet(body=pyarrow.array([], "string")))  # without rows
    assert documents_of([tmp_path], text_field="body") == texts


def test_the_standard_library_leaves_out_what_differs_between_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json/tool.py", "abc.py", "zipfile.py"):
        write(tmp_path / name, name)
    left_out = "site-packages/a.py json/tests/a.py test/a.py idlelib/a.py _sysconfigdata_linux.py sitecustomize.py"
    for name in [*left_out.split(), "config-3.11-x86/a.py", "encodings/cp1250.py", "LICENSE.txt", "lib.so"]:
        write(tmp_path / name, "not this")
    write(tmp_path / "latin.py", b"# \xe9")
    write(tmp_path / "empty.py", b"")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert [text for _, text in StandardLibrary().rows() if text] == ["abc.py", "json/tool.py", "zipfile.py"]


def test_what_follows_the_name_in_an_address_of_the_web_is_no_suffix(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.gz", gzip.compress(LINES))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        in_thread(server.serve_forever, "server")
        assert documents_of([f"http://127.0.0.1:{server.server_port}/a.jsonl.gz?download=true"]) == READ
        server.shutdown()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("https://me:hunter2@host/a.jsonl", r"https://\.\.\. has a password"),
        ("simplecache::sftp://me:hunter2@host/a.jsonl", "has a password"),
        ("reference::https://host/a.json", "can run code"),
        ("simplecache::reference://a.txt::https://host/a.json", "can run code"),
    ],
)
def test_a_url_may_have_no_password_and_run_no_code(place: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as refusal:
        DataSettings(paths=(place,))
    assert "hunter2" not in str(refusal.value)
    DataSettings(paths=("github://owner:repo@main/a.jsonl", "hf://datasets/owner/repo@main/a.jsonl"))
