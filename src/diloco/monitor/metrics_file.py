"""``metrics.jsonl``: one JSON object per event of a run, in the order in which the events happened.

In schema 1, every record has ``schema`` (1), ``event`` (the name of a class in `diloco.events`), ``step`` (inner steps
finished), ``time_s`` (when it was written, in seconds since 1970 by this machine's clock) and the fields of its event.
The text is ASCII, so that the file never ends in half a character. The file is append-only. A run that resumes from
step s writes a new ``RunStarted`` with ``step`` = s, which supersedes every earlier record with a greater step. A run
that is killed while it writes leaves an incomplete line at the end. Readers skip it, and the next run removes it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from diloco import events
from diloco.errors import DataError


class MetricsFile:
    """Appends every event to ``path`` as one line of JSON, which reaches the operating system at once.

    A process that dies loses at most the line that it was writing. An incomplete line at the end of an existing file is
    removed.

    Raises:
        OSError: if the file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8", newline="\n", buffering=1)

    def handle(self, event: events.Event) -> None:
        """Append ``event``."""
        record = events.to_record(event) | {"time_s": round(time.time(), 3)}
        self._file.write(json.dumps(events.json_ready(record), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a ``metrics.jsonl`` in order, without those that a resumed run superseded.

    Args:
        path: the file, which the run may still be writing.
        event: the name of an event, such as ``"Evaluated"``, to return only its records.

    Raises:
        DataError: if a line other than an incomplete last one is damaged, or if a record has another schema.
        OSError: if the file cannot be read.
    """
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is incomplete or empty
        try:
            record = json.loads(line)
            schema, name, step = record["schema"], record["event"], record["step"]
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"Line {number} of {path} is not a valid event record ({error!r}): {line[:80]!r}. Remove that line to "
                "read the rest."
            ) from error
        if schema != events.SCHEMA_VERSION:
            raise DataError(
                f"Line {number} of {path} has schema {schema}, but this version of diloco reads only schema "
                f"{events.SCHEMA_VERSION}. Read the file with the version that wrote it."
            )
        if name == "RunStarted":
            records = [earlier for earlier in records if earlier["step"] <= step]
        records.append(record)
    return records if event is None else [record for record in records if record["event"] == event]
