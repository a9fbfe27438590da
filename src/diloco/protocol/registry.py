"""Who is in the run, as one rendezvous collects it, and whether they fit together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.errors import RendezvousError
from diloco.protocol.fields import Fields
from diloco.units import visible

__all__ = ["Entry", "Registry", "difference"]

_MOST_PLACES = 16
_MOST_FACT = 500
_MOST_KNOWN = 1000
_MOST_ADDRESS = 300  # a name of a host has at most 253 characters


@dataclass(frozen=True)
class Entry:
    """What a rank says of itself before step 0."""

    rank: int  # r; replica r // S, position r % S
    address: str  # ``HOST:PORT`` of its control port
    facts: Mapping[str, str] = field(default_factory=dict)  # what must be the same on all ranks, name -> value in words
    held_step: int = -1  # the newest step of which it has a checkpoint to resume from; -1 for none
    places: tuple[str, ...] = ()  # where the network may find it, in the network's own words

    def to_message(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "rank": self.rank,
            "address": self.address,
            "facts": dict(self.facts),
            "held_step": self.held_step,
            "places": list(self.places),
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Entry:
        """From JSON; `ValueError` names the field of anything that is none."""
        fields = Fields(message)
        return cls(
            fields.rank("rank"),
            fields.printable("address", _MOST_ADDRESS),
            fields.texts("facts"),
            fields.integer("held_step", -1),
            fields.list_of_texts("places", _MOST_PLACES),
        )


def difference(one: Entry, other: Entry, ranks_per_replica: int = 1) -> str:
    """One sentence that names both sides of the first difference, the lower rank first, or "" where they agree.

    >>> difference(Entry(0, "a:1", {"codec": "fp4"}), Entry(2, "b:1", {"codec": "int8"}))
    'replica 0 (a:1) has codec = fp4 and replica 2 (b:1) has codec = int8'
    """

    def name(entry: Entry) -> str:
        place = f" ({entry.address})" if entry.address else ""
        return f"replica {entry.rank // ranks_per_replica}{place}"

    one, other = sorted((one, other), key=_rank)  # so that it is the same sentence whoever came first
    for key in dict.fromkeys([*one.facts, *other.facts]):
        here, there = one.facts.get(key, "nothing"), other.facts.get(key, "nothing")
        if here != there:
            fact, mine, theirs = (visible(each, _MOST_FACT) for each in (key, here, there))
            return f"{name(one)} has {fact} = {mine} and {name(other)} has {fact} = {theirs}"
    return ""


class Registry:
    """The ranks of one run, as they come in.

    Args:
        num_ranks: M x S.
        entries: of those who are in already; with them the registry is of a run that is going on.
    """

    def __init__(self, num_ranks: int, ranks_per_replica: int = 1, entries: Sequence[Entry] = ()) -> None:
        self.num_ranks = num_ranks
        self.ranks_per_replica = ranks_per_replica
        self.entries = {entry.rank: entry for entry in entries}
        self.running = bool(entries)

    def register(self, entry: Entry) -> None:
        """Take in ``entry``; in a run that is going on it takes the place of the one that had its rank.

        Raises:
            RendezvousError: if it does not fit; it names both sides.
        """
        if not 0 <= entry.rank < self.num_ranks:
            raise RendezvousError(
                f"rank {entry.rank} at {entry.address} wants to take part in a run of {self.num_ranks} ranks; "
                f"ranks are 0 to {self.num_ranks - 1}."
            )
        known = self.entries.get(entry.rank)
        if known is not None and not self.running:
            raise RendezvousError(
                f"two processes say that they are rank {entry.rank}: one at {known.address} and one at "
                f"{entry.address}; each process needs a rank of its own."
            )
        reference = min((other for rank, other in self.entries.items() if rank != entry.rank), key=_rank, default=None)
        if reference is not None and (words := difference(reference, entry, self.ranks_per_replica)):
            raise RendezvousError(f"{words}; both sides need the same.")
        self.entries[entry.rank] = entry
        self.running = self.running or self.complete

    def note(self, entry: Entry, keep: Collection[int]) -> None:
        """Remember where a rank is, of a run whose ranks come and go.

        An address has one rank that is not in ``keep``: the one that it named last. Of those, a thousand are known.
        """
        others = [rank for rank in self.entries if rank not in keep]
        former = [rank for rank in others if self.entries[rank].address == entry.address]
        for rank in (*former, *others[: max(0, len(others) - _MOST_KNOWN)]):
            self.entries.pop(rank, None)
        self.entries[entry.rank] = entry

    def withdraw(self, rank: int) -> None:
        """A rank left before all were there."""
        if not self.running:
            self.entries.pop(rank, None)

    @property
    def complete(self) -> bool:
        """Whether all ranks are in."""
        return len(self.entries) == self.num_ranks

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are not in yet."""
        return tuple(rank for rank in range(self.num_ranks) if rank not in self.entries)


def _rank(entry: Entry) -> int:
    return entry.rank
