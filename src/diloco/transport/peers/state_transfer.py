"""Serving the state of fragments to other ranks, and fetching it from them.

A rank that needs a state asks several donors for offers. It chooses a snapshot that more donors hold than could be
faulty, and fetches it block by block from all of these donors, each at its own pace. While there is no such snapshot,
because the donors finish a round one after the other, they are asked again. A broken connection is reopened and
continues where it stopped. A donor is dropped if it fails three times in a row, sends bytes that do not match its
digest, or keeps the others waiting; its blocks are then requested from the others. The result matches the digest and is
finite. `donor_client` and `donor_session` are the two ends of such a connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from diloco.errors import TransportError
from diloco.membership import byzantine_quorum
from diloco.protocol import Entry, Rules
from diloco.transport.address import Address
from diloco.transport.base import SnapshotSource
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.streams import Streams
from diloco.transport.peers.block_assembly import Assembly
from diloco.transport.peers.donor_client import Donor, FetchContext, Meter
from diloco.transport.peers.donor_session import DonorService, Fetch
from diloco.transport.peers.state_wire import Description, not_finite

__all__ = ["StateTransfer", "choose", "donors_in_turn", "fetch_state"]

_CANCEL_AGAIN_S = 0.2


class StateTransfer:
    """Serves and fetches the state of one rank.

    Args:
        state_bytes_per_s: Rate limit for all fetchers together; None: unlimited.
    """

    def __init__(self, rules: Rules, connections: ConnectionManager, state_bytes_per_s: float | None) -> None:
        self._rules = rules
        self._connections = connections
        self._meter = Meter()
        self._service = DonorService(state_bytes_per_s)
        connections.services[Fetch] = self._service.serve

    @property
    def fetched_bytes(self) -> int:
        """The number of bytes received in all fetches."""
        return self._meter.num_bytes

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None) -> None:
        """Serve ``source``; see `Transport.publish`."""
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
        """Fetch the state of a fragment; see `Transport.fetch`.

        Args:
            after: Rounds that the state must include.

        Raises:
            TransportError: No donor provides it.
        """
        rules, streams = self._rules, self._connections.streams
        size = rules.ranks_per_replica
        ranks = {donor: donor * size + rules.rank % size for donor in donors if donor != rules.replica}
        there = [donor for donor in ranks if donor in members and ranks[donor] in entries]
        if not there:
            raise TransportError(
                f"replica {', '.join(map(str, donors))} was asked for fragment {fragment}, but the view "
                f"{tuple(members)} has no such other member.",
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


def donors_in_turn(donors: Sequence[int], fetcher: int, fragment: int, together: int = 3) -> Iterator[tuple[int, ...]]:
    """Yield the groups of donors to ask in turn until one provides the state. Each donor is in one group.

    Serving costs a donor a copy of its state, so different fetchers begin with different donors, and so does one
    fetcher with different fragments. Three in a group form a majority against one that has diverged.

    >>> list(donors_in_turn([0, 1, 2, 3, 4], fetcher=6, fragment=0))
    [(3, 4, 0), (1, 2)]
    """
    start = (fetcher * together + fragment) % max(1, len(donors))
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
    """Fetch the state of ``fragment`` from donors that have finished ``after`` rounds of it.

    Args:
        donors: replica -> its address.
        after: Rounds that the state must include. A donor that has finished fewer is asked again.
        expected_bytes: A larger state is refused; None: `state_wire.MAX_STATE_BYTES`.
        slow_s: A donor that sends nothing for this long has failed once. A donor that keeps the others waiting for this
            long is dropped.
        grace_s: How long the choice of a snapshot waits for more donors after the first offer.
        agree_s: How long to wait for a snapshot that more donors hold than could be faulty. Afterwards one of the
            newest is chosen.

    Raises:
        TransportError: No donor provides it in time; the error gives the reason for each donor.
    """
    agree_by_s = asyncio.get_running_loop().time() + agree_s
    fetch = FetchContext(streams, fragment, after, expected_bytes, slow_s, agree_by_s, meter or Meter())
    fetch.donors = [Donor(fetch, replica, donors[replica]) for replica in sorted(donors)]
    try:
        async with asyncio.timeout(timeout_s):
            return await _run(fetch, grace_s)
    except TimeoutError as error:
        raise _failed(fetch, f"none provided it within {timeout_s:g} s") from error


async def _run(fetch: FetchContext, grace_s: float) -> dict[str, Any]:
    tasks = [donor.start() for donor in fetch.donors]
    try:
        while (state := await _attempt(fetch, grace_s)) is None:
            pass
        return state
    finally:
        while waiting := [task for task in tasks if not task.done()]:
            for task in waiting:  # repeatedly, as a library may swallow a cancellation
                task.cancel()
            await asyncio.wait(waiting, timeout=_CANCEL_AGAIN_S)


async def _attempt(fetch: FetchContext, grace_s: float) -> dict[str, Any] | None:
    """Choose a snapshot and fetch it. Return None if all its donors were lost or hold another state by now."""
    await fetch.until(lambda: bool(_offers(fetch)) or not fetch.left)
    with suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await fetch.until(lambda: _may_choose(fetch))
    if not fetch.left:
        raise _failed(fetch, "none provided it")
    in_time = asyncio.get_running_loop().time() < fetch.agree_by_s
    chosen = choose(_offers(fetch), fetch.after, byzantine_quorum(len(fetch.left)) if in_time else 1)
    if chosen is None:
        if all(donor.answered for donor in fetch.left):
            fetch.discard_offers()
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
    """Choose the snapshot that most of the donors with the most finished rounds hold.

    On a tie, choose that of the lowest of these replicas.

    Args:
        offers: Offers by replica.
        after: The number of finished rounds that is assumed for a donor that does not report it.
        needed: Snapshots that fewer donors hold are ignored. If no other is left, the result is None.
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
    """Return whether more than half of the donors offer the same snapshot, or all have answered."""
    offers = _offers(fetch)
    same = Counter(each.digest for each in offers.values())
    if 2 * max(same.values(), default=0) > len(fetch.left):
        return True
    return all(donor.answered for donor in fetch.left) and bool(offers or not fetch.left)


def _failed(fetch: FetchContext, what: str) -> TransportError:
    """Return the error, which names every donor."""
    replicas = [donor.replica for donor in fetch.donors]
    numbers = ", ".join(map(str, replicas)) or "none"
    named = f"replicas {numbers} were" if len(replicas) > 1 else f"replica {numbers} was"
    reasons = "; ".join(f"replica {donor.replica}: {donor.trouble}" for donor in fetch.donors)
    return TransportError(
        f"{named} asked for fragment {fetch.fragment}, and {what} ({reasons}). Nothing was adopted. Another donor may "
        "have it.",
        replicas=replicas,
    )
