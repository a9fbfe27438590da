"""Fetching a fragment's state from several donors at once, whatever happens to some of them or to the connections.

All donors are asked what they hold; what the foremost of them hold in the majority is fetched, block by block, from all
who hold it, each at its own pace. A broken connection is opened anew and goes on where it stopped. A donor is given up
that can't be reached three times in a row, sends what its digest doesn't name, or keeps the others waiting; what it was
to send is asked of the others. What is returned is what the digest names, and finite. The protocol: `state_service`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from diloco.errors import TransportError
from diloco.transport.address import Address
from diloco.transport.peers.frames import pack, read_frame
from diloco.transport.peers.state_choice import choose
from diloco.transport.peers.state_side import GivenUp, Side, check_chunk, request
from diloco.transport.peers.state_transfer import Stretch, Transfer
from diloco.transport.peers.state_wire import Description, not_finite
from diloco.transport.peers.streams import Streams

__all__ = ["Meter", "fetch_state"]

_FAILURES = 3
_LONGEST_PAUSE_S = 1.0
_ENDING_S = 0.2
_GRACE_S = 1.0
"""Once one donor has offered something, the choice waits no longer for what others hold."""


@dataclass
class Meter:
    """Counts what has come, in any fetch."""

    num_bytes: int = 0


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def fetch_state(
    streams: Streams,
    donors: Mapping[int, Address],
    fragment: int,
    after: int,
    timeout_s: float,
    *,
    expected_bytes: int | None = None,
    slow_s: float = 15.0,
    meter: Meter | None = None,
) -> dict[str, Any]:
    """The state of ``fragment``, once a donor has finished ``after`` rounds of it.

    Args:
        streams: of the network.
        donors: replica -> its address.
        fragment: its index.
        after: rounds of it that must be in it.
        timeout_s: for all of it.
        expected_bytes: a larger state is refused; None: `state_wire.MAX_STATE_BYTES`.
        slow_s: a donor that says nothing for so long has failed once; one that others wait for as long, for good.
        meter: counts the bytes that come.

    Raises:
        TransportError: if none gives it in time; it says of every donor why.
    """
    fetching = _Fetching(streams, donors, fragment, after, expected_bytes, slow_s, meter or Meter())
    try:
        async with asyncio.timeout(timeout_s):
            return await fetching.run()
    except TimeoutError as error:
        raise fetching.failed(f"none gave it within {timeout_s:g} s") from error


class _Fetching:
    """See `fetch_state`. All in one event loop; one task for each donor."""

    def __init__(
        self,
        streams: Streams,
        donors: Mapping[int, Address],
        fragment: int,
        after: int,
        expected_bytes: int | None,
        slow_s: float,
        meter: Meter,
    ) -> None:
        self.streams = streams
        self.fragment = fragment
        self.after = after
        self.expected_bytes = expected_bytes
        self.slow_s = slow_s
        self.meter = meter
        self.sides = [Side(replica, donors[replica]) for replica in sorted(donors)]
        self.transfer: Transfer | None = None
        self._pulse = asyncio.Event()
        self._broken: Exception | None = None

    async def run(self) -> dict[str, Any]:
        for side in self.sides:
            side.task = asyncio.create_task(self._work(side))
        tasks = [side.task for side in self.sides if side.task is not None]
        try:
            while True:
                state = await self._attempt()
                if state is not None:
                    return state
        finally:
            while waiting := [task for task in tasks if not task.done()]:
                for task in waiting:  # again: a library may forget that it was told
                    task.cancel()
                await asyncio.wait(waiting, timeout=_ENDING_S)

    async def _attempt(self) -> dict[str, Any] | None:
        """Choose a snapshot and fetch it; None if its donors were all lost or have moved on."""
        await self._until(self._heard)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._until(lambda: self._majority() or (self._all_answered() and self._heard()))
        if not self._left():
            raise self.failed("none gave it")
        chosen = choose({side.replica: side.offer for side in self._left() if side.offer is not None}, self.after)
        assert chosen is not None, "somebody was heard"
        try:
            transfer = self.transfer = Transfer(chosen)
        except TransportError as error:
            raise self.failed(str(error)) from error
        self._tell()
        await self._until(lambda: transfer.complete or not self._sharing(transfer))
        state = None
        if transfer.complete:
            bad = await asyncio.get_running_loop().run_in_executor(None, not_finite, transfer.state)
            for side in self._sharing(transfer) if bad else []:
                self._give_up(side, f"its {', '.join(bad)} hold NaN or infinity")
            state = None if bad else transfer.state
        self.transfer = None
        for side in self.sides:
            side.answered = side.offer is not None
        self._tell()
        return state

    def failed(self, what: str) -> TransportError:
        """The error that names every donor."""
        replicas = [side.replica for side in self.sides]
        numbers = ", ".join(map(str, replicas)) or "none"
        named = f"replicas {numbers} were" if len(replicas) > 1 else f"replica {numbers} was"
        reasons = "; ".join(f"replica {side.replica}: {side.trouble}" for side in self.sides)
        return TransportError(
            f"{named} asked for fragment {self.fragment}, and {what} ({reasons}). Another donor would work. "
            "Nothing was taken over.",
            replicas=replicas,
        )

    # One donor.

    async def _work(self, side: Side) -> None:
        try:
            while not side.given_up:
                seen = self.transfer
                await self._visit(side)
                side.answered = True
                self._tell()
                with suppress(TimeoutError):  # it is asked again then, or once there is another choice
                    async with asyncio.timeout(side.pause_s):
                        await self._until(lambda seen=seen: self.transfer is not seen)  # type: ignore[misc]  # bound now
                side.pause_s = min(2 * side.pause_s, _LONGEST_PAUSE_S)
        except Exception as error:  # of this file: whoever waits for this donor shall hear of it
            self._broken = error
        finally:
            self._tell()

    async def _visit(self, side: Side) -> None:
        """One connection, for as long as it is of use."""
        try:
            async with asyncio.timeout(self.slow_s):
                reader, writer = await self.streams.open(side.address)
            try:
                await self._talk(side, (reader, writer))
            finally:
                writer.close()
        except GivenUp as error:
            self._give_up(side, str(error))
        except (OSError, EOFError, TransportError, KeyError, ValueError, TypeError) as error:
            side.failures += 1
            words = str(error) or type(error).__name__
            side.trouble = f"it said nothing for {self.slow_s:g} s" if isinstance(error, TimeoutError) else words
            if side.failures == _FAILURES:
                self._give_up(side, f"{side.trouble} (at {side.address})")

    async def _talk(self, side: Side, stream: Stream) -> None:
        if not self._shares(side):
            side.offer = None
            side.offer = await self._ask(side, stream)
            side.answered = True
            self._tell()
            if side.offer is not None:
                await self._until(lambda: self.transfer is not None)
        if (transfer := self.transfer) is not None and self._shares(side):
            await self._receive(side, transfer, stream)

    async def _ask(self, side: Side, stream: Stream) -> Description | None:
        """What the donor holds now; None: to be asked again."""
        stream[1].write(pack(request(self.fragment, self.after)))
        message, _ = await self._read(stream)
        if message["kind"] != "offer":
            side.excuse(message)
            return None
        try:
            offer = Description.from_message(message, self.expected_bytes)
        except TransportError as error:
            raise GivenUp(str(error)) from error
        if offer.finished_rounds is not None and offer.finished_rounds < self.after:
            side.trouble = f"it has finished {offer.finished_rounds} rounds of {self.after}"
            return None
        side.failures = 0
        side.trouble = "it offered its state and has not sent all of it"
        return offer

    async def _receive(self, side: Side, transfer: Transfer, stream: Stream) -> None:
        """Blocks, until there is another choice."""
        try:
            while self.transfer is transfer:
                self._request(side, transfer, stream[1])
                if not side.asked:
                    await self._wait_for_others(side, transfer)
                    continue
                stretch = side.asked[0]
                if not await self._receive_chunk(side, transfer, stretch, stream):
                    return
                if not stretch.missing_bytes:
                    side.asked.popleft()
                    side.sent_s = asyncio.get_running_loop().time()
                    self._tell()
        finally:
            transfer.give_back(side.asked)
            side.asked.clear()
            self._tell()

    def _request(self, side: Side, transfer: Transfer, writer: asyncio.StreamWriter) -> None:
        if not side.asked:
            side.sent_s = asyncio.get_running_loop().time()
        while (stretch := transfer.take(side.asked, max(1, len(self._sharing(transfer))))) is not None:
            side.asked.append(stretch)
            writer.write(pack(request(self.fragment, self.after, transfer.description, stretch)))

    async def _receive_chunk(self, side: Side, transfer: Transfer, stretch: Stretch, stream: Stream) -> bool:
        """The next bytes of a block; False: the donor sends no more of it now."""
        message, data = await self._read(stream)
        if message["kind"] != "chunk":
            if message["kind"] == "moved":
                side.offer = None
                side.trouble = "its state has moved on meanwhile"
            else:
                side.excuse(message)
            return False
        check_chunk(message, data, stretch)
        self.meter.num_bytes += len(data)
        try:
            transfer.put(stretch, data, side.replica)
        except TransportError as error:
            if error.replicas == (side.replica,):
                raise GivenUp(str(error)) from error
            raise  # several have sent parts of it, and who lies is not known: the block begins again
        side.went_well()
        return True

    async def _wait_for_others(self, side: Side, transfer: Transfer) -> None:
        """Nothing is left to ask for; who lets the others wait too long is given up, and his blocks are asked anew."""
        try:
            async with asyncio.timeout(self.slow_s):
                await self._until(lambda: self.transfer is not transfer or bool(transfer.waiting))
        except TimeoutError:
            for other in self._sharing(transfer):
                lasted_s = asyncio.get_running_loop().time() - other.sent_s
                if other.asked and lasted_s >= self.slow_s:
                    self._give_up(other, f"it was too slow: a block was not there after {lasted_s:.1f} s")
                    if other.task is not None:
                        other.task.cancel()

    async def _read(self, stream: Stream) -> tuple[dict[str, Any], bytes]:
        async with asyncio.timeout(self.slow_s):
            return await read_frame(stream[0])

    def _give_up(self, side: Side, why: str) -> None:
        side.given_up, side.trouble, side.offer = True, why, None
        self._tell()

    # All of them.

    def _left(self) -> list[Side]:
        return [side for side in self.sides if not side.given_up]

    def _all_answered(self) -> bool:
        return all(side.answered for side in self._left())

    def _majority(self) -> bool:
        """Whether more than half of them offer the same."""
        offers = Counter(side.offer.digest for side in self._left() if side.offer is not None)
        return 2 * max(offers.values(), default=0) > len(self._left())

    def _heard(self) -> bool:
        """Whether somebody offers something, or nobody ever will."""
        left = self._left()
        return not left or any(side.offer is not None for side in left)

    def _shares(self, side: Side) -> bool:
        """Whether it has what is being fetched."""
        return self.transfer is not None and side.offer == self.transfer.description

    def _sharing(self, transfer: Transfer) -> list[Side]:
        return [side for side in self._left() if side.offer == transfer.description]

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._broken is not None:
                raise self._broken
            await self._pulse.wait()

    def _tell(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._pulse.set()
        self._pulse = asyncio.Event()
