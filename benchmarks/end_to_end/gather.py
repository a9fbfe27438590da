"""Real text that every machine with this project has: the installed Python code and its documentation."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import xxhash

__all__ = ["gather"]

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
LARGEST_BYTES = 200_000
"""The largest size of a file. Larger files are mostly tables."""

SHARD_DOCUMENTS = 2_000


def gather(folder: Path, least_bytes: int) -> dict[str, int]:
    """Write at least ``least_bytes`` of text into ``folder`` as ``*.jsonl``, with one document per source file.

    Documents are ordered by a hash of their text, which mixes the standard library and the packages. Duplicates are
    written once.

    Returns:
        The number of documents and of bytes in UTF-8.

    Raises:
        SystemExit: if this machine does not have this much text.
    """
    documents = {xxhash.xxh3_64_intdigest(text.encode()): text for text in _texts()}
    folder.mkdir(parents=True, exist_ok=True)
    count = size_bytes = 0
    lines: list[str] = []
    for key in sorted(documents):
        if size_bytes >= least_bytes:
            break
        lines.append(json.dumps({"text": documents[key]}))
        size_bytes += len(documents[key].encode())
        count += 1
        if len(lines) == SHARD_DOCUMENTS:
            _write(folder, count, lines)
    _write(folder, count, lines)
    if size_bytes < least_bytes:
        raise SystemExit(
            f"This machine has only {size_bytes:,} bytes of text. Use --megabytes {size_bytes // 1_000_000}."
        )
    return {"documents": count, "bytes": size_bytes}


def _texts() -> Iterator[str]:
    roots = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")}
    for root in sorted(roots):
        for path in sorted(root.rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file() or path.stat().st_size > LARGEST_BYTES:
                continue
            try:
                text = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                yield text


def _write(folder: Path, count: int, lines: list[str]) -> None:
    if lines:
        (folder / f"{count:07d}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        lines.clear()
