"""Which donors are asked, and whose snapshot is taken: values in, values out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from diloco.transport.peers.state_wire import Description

__all__ = ["choose", "donors_in_turn"]


def choose(offers: Mapping[int, Description], after: int) -> Description | None:
    """The snapshot to take: of those who have finished the most rounds, what the most of them hold.

    Where as many hold one thing as another, what the lowest replica holds.

    Args:
        offers: by replica.
        after: finished rounds of a donor who does not say.
    """
    if not offers:
        return None
    finished = {m: after if each.finished_rounds is None else each.finished_rounds for m, each in offers.items()}
    foremost = {m: offers[m] for m in sorted(offers) if finished[m] == max(finished.values())}
    held = Counter(each.digest for each in foremost.values())
    return next(each for each in foremost.values() if held[each.digest] == max(held.values()))


def donors_in_turn(donors: Sequence[int], asker: int, fragment: int, together: int = 3) -> Iterator[tuple[int, ...]]:
    """Groups to ask one after the other until one group has given the state; each donor is in one of them.

    Askers begin with different donors, and so does one asker with each fragment: each donor copies a state for those
    who ask it. Three in a group are a majority against one that has lost its way.

    >>> list(donors_in_turn([0, 1, 2, 3, 4], asker=6, fragment=0))
    [(3, 4, 0), (1, 2)]
    """
    start = (asker * together + fragment) % max(1, len(donors))
    turned = [*donors[start:], *donors[:start]]
    for first in range(0, len(turned), together):
        yield tuple(turned[first : first + together])
