"""Who is in the run, as one rendezvous collects it, and whether they fit together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.errors import RendezvousError

__all__ = ["Entry", "Registry", "difference"]

_MOST_PLACES = 16


@dataclass(frozen=True)
class Entry:
    """What a rank says of itself before step 0.

    Attributes:
        rank: r; replica r // S, position r % S.
        address: ``HOST:PORT`` of its control port.
        facts: what must be the same on all ranks, name -> value in words.
        held_step: the newest step of which it has a checkpoint to resume from; -1 for none.
        places: where the network may find it, in the network's own words.
    """

    rank: int
    address: str
    facts: Mapping[str, str] = field(default_factory=dict)
    held_step: int = -1
    places: tuple[str, ...] = ()

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
        """From JSON; `ValueError`, `TypeError` or `KeyError` for anything that is none."""
        facts = {str(name): str(value) for name, value in dict(message["facts"]).items()}
        places = tuple(str(place) for place in list(message["places"])[:_MOST_PLACES])
        return cls(int(message["rank"]), str(message["address"]), facts, int(message["held_step"]), places)


def difference(one: Entry, other: Entry, ranks_per_replica: int = 1) -> str:
    """One sentence that names both sides of the first difference, or "" where they agree.

    >>> difference(Entry(0, "a:1", {"codec": "fp4"}), Entry(2, "b:1", {"codec": "int8"}))
    'replica 0 (a:1) has codec = fp4 and replica 2 (b:1) has codec = int8'
    """

    def name(entry: Entry) -> str:
        place = f" ({entry.address})" if entry.address else ""
        return f"replica {entry.rank // ranks_per_replica}{place}"

    for key in dict.fromkeys([*one.facts, *other.facts]):
        here, there = one.facts.get(key, "nothing"), other.facts.get(key, "nothing")
        if here != there:
            return f"{name(one)} has {key} = {here} and {name(other)} has {key} = {there}"
    return ""


class Registry:
    """The ranks of one run, as they come in.

    Args:
        num_ranks: M x S.
        ranks_per_replica: S.
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
                f"0 to {self.num_ranks - 1} would work. Nothing was started."
            )
        known = self.entries.get(entry.rank)
        if known is not None and not self.running:
            raise RendezvousError(
                f"two processes say that they are rank {entry.rank}: one at {known.address} and one at "
                f"{entry.address}; a rank of its own for each would work. Nothing was started."
            )
        reference = min((other for rank, other in self.entries.items() if rank != entry.rank), key=_rank, default=None)
        if reference is not None and (words := difference(reference, entry, self.ranks_per_replica)):
            raise RendezvousError(f"{words}; the same on both sides would work. Nothing was started.")
        self.entries[entry.rank] = entry
        self.running = self.running or self.complete

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
