"""The ranks of a run as one rendezvous collects them, and the check that they fit together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from diloco.errors import ConfigurationError, RendezvousError
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
        one, other = sorted((self, other), key=_rank)  # the sentence is the same on both
        names = (f"replica {each.rank // ranks_per_replica} ({each.address})" for each in (one, other))
        return diff(one.facts, other.facts, *names)


Table = Annotated[tuple[Entry, ...], Meta(max_length=_MOST_ENTRIES)]


def table_of(entries: Iterable[Entry]) -> Table:
    """Return entries for sending, without their facts: these have kilobytes, and all registered ranks have the same."""
    return tuple(replace(each, facts={}) for each in entries)


class Registry:
    """The ranks of one run that have registered.

    Args:
        num_ranks: M x S.
        ranks_per_replica: S.
        entries: ranks that are registered already; with them, the run counts as in progress.
    """

    def __init__(self, num_ranks: int, ranks_per_replica: int = 1, entries: Sequence[Entry] = ()) -> None:
        self.num_ranks = num_ranks
        self.ranks_per_replica = ranks_per_replica
        self.entries = {entry.rank: entry for entry in entries}
        self.running = bool(entries)

    def register(self, entry: Entry) -> None:
        """Add ``entry``.

        Raises:
            RendezvousError: the entry does not fit; the message names both sides.
        """
        if entry.rank >= self.num_ranks:
            raise RendezvousError(
                f"rank {entry.rank} at {entry.address} can't register in a run of {self.num_ranks} ranks; "
                f"ranks are 0 to {self.num_ranks - 1}."
            )
        known = self.entries.get(entry.rank)
        if known is not None:
            raise RendezvousError(
                f"two processes claim rank {entry.rank}: one at {known.address} and one at {entry.address}; "
                "each process needs a rank of its own."
            )
        reference = min((other for rank, other in self.entries.items() if rank != entry.rank), key=_rank, default=None)
        if reference is not None and (words := reference.diff(entry, self.ranks_per_replica)):
            raise RendezvousError(f"{words}; both sides need the same value.")
        self.entries[entry.rank] = entry
        self.running = self.running or len(self.entries) == self.num_ranks

    def note(self, entry: Entry, keep: Collection[int]) -> None:
        """Record where a rank of a run with changing ranks can be reached.

        Of the ranks that are not in ``keep``, each address keeps only the one that it named last, and about a thousand
        are kept.
        """
        others = [rank for rank in self.entries if rank not in keep]
        former = [rank for rank in others if self.entries[rank].address == entry.address]
        for rank in (*former, *others[: max(0, len(others) - _MOST_KNOWN)]):
            self.entries.pop(rank, None)
        self.entries[entry.rank] = entry

    def withdraw(self, rank: int) -> None:
        """Remove a rank that left before all had registered."""
        if not self.running:
            self.entries.pop(rank, None)


def _rank(entry: Entry) -> int:
    return entry.rank
