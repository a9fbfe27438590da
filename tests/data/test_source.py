"""Documents of files of every type, encoding and compression, and of data sets: in one order, also from a saved state
on; what can't be read is named with its place and cause."""

import bz2
import errno
import functools
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from diloco.data import DataSettings, Source, build_corpus
from diloco.errors import ConfigurationError, DataError
from diloco.waiting import in_thread
from tests.lazy import Lazy
from tests.runs import numbered

datasets, pyarrow, parquet = Lazy("datasets"), Lazy("pyarrow"), Lazy("pyarrow.parquet")

BOM = b"\xef\xbb\xbf"
LINES = b'{"text": "one"}\n{"text": "two"}\n'
INDENTED = json.dumps([{"text": "one"}, {"text": "two"}], indent=2).encode()
READ = ["one", "two"]


def in_parquet(**columns: Any) -> bytes:
    packed = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), packed)
    return packed.getvalue()


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def documents_of(*places: Any, **settings: Any) -> list[str]:
    return list(Source(DataSettings(paths=tuple(map(str, places)), **settings)).documents())


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
PACKED = (("a.jsonl", BOM + LINES, READ), ("a.json", INDENTED, READ), ("a.txt", b"one", ["one"]))
FILES: dict[str, tuple[str, bytes, list[str]]] = {
    "lines": ("a.jsonl", LINES, READ),
    "joined files with marks": ("a.jsonl", (BOM + LINES.splitlines()[0] + b"\n") * 2, ["one", "one"]),
    "lines of Windows": ("a.jsonl", LINES.replace(b"\n", b"\r\n"), READ),
    "empty lines and texts": ("a.jsonl", b'\n \n{"text": ""}\n' + LINES + b"\n\n", READ),
    "other ends of lines": ("a.jsonl", '{"id": 1, "text":\r"a\u2028b\\n\\u00e9"}\r'.encode(), ["a\u2028b\né"]),
    "lines in .json with a mark": ("a.json", BOM + LINES, READ),
    "record": ("a.json", json.dumps({"text": "one"}, indent=1).encode(), ["one"]),
    "text with a mark": ("a.txt", BOM + b"one", ["one"]),
    "text without a suffix": ("README", "é".encode(), ["é"]),
    "parquet": ("a.parquet", b"", READ),
    **{
        f"{name}{suffix}": (f"{name}{suffix}", pack(content), documents)
        for suffix, pack in COMPRESSIONS.items()
        for name, content, documents in PACKED
    },
    "two members": ("a.jsonl.gz", gzip.compress(LINES[:16]) + gzip.compress(LINES[16:]), READ),
    "two frames": ("a.jsonl.zst", zstandard.compress(LINES[:16]) + zstandard.compress(LINES[16:]), READ),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_of_every_type_are_read_here_and_at_a_url(tmp_path: Path, kind: str) -> None:
    name, content, documents = FILES[kind]
    content = content or in_parquet(text=READ)
    write(tmp_path / name, content)
    fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/{name}", content)
    for place in (tmp_path / name, f"memory://{tmp_path.name}/{name}"):
        assert documents_of(place) == documents


CUT_OFF = "cannot be read: .*ended before"
REFUSED: dict[str, tuple[str, Any, str]] = {
    "UTF-16": ("a.txt", "one".encode("utf-16"), "convert UTF-16 to UTF-8"),
    "Latin 1": ("a.txt", "é".encode("latin-1"), "cannot be read as UTF-8: .*can't decode byte 0xe9.*iconv"),
    "zip": ("a.zip", b"PK\3\4\0\0", "Unpack an archive"),
    "parquet by another name": ("a.txt", b"PAR1\x15\0", "give a table the suffix"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(LINES)[:-9], CUT_OFF),
    "cut zstandard": ("a.jsonl.zst", zstandard.compress(LINES)[:-3], CUT_OFF),
    "zstandard, damaged": ("a.jsonl.zst", b"(\xb5/\xfd" + bytes(range(99)), "cannot be read: ZstdError"),
    "cut parquet": ("a.parquet", b"PAR1 cut", "cannot be read"),
    "empty": ("a.jsonl", b"", "holds no text"),
    "broken array": ("a.json", b'[{"text": "one"},', "is not JSON"),
    "array of texts": ("a.json", b'["one"]', "record 0 must be a JSON object"),
    "nothing but null": ("a.jsonl", b'{"text": null}\n', "holds no text"),
    "lines of UTF-16": ("a.jsonl", LINES.decode().encode("utf-16"), ":1 holds zero bytes.*Convert UTF-16"),
    "table": ("a.csv", b"text,label\none,1\n", "as --data hf:FOLDER"),
    "packed table": ("a.tsv.gz", gzip.compress(b"text\none\n"), "as --data hf:FOLDER"),
    "number in an array": ("a.json", b'[{"text": "one"}, {"text": 3}]', ", record 1: the field 'text' holds int"),
    "half of a pair": ("a.jsonl", b'{"text": "\\ud800"}', ":1: the field 'text' holds half of a surrogate pair"),
    "a conversation": (
        "a.jsonl",
        b'{"messages": [{"role": "user"}]}\n',
        ":1 is a conversation .*`diloco finetune` learns",
    ),
    "no field": ("a.jsonl", b'{"text": "one"}\n{"txt": 1}\n', ":2 has no field 'text' .*did you mean 'txt'"),
    "broken": ("a.jsonl", b'{"text": "one"}\n{"text": \n', ":2 is not JSON"),
    "not UTF-8": ("a.jsonl", b'{"text": "\xff"}\n', ":1 cannot be read as UTF-8: .*can't decode byte 0xff.*iconv"),
    "a number in parquet": ("a.parquet", b"", ", row 0: the field 'text' holds int"),
    "missing": ("a.jsonl", lambda path: None, "does not exist"),
    "link to nothing": ("a.jsonl", lambda path: path.symlink_to("absent"), "does not exist"),
    "pipe": ("a.jsonl", os.mkfifo, "is a pipe, socket or device"),
    "empty folder": ("a.jsonl", lambda path: path.mkdir(), "holds no files to read"),
    "link in a folder": ("a", lambda path: write(path / "b.txt", "").with_name("c.txt").symlink_to("x"), "c.txt"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_named_with_its_place_and_cause(tmp_path: Path, kind: str) -> None:
    name, content, words = REFUSED[kind]
    path = tmp_path / name
    if callable(content):
        content(path)
    else:
        write(path, content or (b"" if name == "a.jsonl" else in_parquet(text=[3])))
    with pytest.raises(DataError, match=rf"{name}.*({words})"):
        documents_of(path)


@pytest.mark.parametrize("streaming", [False, True])
def test_null_is_left_out_as_an_empty_text_is_and_the_first_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    lines = [{"text": "one"}, {"text": None}, {"text": ""}, {"text": None}, {"text": "two"}]
    write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write(tmp_path / "b.parquet", in_parquet(text=["three", None]))
    source = Source(DataSettings(paths=(str(tmp_path),), streaming=streaming))
    if streaming:
        assert [row["text"] for row in source.stream() if row["text"]] == ["one", "two", "three"]
    else:
        assert list(source.documents()) == ["one", "two", "three"]
    assert caplog.text.count("is null") == 1
    assert f"{tmp_path / 'a.jsonl'}:2: the field 'text' is null" in caplog.text


def test_a_folder_that_can_not_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "closed").mkdir()
    for name in ("a.txt", "closed/b.txt"):
        write(tmp_path / name, name)
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert documents_of(tmp_path) == ["a.txt"]
    assert f"{tmp_path / 'closed'} is not read: Permission denied." in caplog.text


def test_a_pattern_and_a_url_name_many_files(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for number, text in enumerate(["one", "two", "three"]):
        write(tmp_path / f"{number}.jsonl", json.dumps({"text": text}))
        store.pipe(f"/{tmp_path.name}/b/{number}.jsonl.gz", gzip.compress(json.dumps({"text": text}).encode()))
    for place in (tmp_path / "[01].jsonl", f"memory://{tmp_path.name}/*/[01].jsonl.gz"):
        assert documents_of(place) == ["one", "two"]
    assert documents_of(f"memory://{tmp_path.name}") == ["one", "two", "three"]
    with pytest.raises(DataError, match=r"memory://.*/no\*\.txt does not exist"):
        documents_of(f"memory://{tmp_path.name}/no*.txt")


def test_parquet_reads_the_named_column_across_batches(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(2500)]
    write(tmp_path / "a.parquet", in_parquet(other=list(range(2500)), body=texts))
    write(tmp_path / "0.parquet", in_parquet(body=pyarrow.array([], "string")))  # without rows
    assert documents_of(tmp_path, text_field="body") == texts


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
    assert documents_of() == ["abc.py", "json/tool.py", "zipfile.py"]


def test_what_follows_the_name_in_an_address_of_the_web_is_no_suffix(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.gz", gzip.compress(LINES))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        in_thread(server.serve_forever, "server")
        assert documents_of(f"http://127.0.0.1:{server.server_port}/a.jsonl.gz?download=true") == READ
        server.shutdown()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"paths": ("https://me:hunter2@host/a.jsonl",)}, r"https://\.\.\. has a password"),
        ({"paths": ("simplecache::sftp://me:hunter2@host/a.jsonl",)}, "has a password"),
        ({"paths": ("reference::https://host/a.json",)}, "can run code"),
        ({"paths": ("simplecache::reference://a.txt::https://host/a.json",)}, "can run code"),
        ({"format": "chat"}, "needs conversations"),
        ({"format": "chat", "paths": ("x",), "streaming": True}, "can't be combined with data.format='chat'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as refusal:
        DataSettings(**settings)
    assert "hunter2" not in str(refusal.value)
    DataSettings(paths=("github://owner:repo@main/a.jsonl", "hf://datasets/owner/repo@main/a.jsonl"))


TEXTS = [*numbered(250), "", "last"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same texts as files and as data sets, without a connection."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        datasets.disable_progress_bars()
        rows = datasets.Dataset.from_dict({"text": TEXTS, "body": [text.upper() for text in TEXTS]})
        rows.save_to_disk(str(folder / "saved"))
        (folder / "hub").mkdir()
        for number in range(2):  # at a place that is no multiple of a block
            half = rows.select(range(100) if number == 0 else range(100, len(TEXTS)))
            half.to_parquet(str(folder / "hub" / f"train-0000{number}-of-00002.parquet"))
        write(folder / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        for number, text in enumerate(TEXTS):
            write(folder / f"{number:03}.txt", text)
        yield folder


@pytest.mark.parametrize(
    "data", [("{}/a.jsonl",), ("{}/*.txt",), ("hf:{}/saved",), ("hf:{}/hub",), ("hf:{}/saved", "{}/a.jsonl")]
)
def test_records_come_in_one_order_also_from_a_saved_state_on(data: tuple[str, ...], files: Path) -> None:
    settings = DataSettings(paths=tuple(place.format(files) for place in data))
    assert list(Source(settings).documents()) == [text for text in TEXTS if text] * len(data)
    streaming = replace(settings, streaming=True)
    if len(data) > 1:
        with pytest.raises(ConfigurationError, match="reads files or one data set"):
            Source(streaming)
        return
    assert build_corpus(settings).fingerprint == build_corpus(DataSettings(paths=(str(files / "a.jsonl"),))).fingerprint
    rows, after = Source(streaming).stream(), Source(streaming).stream()
    before = [row["text"] for row in islice(rows, 130)]
    after.load_state_dict(json.loads(json.dumps(rows.state_dict())))
    assert [*before, *(row["text"] for row in after)] == TEXTS


def test_field_split_and_config_are_those_that_were_asked_for(files: Path) -> None:
    assert documents_of(f"hf:{files / 'hub'}:train[:10%]", text_field="body") == [text.upper() for text in TEXTS[:25]]
    assert len(documents_of(f"hf:{files / 'saved'}:train")) == len(list(filter(None, TEXTS)))
    for split in ("test", "train[:10%]"):  # which the library does not look for in what it has saved
        with pytest.raises(ConfigurationError, match="holds the split train alone, not"):
            documents_of(f"hf:{files / 'saved'}:{split}")


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        ("hf:nobody/nothing", "text", "cannot be read: .* and the connection to the hub"),
        ("hf:{files}/hub:test", "text", "cannot be read: .*test"),
        ("hf:{files}/saved", "txt", "cannot be read: .*txt"),
        ("hf:{files}/hub", "txt", "cannot be read: .*txt"),
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
    absolute = (f"hf:{files}/saved:train", f"{files}/a.jsonl", places[2], f"{files}/*.jsonl", places[4])
    assert (there.paths, there.tokenizer) == (absolute, "hf:gpt2")


class CachedListings(AbstractFileSystem):
    """A store that keeps what it has listed, with sizes, as those of S3 and Google do."""

    protocol = "cached"
    cachable = True
    folder: Path

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        path = self._strip_protocol(path)
        listed = self.dircache.get(path)
        if listed is None:
            place = self.folder / path
            if not place.exists():
                raise FileNotFoundError(path)
            files = sorted(place.iterdir()) if place.is_dir() else [place]
            listed = self.dircache[path] = [
                {"name": str(each.relative_to(self.folder)), "size": each.stat().st_size, "type": kind}
                for each in files
                for kind in ["directory" if each.is_dir() else "file"]
            ]
        return listed if detail else [each["name"] for each in listed]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return CachedFile(self, path, mode, **options)


class CachedFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return (CachedListings.folder / self.path).read_bytes()[start:end]


@pytest.mark.parametrize(
    "place", ["cached://b", "cached://b/*.jsonl", "cached://b/a.jsonl", "simplecache::cached://b/a.jsonl"]
)
def test_what_was_written_since_the_last_reading_is_read(place: str, tmp_path: Path) -> None:
    fsspec.register_implementation("cached", CachedListings, clobber=True)
    CachedListings.folder = tmp_path
    write(tmp_path / "b" / "a.jsonl", LINES)
    assert documents_of(place) == READ
    write(tmp_path / "b" / "a.jsonl", LINES + LINES)
    write(tmp_path / "b" / "c.jsonl", LINES)
    assert documents_of(place) == (2 * READ if place.endswith("a.jsonl") else 3 * READ)
