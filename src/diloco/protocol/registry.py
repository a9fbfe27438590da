"""What a rank announces about itself, and what is known of the ranks of a run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from diloco.errors import ConfigurationError
from diloco.membership import GREATEST, Rank
from diloco.units import diff

MAX_NAME = 32
"""The most characters of the name of a replica."""

_MOST_KNOWN = 1000
_MOST_ENTRIES = 1 << 12

_Text = Annotated[str, Meta(max_length=1 << 12)]
Facts = Annotated[Mapping[_Text, _Text], Meta(max_length=1 << 8)]


@dataclass(frozen=True)
class Entry:
    """What a rank announces about itself before step 0."""

    rank: Rank  # the rank r, of replica r // S at position r % S
    # ``HOST:PORT`` of the rank's control port; a host name has at most 253 characters
    address: Annotated[str, Meta(max_length=300)]
    facts: Facts = field(default_factory=dict)  # what must be the same on all ranks: name -> value
    # the newest step of which the rank has a checkpoint; -1 for none
    held_step: Annotated[int, Meta(ge=-1, le=GREATEST)] = -1
    # further addresses of the rank, in the network's own format
    places: Annotated[tuple[_Text, ...], Meta(max_length=16)] = ()
    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""  # what people call it

    def __post_init__(self) -> None:
        if not self.address.isprintable() or not self.name.isprintable():
            raise ConfigurationError("the address and the name of a rank must be printable.")

    def diff(self, other: Entry, ranks_per_replica: int = 1) -> str:
        """Return the first difference of the facts of two ranks, the lower one first, or "" if there is none."""
        one, other = sorted((self, other), key=lambda each: each.rank)  # the sentence is the same on both
        names = (f"replica {each.rank // ranks_per_replica} ({each.address})" for each in (one, other))
        return diff(one.facts, other.facts, *names)


Table = Annotated[tuple[Entry, ...], Meta(max_length=_MOST_ENTRIES)]


def table_of(entries: Iterable[Entry]) -> Table:
    """Return entries for sending, without their facts: these have kilobytes, and all registered ranks have the same."""
    return tuple(replace(each, facts={}) for each in entries)


def note(known: dict[int, Entry], entry: Entry, keep: Collection[int]) -> None:
    """Record among the ``known`` entries, by rank, where a rank of a run with changing ranks can be reached.

    Of the ranks that are not in ``keep``, each address keeps only the one that it named last, and about a thousand are
    kept.
    """
    others = [rank for rank in known if rank not in keep]
    former = [rank for rank in others if known[rank].address == entry.address]
    for rank in (*former, *others[: max(0, len(others) - _MOST_KNOWN)]):
        known.pop(rank, None)
    known[entry.rank] = entry
