"""Fetching state over real connections: bit for bit, whatever happens to connections and donors."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch

from diloco.errors import TransportError
from diloco.transport import MAX_CHUNK_BYTES, Address, Assembly, block_bytes
from tests.same import same_values
from tests.transport.state_donors import LIMIT_S, Donor, Fetcher, MakeDonor, lying, size_of, state


def test_what_arrives_is_the_donors_bit_for_bit(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    held = state()
    held["slots"]["counts"] = torch.arange(7)
    held["slots"]["scalar"] = torch.tensor(0.1, dtype=torch.float64)
    held["slots"]["matrix"] = torch.arange(6, dtype=torch.int32).reshape(2, 3).t()
    assert same_values(fetcher.fetch({1: make_donor(held)}), {**held, "fragment": 0})
    assert fetcher.streams.opened == [fetcher.streams.opened[0]], "one connection suffices"


@pytest.mark.parametrize("held", [{}, {"slots": {}}, {"global_params": torch.empty(0), "outer_step": 2**62}], ids=str)
def test_a_state_without_bytes_is_one_too(fetcher: Fetcher, make_donor: MakeDonor, held: dict[str, Any]) -> None:
    assert same_values(fetcher.fetch({1: make_donor(held)}), {**held, "fragment": 0})


def test_a_cut_connection_goes_on_where_it_stopped(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    """It is cut at every seventh chunk, which is lost. All other bytes are sent once, and the state is copied once."""
    donor, chunks, lost = make_donor(state()), [0], [0]

    def cut(port: int, data: bytes) -> bytes:
        chunks[0] += 1
        if chunks[0] % 7 == 0:
            lost[0] += len(data)
            raise ConnectionResetError("cut")
        return data

    fetcher.streams.hook = cut
    assert same_values(fetcher.fetch({1: donor}), {**state(), "fragment": 0})
    cuts = chunks[0] // 7
    assert cuts > 5
    assert len(fetcher.streams.opened) == cuts + 1
    assert fetcher.received_from(donor) == size_of(state()) + lost[0] <= size_of(state()) + cuts * MAX_CHUNK_BYTES
    assert donor.copies == 1


def test_damage_on_the_way_costs_the_chunk(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    donor, chunks = make_donor(state()), [0]

    def damage(port: int, data: bytes) -> bytes:
        chunks[0] += 1
        return data[:-1] + bytes([data[-1] ^ 1]) if chunks[0] == 4 else data

    fetcher.streams.hook = damage
    assert same_values(fetcher.fetch({1: donor}), {**state(), "fragment": 0})
    assert fetcher.received_from(donor) - size_of(state()) in range(1, MAX_CHUNK_BYTES + 1)


def test_donors_share_the_load(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    """All donors are asked before any has finished, as none sends before each is about to."""
    all_asked, waiting = threading.Barrier(3), {2, 5, 7}

    def together(replica: int, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        if blob and replica in waiting:
            waiting.remove(replica)
            all_asked.wait(LIMIT_S)
        return message, blob

    donors = {replica: lying(make_donor(state()), partial(together, replica)) for replica in (2, 5, 7)}
    assert same_values(fetcher.fetch(donors), {**state(), "fragment": 0})
    shares = [fetcher.received_from(donor) for donor in donors.values()]
    assert sum(shares) == size_of(state()), "no byte was sent twice"
    assert min(shares) >= block_bytes(size_of(state())), "each has sent at least one block"


def test_one_that_breaks_off_is_made_up_for(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    donors = {1: make_donor(state()), 2: make_donor(state())}

    def cut(port: int, data: bytes) -> bytes:
        if port == donors[1].address.port:
            raise ConnectionResetError("cut")
        return data

    fetcher.streams.hook = cut
    assert same_values(fetcher.fetch(donors), {**state(), "fragment": 0})
    assert fetcher.received_from(donors[2]) == size_of(state())


def test_the_majority_of_the_foremost_is_taken(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    held = {0: state(1, finished=4), 1: state(2, finished=5), 2: state(3, finished=5), 3: state(3, finished=5)}
    donors = {replica: make_donor(each) for replica, each in held.items()}
    assert same_values(fetcher.fetch(donors), {**held[2], "fragment": 0})
    assert not fetcher.received_from(donors[0]) + fetcher.received_from(donors[1])


def test_who_lags_helps_once_it_has_caught_up(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    """A donor that has not finished the round yet is asked again. If there is no other, the fetch waits for it."""
    donor = make_donor(state(finished=1))
    asked = threading.Event()
    donor.service.version = lambda fragment: (asked.set(), donor.held and donor.held["finished_rounds"])[1]
    result = fetcher.start({1: donor}, after=2)
    assert asked.wait(LIMIT_S)
    donor.held = state(7, finished=2)
    assert same_values(result(), {**state(7, finished=2), "fragment": 0})


def test_a_dead_donor_is_survived_and_named(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    dead, living = make_donor(state()), make_donor(state())
    dead.connections.close()
    assert same_values(fetcher.fetch({0: dead, 1: living}), {**state(), "fragment": 0})
    with pytest.raises(
        TransportError, match=r"replica 0 was asked for fragment 0, and none provided it \(replica 0: .*at "
    ):
        fetcher.fetch({0: dead})


def test_all_are_named_with_their_reasons(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    nothing, failing = make_donor(None), make_donor(state())
    failing.service.source = lambda fragment: {}[fragment]
    with pytest.raises(
        TransportError,
        match=r"replicas 3, 4 were asked .*replica 3: it has published nothing; replica 4:"
        r" KeyError: 0",
    ) as caught:
        fetcher.fetch({3: nothing, 4: failing})
    assert caught.value.replicas == (3, 4)
    with pytest.raises(TransportError, match=r"none was asked"):
        fetcher.fetch({})


def test_a_donor_that_says_nothing_is_survived_and_named(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    silent, honest = make_donor(state()), make_donor(state())

    async def nothing(message: dict[str, Any], reader: Any, writer: Any) -> None:
        await reader.read()

    silent.served_by(nothing)
    assert same_values(fetcher.fetch({0: silent, 1: honest}, slow_s=1.0), {**state(), "fragment": 0})
    with pytest.raises(TransportError, match=r"replica 0: it sent nothing for 0\.1 s"):
        fetcher.fetch({0: silent}, slow_s=0.1)
    with pytest.raises(TransportError, match=r"none provided it within 0\.1 s"):
        fetcher.fetch({0: silent}, timeout_s=0.1)


@pytest.mark.parametrize(("grace_s", "honest"), [(0.01, 1), (1000.0, 2)])
def test_a_choice_does_not_wait_for_a_donor_that_says_nothing(
    fetcher: Fetcher, make_donor: MakeDonor, grace_s: float, honest: int
) -> None:
    """If more than half of the donors offer the same snapshot, it does not wait at all."""
    silent, donors = make_donor(state()), {m: make_donor(state()) for m in range(1, 1 + honest)}
    never = threading.Event()

    async def nothing(message: dict[str, Any], reader: Any, writer: Any) -> None:
        await reader.read()
        never.set()

    silent.served_by(nothing)
    patient = {"slow_s": 1000.0, "timeout_s": 1000.0, "grace_s": grace_s}
    assert same_values(fetcher.fetch({0: silent, **donors}, **patient), {**state(), "fragment": 0})
    assert never.wait(LIMIT_S), "its connection has ended"


def test_a_fetch_ends_though_somebody_forgets_that_he_is_to_end(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    deaf, honest = make_donor(state()), make_donor(state())
    opened, told = fetcher.streams.open, []

    async def forgetful(address: Address) -> Any:
        while address.port == deaf.address.port and len(told) < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told.append(address)
        return await opened(address)

    fetcher.streams.open = forgetful  # type: ignore[method-assign]
    assert same_values(fetcher.fetch({0: deaf, 1: honest}), {**state(), "fragment": 0})
    assert len(told) == 2


def test_a_donor_that_keeps_the_others_waiting_is_given_up(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    """It sends a chunk from time to time, so it is never silent."""
    slow, quick = make_donor(state(), 20_000.0), make_donor(state())
    assert same_values(fetcher.fetch({0: slow, 1: quick}, slow_s=1.0), {**state(), "fragment": 0})
    assert fetcher.received_from(quick) > 0.9 * size_of(state())


def moves_on(fetcher: Fetcher, donors: Iterable[Donor], *, forgets: bool = False, cuts: bool = False) -> None:
    """Let the state of ``donors`` change in the middle of a transfer.

    Args:
        forgets: Whether they drop the previous snapshot.
        cuts: Whether the connection ends at that moment.
    """
    chunks = itertools.count(1)

    def hook(port: int, data: bytes) -> bytes:
        if next(chunks) == 5:
            for donor in donors:
                donor.held = state(2, finished=2)
                if forgets:
                    donor.service.cache.snapshots.clear()
            if cuts:
                raise ConnectionResetError("cut")
        return data

    fetcher.streams.hook = hook


def test_a_snapshot_that_is_gone_is_begun_anew(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    """The connection is cut. Before it is reopened, the donor's state changes and replaces the snapshot."""
    donor = make_donor(state(1, finished=1))
    moves_on(fetcher, [donor], forgets=True, cuts=True)
    assert same_values(fetcher.fetch({1: donor}), {**state(2, finished=2), "fragment": 0})
    assert donor.copies == 2


def test_who_has_moved_on_is_heard_again_before_another_is_chosen(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    """The lagging donor, whose offer has been there all along, is not chosen meanwhile."""
    donors = {0: make_donor(state(9, finished=0)), 1: make_donor(state(1)), 2: make_donor(state(1))}
    moves_on(fetcher, [donors[1], donors[2]], forgets=True)
    assert same_values(fetcher.fetch(donors), {**state(2, finished=2), "fragment": 0})


def test_a_snapshot_that_is_still_there_is_gone_on_with(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    donor = make_donor(state(1, finished=1))
    moves_on(fetcher, [donor], cuts=True)
    assert same_values(fetcher.fetch({1: donor}), {**state(1, finished=1), "fragment": 0})
    assert same_values(fetcher.fetch({1: donor}), {**state(2, finished=2), "fragment": 0})
    assert donor.copies == 2


def test_an_error_of_our_own_is_not_taken_for_a_donors(
    fetcher: Fetcher, make_donor: MakeDonor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Assembly, "take", broken)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        fetcher.fetch({1: make_donor(state())})
