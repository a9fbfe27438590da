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


@dataclass(frozen=True)
class Entries:
    """Entries as they are sent: equal facts are named once, so a thousand ranks fit into a message."""

    entries: Annotated[tuple[Entry, ...], Meta(max_length=_MOST_ENTRIES)]  # without facts
    facts: Annotated[tuple[Facts, ...], Meta(max_length=_MOST_ENTRIES)]
    facts_of: Annotated[tuple[int, ...], Meta(max_length=_MOST_ENTRIES)]  # for each entry, the index of its facts

    def __post_init__(self) -> None:
        if len(self.facts_of) != len(self.entries) or not {*self.facts_of} <= {*range(len(self.facts))}:
            raise ConfigurationError("each entry needs facts.")

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Entries:
        """Return entries for sending.

        >>> sent = Entries.of([Entry(0, "a:1", {"codec": "fp4"}), Entry(1, "b:1", {"codec": "fp4"})])
        >>> sent.facts, sent.whole()[1].facts
        (({'codec': 'fp4'},), {'codec': 'fp4'})
        """
        entries, facts = tuple(entries), list[Facts]()
        for each in entries:
            if each.facts not in facts:
                facts.append(each.facts)
        bare = tuple(replace(each, facts={}) for each in entries)
        return cls(bare, tuple(facts), tuple(facts.index(each.facts) for each in entries))

    def whole(self) -> list[Entry]:
        """Return the entries with their facts."""
        pairs = zip(self.entries, self.facts_of, strict=True)
        return [replace(each, facts=self.facts[index]) for each, index in pairs]


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
