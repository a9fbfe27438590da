"""A signed record of who contributed what: ``lineage.jsonl`` of each process, and its verification.

An entry has the digest of the line before, so that none can be left out or inserted; the first one has the public key
of all signatures. What is cut off at the end shows only in the files of the other replicas, and looks like a crash. A
start supersedes the rounds after its step. A round has what its replica saw and gave.
"""

import hashlib
import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from diloco import events
from diloco.errors import ConfigurationError, DataError
from diloco.private_files import read_private, read_regular, replace_private
from diloco.units import columns
from diloco.waiting import described

LINEAGE_FILE, _KEY_FILE = "lineage.jsonl", "lineage.key"
_SHARED = ("view", "contributors", "total_weight", "digest")  # the same for all replicas of a round
_FIELDS = ("replica", "fragment", "outer_step", "step", "weight", *_SHARED)


@dataclass(frozen=True, kw_only=True)
class _Round:
    """What the entry of a round must have: its process may be a stranger's, who signs anything."""

    replica: int
    fragment: int
    outer_step: int
    step: int
    view: int
    contributors: tuple[int, ...]
    weight: Annotated[float, msgspec.Meta(ge=0, lt=1e300)]
    total_weight: Annotated[float, msgspec.Meta(gt=0, lt=1e300)]
    digest: str


def _text(entry: Any) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()


class LineageSink:
    """Appends a line for each round that a replica of this process has applied, signed with the key in ``folder``.

    A file of another machine, whose key is not here, is kept as ``lineage-DIGEST.jsonl``, and a new one begins.
    """

    def __init__(self, folder: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        path, key = folder / LINEAGE_FILE, folder / _KEY_FILE
        if not key.exists():
            folder.mkdir(parents=True, exist_ok=True)
            replace_private(key, Ed25519PrivateKey.generate().private_bytes_raw())  # at once, however it ends
        if len(secret := read_private(key, f"The key {key}")) != 32:
            raise ConfigurationError(f"The key {key} is damaged. Delete it, and this process signs with another one.")
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self._public = self._key.public_key().public_bytes_raw().hex()
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        if lines and self._public.encode() not in lines[0]:
            path.rename(folder / f"lineage-{hashlib.sha256(lines[-1]).hexdigest()[:8]}.jsonl")
            lines = []
        if lines:  # without an incomplete line at its end
            os.truncate(path, sum(len(line) + 1 for line in lines))
        self._file = path.open("ab" if lines else "wb")
        self._digest = hashlib.sha256(lines[-1]).hexdigest() if lines else ""

    def handle(self, event: events.Event) -> None:
        """Append what ``event`` tells of a round."""
        match event:
            case events.RunStarted():
                self._append({"started_at": event.step, "key": self._public})
            case events.RoundCommitted():
                self._append({name: getattr(event, name) for name in _FIELDS})

    def _append(self, entry: dict[str, Any]) -> None:
        entry |= {"previous": self._digest}
        line = _text({"entry": entry, "signature": self._key.sign(_text(entry)).hex()})
        self._digest = hashlib.sha256(line).hexdigest()
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lineage(path: Path) -> tuple[str, int, list[dict[str, Any]]]:
    """Return the public key, the first step and the rounds that count of a file; `DataError`: it was changed."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key, previous, rounds, begins = "", "", list[dict[str, Any]](), list[int]()
    try:
        lines = read_regular(path).split(b"\n")[:-1]
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}.") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            entry = record["entry"]
            key = key or entry["key"]
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
                bytes.fromhex(record["signature"]), _text(entry)
            )
            if entry["previous"] != previous:
                raise ValueError("what came before it was changed")
            if "started_at" in entry:
                begins.append(msgspec.convert(entry["started_at"], described(int)))
                rounds = [each for each in rounds if each["step"] <= begins[-1]]
            else:
                msgspec.convert(entry, described(_Round))
                rounds.append(entry)
        except (InvalidSignature, ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError) as error:
            why = str(error) or "its signature is wrong"
            raise DataError(f"{path}, line {number}: {why}. The file is not what its process has written.") from error
        previous = hashlib.sha256(line).hexdigest()
    return key, next(iter(begins), 0), rounds


def verify_lineage(folder: Path) -> tuple[str, list[str]]:
    """Rebuild who contributed what from the files of a run's replicas.

    Returns:
        A table with a row for each replica and what its file lacks, and sentences about rounds of which two files say
        different things.

    Raises:
        DataError: if there is no file, or one was changed.
    """
    paths = [path for path in (folder / LINEAGE_FILE, *folder.glob(f"replica-*/{LINEAGE_FILE}")) if path.exists()]
    if not paths:
        raise DataError(f"{folder} has no {LINEAGE_FILE}. Train with --sinks lineage.")
    keys, begins, lacking = dict[int, str](), dict[int, int](), defaultdict[int, list[str]](list)
    told: defaultdict[tuple[int, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    problems = []
    for path in paths:
        key, begin, rounds = read_lineage(path)
        named = path.parent.name.rpartition("replica-")[2]  # the file may lack all of its rounds
        begins |= dict.fromkeys([int(named)] if named.isdecimal() else [], begin)
        for entry in rounds:
            begins.setdefault(entry["replica"], begin)
            if keys.setdefault(entry["replica"], key) != key:
                problems.append(f"Two keys have signed for replica {entry['replica']}.")
            told[entry["fragment"], entry["outer_step"]][entry["replica"]] = entry
    counted: defaultdict[int, list[float]] = defaultdict(list)
    for (fragment, outer_step), entries in sorted(told.items()):
        about = f"Fragment {fragment}, outer step {outer_step}"
        for name in _SHARED:
            if len({_text(entry[name]) for entry in entries.values()}) > 1:
                problems.append(f"{about}: the replicas differ about the {name}.")
        first = next(iter(entries.values()))
        total, weights = first["total_weight"], {each: entries[each]["weight"] for each in entries}
        known = [weights[each] for each in first["contributors"] if each in weights]
        unknown = len(first["contributors"]) - len(known)  # such as those on other machines: they share the rest
        for replica in first["contributors"]:
            if replica not in entries and begins.get(replica, first["step"]) < first["step"]:
                lacking[replica].append(f"fragment {fragment}, outer step {outer_step}")
            counted[replica].append(weights.get(replica, (total - sum(known)) / max(1, unknown)) / total)
        if not unknown and abs(sum(known) / total - 1) > 1e-6:
            problems.append(f"{about}: the weights are {known}, but the mean was divided by {total}.")
    rows = [
        [str(replica), keys.get(replica, "-")[:16], str(len(shares)), f"{100 * sum(shares) / len(told):.2f} %"]
        for replica, shares in sorted(counted.items())
    ]
    table = columns(["replica", "key", f"of {len(told)} rounds", "weight"], rows)
    for replica, lost in sorted(lacking.items()):
        table += f"\nReplica {replica} gave to rounds that its file lacks, {len(lost)} in all, the first {lost[0]}. "
        table += "Its process ended before it merged them, or the end of the file was cut off."
    return table, list(dict.fromkeys(problems))
