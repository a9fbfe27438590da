"""Text that unpacks to any size is refused by name before it fills the memory, whatever it is packed in."""

import bz2
import gzip
import io
import json
import lzma
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from diloco.data import DataSettings, Source
from diloco.errors import DataError
from tests.lazy import Lazy

pyarrow, parquet = Lazy("pyarrow"), Lazy("pyarrow.parquet")

LIMIT = 1000
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_RECORD_BYTES", "MAX_FILE_BYTES"):
        monkeypatch.setattr(sys.modules[Source.__module__], name, LIMIT)


def read(path: Path, **settings: Any) -> list[str]:
    return list(Source(DataSettings(paths=(str(path),), **settings)).documents())


def line(size: int) -> bytes:
    return b'{"text": "%s"}' % (b"a" * (size - 12))


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "txt", "py", "tar"])
def test_what_is_too_long_is_refused_by_name_and_what_just_fits_is_read(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}{suffix}"
    lines = kind in ("jsonl", "ndjson")
    for size in (LIMIT, LIMIT + 1):
        content = line(size) if "json" in kind else b"a" * size
        path.write_bytes(PACKED[suffix](line(20) + b"\n" + content if lines else content))
        if size == LIMIT:
            assert len(read(path)) == (2 if lines else 1)
        else:
            where = f"{path}:2 has more than 1.0 kB, which a line" if lines else f"{path} holds more than 1.0 kB"
            with pytest.raises(DataError, match=where):
                read(path)


def test_a_text_that_a_table_holds_once_for_all_its_rows_is_not_unpacked_for_all_at_once(tmp_path: Path) -> None:
    packed = io.BytesIO()
    column = pyarrow.array(["a" * (LIMIT + 1)] * 5000)
    parquet.write_table(pyarrow.table({"text": column}), packed)
    (tmp_path / "a.parquet").write_bytes(packed.getvalue())
    with pytest.raises(DataError, match=r"a\.parquet, row 0: the field 'text' holds 1\.0 kB, but a document"):
        read(tmp_path / "a.parquet")


def test_a_message_is_a_text_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a" * LIMIT}]}))
    rows = Source(DataSettings(paths=(str(path),), format="chat", tokenizer="x")).rows()
    with pytest.raises(DataError, match=":1 has more than"):
        next(rows)


def test_a_line_without_an_end_takes_no_more_memory_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[Source.__module__], "MAX_RECORD_BYTES", 1 << 20)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", 1) as file:
        for _ in range(200):
            file.write(b"a" * (1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"has more than 1\.0 MB"):
        read(tmp_path / "a.jsonl.gz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"
