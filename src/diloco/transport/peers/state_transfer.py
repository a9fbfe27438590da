"""State of fragments, given to others and taken from them.

A rank that needs a state asks several donors what they hold. A snapshot that more of them hold than could lie is
fetched, block by block, from all that hold it, each at its own pace; while there is none, as they end a round one after
the other, they are asked again. A broken connection is
opened again and continues where it stopped. A donor is dropped if it can't be reached three times in a row, sends bytes
that do not match its digest, or keeps the others waiting; the others are asked for its blocks. The result matches the
digest and is finite. `donor_client` and `donor_session` are the two ends of such a connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from diloco.errors import TransportError
from diloco.membership.quorum import more_than_could_lie
from diloco.protocol.registry import Entry
from diloco.protocol.rules import Rules
from diloco.transport.address import Address
from diloco.transport.base import SnapshotSource
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.streams import Streams
from diloco.transport.peers.block_assembly import Assembly
from diloco.transport.peers.donor_client import Donor, FetchContext, Meter
from diloco.transport.peers.donor_session import DonorService
from diloco.transport.peers.state_wire import Description, not_finite

__all__ = ["StateTransfer", "choose", "donors_in_turn", "fetch_state"]

_CANCEL_AGAIN_S = 0.2


class StateTransfer:
    """One rank's part in handing over state.

    Args:
        state_bytes_per_s: what all askers get together; None: as much as the link carries.
    """

    def __init__(self, rules: Rules, connections: ConnectionManager, state_bytes_per_s: float | None) -> None:
        self._rules = rules
        self._connections = connections
        self._meter = Meter()
        self._service = DonorService(state_bytes_per_s)
        connections.services["fetch"] = self._service.serve

    @property
    def fetched_bytes(self) -> int:
        """Bytes that have come, in all fetches."""
        return self._meter.num_bytes

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None) -> None:
        """As `Transport.publish`."""
        self._service.source, self._service.version = source, version

    def fetch(
        self,
        fragment: int,
        donors: Sequence[int],
        after: int,
        *,
        members: Sequence[int],
        entries: Mapping[int, Entry],
        expected_bytes: int | None,
    ) -> Mapping[str, Any]:
        """As `Transport.fetch`.

        Args:
            after: rounds that must be in the state.

        Raises:
            TransportError: if none of the donors gives it.
        """
        rules, streams = self._rules, self._connections.streams
        size = rules.ranks_per_replica
        ranks = {donor: donor * size + rules.rank % size for donor in donors if donor != rules.replica}
        there = [donor for donor in ranks if donor in members and ranks[donor] in entries]
        if not there:
            raise TransportError(
                f"replica {', '.join(map(str, donors))} was asked for fragment {fragment}, but is no other member of "
                f"the view {tuple(members)}.",
                replicas=donors,
            )
        errors = []
        for group in donors_in_turn(there, rules.replica, fragment):
            addresses = {donor: streams.address(entries[ranks[donor]].address) for donor in group}
            fetching = fetch_state(
                streams,
                addresses,
                fragment,
                after,
                rules.round_timeout_s,
                expected_bytes=expected_bytes,
                meter=self._meter,
            )
            try:
                return self._connections.call(fetching)
            except TransportError as error:  # the next group may have it
                errors.append(str(error))
        raise TransportError(" ".join(errors), replicas=there)


def donors_in_turn(donors: Sequence[int], asker: int, fragment: int, together: int = 3) -> Iterator[tuple[int, ...]]:
    """Groups of donors to ask one after the other until one gives the state; each donor is in one group.

    A donor copies its state for those who ask, so different askers begin with different donors, and so does one asker
    with each fragment. Three in a group are a majority against one that has diverged.

    >>> list(donors_in_turn([0, 1, 2, 3, 4], asker=6, fragment=0))
    [(3, 4, 0), (1, 2)]
    """
    start = (asker * together + fragment) % max(1, len(donors))
    turned = [*donors[start:], *donors[:start]]
    for first in range(0, len(turned), together):
        yield tuple(turned[first : first + together])


async def fetch_state(
    streams: Streams,
    donors: Mapping[int, Address],
    fragment: int,
    after: int,
    timeout_s: float,
    *,
    expected_bytes: int | None = None,
    slow_s: float = 15.0,
    grace_s: float = 1.0,
    agree_s: float = 15.0,
    meter: Meter | None = None,
) -> dict[str, Any]:
    """The state of ``fragment``, from donors that have finished ``after`` rounds of it.

    Args:
        donors: replica -> its address.
        after: rounds that must be in the state; a donor that has finished fewer is asked again.
        expected_bytes: a larger state is refused; None: `state_wire.MAX_STATE_BYTES`.
        slow_s: a donor that sends nothing for so long has failed once; one that keeps the others waiting so long is
            dropped.
        grace_s: how long the choice of a snapshot waits for more donors after the first offer.
        agree_s: if no snapshot is held by more donors than could lie for so long, one of the furthest is taken.

    Raises:
        TransportError: if no donor gives it in time; it says of every donor why.
    """
    agree_by_s = asyncio.get_running_loop().time() + agree_s
    fetch = FetchContext(streams, fragment, after, expected_bytes, slow_s, agree_by_s, meter or Meter())
    fetch.donors = [Donor(fetch, replica, donors[replica]) for replica in sorted(donors)]
    try:
        async with asyncio.timeout(timeout_s):
            return await _run(fetch, grace_s)
    except TimeoutError as error:
        raise _failed(fetch, f"none gave it within {timeout_s:g} s") from error


async def _run(fetch: FetchContext, grace_s: float) -> dict[str, Any]:
    tasks = [donor.start() for donor in fetch.donors]
    try:
        while (state := await _attempt(fetch, grace_s)) is None:
            pass
        return state
    finally:
        while waiting := [task for task in tasks if not task.done()]:
            for task in waiting:  # again: a library may forget that it was told
                task.cancel()
            await asyncio.wait(waiting, timeout=_CANCEL_AGAIN_S)


async def _attempt(fetch: FetchContext, grace_s: float) -> dict[str, Any] | None:
    """Choose a snapshot and fetch it; None if its donors were all lost or have moved on."""
    await fetch.until(lambda: bool(_offers(fetch)) or not fetch.left)
    with suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await fetch.until(lambda: _may_choose(fetch))
    if not fetch.left:
        raise _failed(fetch, "none gave it")
    in_time = asyncio.get_running_loop().time() < fetch.agree_by_s
    chosen = choose(_offers(fetch), fetch.after, more_than_could_lie(len(fetch.left)) if in_time else 1)
    if chosen is None:
        if all(donor.answered for donor in fetch.left):
            fetch.ask_again()
        return None
    try:
        assembly = fetch.assembly = Assembly(chosen)
    except TransportError as error:
        raise _failed(fetch, str(error)) from error
    fetch.notify()
    await fetch.until(lambda: assembly.complete or not fetch.sources(assembly))
    state = None
    if assembly.complete:
        bad = await asyncio.get_running_loop().run_in_executor(None, not_finite, assembly.state)
        for donor in fetch.sources(assembly) if bad else []:
            donor.drop(f"its {', '.join(bad)} hold NaN or infinity")
        state = None if bad else assembly.state
    fetch.assembly = None
    for donor in fetch.donors:
        donor.answered = donor.offer is not None
    fetch.notify()
    return state


def choose(offers: Mapping[int, Description], after: int, needed: int = 1) -> Description | None:
    """The snapshot to fetch: of the donors that have finished the most rounds, what most of them hold.

    On a tie, what the lowest of these replicas holds.

    Args:
        offers: by replica.
        after: taken as the finished rounds of a donor that does not tell them.
        needed: what fewer donors hold than this is not looked at; None if there is nothing else.
    """
    times = Counter(each.digest for each in offers.values())
    offers = {replica: each for replica, each in offers.items() if times[each.digest] >= needed}
    if not offers:
        return None
    finished = {m: after if each.finished_rounds is None else each.finished_rounds for m, each in offers.items()}
    furthest = {m: offers[m] for m in sorted(offers) if finished[m] == max(finished.values())}
    held = Counter(each.digest for each in furthest.values())
    return next(each for each in furthest.values() if held[each.digest] == max(held.values()))


def _offers(fetch: FetchContext) -> dict[int, Description]:
    return {donor.replica: donor.offer for donor in fetch.left if donor.offer is not None}


def _may_choose(fetch: FetchContext) -> bool:
    """Whether more than half of the donors offer the same, or all have answered."""
    offers = _offers(fetch)
    same = Counter(each.digest for each in offers.values())
    if 2 * max(same.values(), default=0) > len(fetch.left):
        return True
    return all(donor.answered for donor in fetch.left) and bool(offers or not fetch.left)


def _failed(fetch: FetchContext, what: str) -> TransportError:
    """The error that names every donor."""
    replicas = [donor.replica for donor in fetch.donors]
    numbers = ", ".join(map(str, replicas)) or "none"
    named = f"replicas {numbers} were" if len(replicas) > 1 else f"replica {numbers} was"
    reasons = "; ".join(f"replica {donor.replica}: {donor.trouble}" for donor in fetch.donors)
    return TransportError(
        f"{named} asked for fragment {fetch.fragment}, and {what} ({reasons}). Nothing was taken over; another donor "
        "may have it.",
        replicas=replicas,
    )
