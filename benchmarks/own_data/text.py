"""The texts of four sites: members of wheels that ``wheels.txt`` pins, from equal to disjoint.

A site's text consists of `share` of each of four kinds. No two sites have the same text, and all of them together have
the same, whatever the difference.
"""

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from diloco.data import ByteTokenizer, PackedTokens, pack

SITES = 4
HELDOUT_BYTES, TRAINING_BYTES = 64_000, 700_000  # of each kind, at least
MAX_FILE_BYTES = 32_000  # of a longer file, its beginning
KINDS = {
    "formats": (
        ("Python", "django-", r"\.py$"),
        ("C++", "pythran-", r"\.hpp$"),
        ("translations", "django-", r"/(da|de|es|fr|it|nl|pl|pt|sv)/.*\.po$"),
        ("documentation", "awscli-", r"\.rst$"),
    ),
    "projects": (
        ("Django", "django-", r"\.py$"),
        ("SymPy", "sympy-", r"\.py$"),
        ("NetworkX", "networkx-", r"\.py$"),
        ("Twisted", "twisted-", r"\.py$"),
    ),
}
"""Kinds of text: name, beginning of the wheel's name, pattern of the names of its members."""


@dataclass(frozen=True, eq=False)
class Texts:
    """The text of each of the `SITES` for training, and what is held out of each of the kinds."""

    sites: tuple[PackedTokens, ...]
    pooled: PackedTokens
    heldout: tuple[PackedTokens, ...]


def share(site: int, kind: int, difference: float) -> float:
    """Return the part of a site's text that is of a kind.

    >>> [share(2, kind, 0.5) for kind in range(4)]
    [0.125, 0.125, 0.625, 0.125]
    """
    return (1 - difference) / SITES + difference * (site == kind)


def texts(wheels: Path, name: str, difference: float) -> Texts:
    """Read the texts of ``KINDS[name]`` from the folder of the wheels."""
    pieces: list[list[PackedTokens]] = [[] for _ in range(SITES)]
    heldout = []
    for kind, (_, wheel, pattern) in enumerate(KINDS[name]):
        documents = list(members(wheels, wheel, pattern))
        first, size = 0, 0
        while size < HELDOUT_BYTES:
            size += len(documents[first].encode())
            first += 1
        heldout.append(pack(documents[:first], ByteTokenizer(), counted=True))
        training = pack(documents[first:], ByteTokenizer())[:TRAINING_BYTES]
        assert len(training) == TRAINING_BYTES, f"{wheel} has too little text in files like {pattern}"
        begin = 0.0
        for site in range(SITES):
            end = begin + share(site, kind, difference) * TRAINING_BYTES
            pieces[site].append(PackedTokens([training[round(begin) : round(end)]], vocab_size=257))
            begin = end
    sites = tuple(map(PackedTokens.joined, pieces))
    return Texts(sites, PackedTokens.joined(sites), tuple(heldout))


def members(wheels: Path, wheel: str, pattern: str) -> Iterator[str]:
    """Yield the texts of a wheel's members in the order of digests of their names, which mixes its folders."""
    (path,) = wheels.glob(f"{wheel}*.whl")
    with zipfile.ZipFile(path) as archive:
        names = [each for each in archive.namelist() if re.search(pattern, each)]
        for name in sorted(names, key=lambda name: xxhash.xxh3_64_hexdigest(name.encode())):
            text = archive.read(name)[:MAX_FILE_BYTES].decode("utf-8", "ignore")
            if text.strip():
                yield text
