"""Fetching a fragment's state from other replicas over TCP: bit for bit, whatever happens to connections and donors."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np
import pytest
import torch

from diloco.errors import TransportError
from diloco.transport import PeerTransport
from tests.same import same_values
from tests.transport.contract import contribution, exchange
from tests.transport.relays import Cut, Relays, Unit, frame, stranger_at, unframe
from tests.transport.wires import Wires

NUMEL = 400_000
SIZE = 2 * 4 * NUMEL  # bytes of a state


def state(seed: int = 0, *, finished: int = 1, numel: int = NUMEL) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "global_params": torch.randn(numel, generator=generator),
        "outer_step": 3,
        "slots": {"momentum": torch.randn(numel, generator=generator), "nothing": torch.empty(0)},
        "finished_rounds": finished,
        "rate": 0.1,
    }


class Source:
    """A donor's state, which counts how often it is copied."""

    def __init__(self, transport: PeerTransport, held: Mapping[str, Any]) -> None:
        self.held, self.copies, self.asked = held, 0, threading.Event()
        transport.publish(self.copied, self.version)

    def version(self, fragment: int) -> int:
        self.asked.set()
        return id(self.held)

    def copied(self, fragment: int) -> Mapping[str, Any]:
        self.copies += 1
        return {**self.held, "fragment": fragment}


def meet(wires: Wires, *held: Mapping[str, Any], **rules: Any) -> tuple[PeerTransport, list[Source]]:
    """Return replica 0, which fetches, and the sources of replicas 1, 2..., which hold these states."""
    first, *donors = wires.meet(1 + len(held), **rules)
    return first, [Source(donor, each) for donor, each in zip(donors, held, strict=True)]


def chunks(unit: Unit, port: int | None = None) -> bool:
    """Return whether a unit is a chunk of a state, from the donor at ``port`` if that is given."""
    is_chunk = unit.kind == "fetch" and unit.answers and len(unit.data) > 2000
    return is_chunk and port in (None, unit.port)


def test_what_arrives_is_the_donors_bit_for_bit(wires: Wires) -> None:
    odd: dict[str, Any] = {
        "matrix": torch.arange(6, dtype=torch.int32).reshape(2, 3).t(),
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "counts": torch.arange(7),
        "slots": {"bytes": torch.ones(3, dtype=torch.uint8), "none": None, "yes": True, "words": "é", "more": {}},
        "empty": torch.empty(0),
        "outer_step": 2**62,
    }
    first, (source,) = meet(wires, odd)
    assert same_values(first.fetch(4, [1]).result(), {**odd, "fragment": 4})
    source.held = {}
    assert first.fetch(4, [1]).result() == {"fragment": 4}


@pytest.mark.parametrize(("finished", "same", "travels"), [(0, True, False), (0, False, True), (1, True, True)])
def test_a_state_that_both_began_with_does_not_travel(
    wires: Wires, relays: Relays, finished: int, same: bool, travels: bool
) -> None:
    """A replica that joins before the first round holds it already, if its processor draws the same weights."""
    first, (source,) = meet(wires, state(finished=finished))
    Source(first, state(0 if same else 1, finished=finished))
    assert same_values(first.fetch(3, [1]).result(), {**source.held, "fragment": 3})
    assert (first.fetched_bytes, relays.opened.count("fetch")) == ((SIZE, 2) if travels else (0, 1))


def test_a_cut_connection_goes_on_where_it_stopped(wires: Wires, relays: Relays) -> None:
    """It is cut at every seventh chunk, which is lost. All other bytes are sent once, and the state is copied once."""
    first, (source,) = meet(wires, state())
    seen, lost = [0], [0]

    def cut(unit: Unit) -> bytes:
        seen[0] += chunks(unit)
        if chunks(unit) and seen[0] % 7 == 0:
            lost[0] += len(unit.data)
            raise Cut
        return unit.data

    relays.hook = cut
    assert same_values(first.fetch(0, [1]).result(), {**source.held, "fragment": 0})
    assert relays.opened.count("fetch") == 1 + seen[0] // 7 + 1 > 2, "one for the offer"
    assert SIZE <= first.fetched_bytes <= SIZE + lost[0]
    assert source.copies == 1


@pytest.mark.parametrize("lies", [False, True])
def test_the_next_donor_goes_on_where_one_stopped_unless_its_bytes_were_wrong(
    wires: Wires, relays: Relays, lies: bool
) -> None:
    first, (source, _) = meet(wires, state(), state())
    one, seen, lost = wires.transports[1].address.port, [0], [0]

    def break_off(unit: Unit) -> bytes:
        if chunks(unit, one):
            seen[0] += 1
            if seen[0] > 4:
                lost[0] += len(unit.data)
                raise Cut
            return frame(zeros(unframe(unit.data))) if lies else unit.data
        return unit.data

    relays.hook = break_off
    assert same_values(first.fetch(0, [1, 2]).result(), {**source.held, "fragment": 0})
    assert (first.fetched_bytes > SIZE + lost[0]) == lies


def test_the_majority_of_the_foremost_is_taken(wires: Wires) -> None:
    """Not what one alone offers beside two, though it claims more rounds."""
    first, sources = meet(wires, state(7, finished=1 << 50), state(3, finished=5), state(3, finished=5))
    assert same_values(first.fetch(0, [1, 2, 3]).result(), {**sources[1].held, "fragment": 0})


def test_who_lags_is_waited_for_until_it_has_caught_up(wires: Wires) -> None:
    first, (source,) = meet(wires, state(finished=1))
    transports = [first, wires.transports[1]]
    for outer_step in range(2):
        exchange(transports, [contribution(m, outer_step=outer_step) for m in range(2)])
    fetching = first.fetch(0, [1])
    assert source.asked.wait(30)
    source.held = state(7, finished=2)
    assert same_values(fetching.result(30), {**source.held, "fragment": 0})


def test_a_state_that_moves_on_is_the_old_one_or_the_new_one_and_never_a_mixture(wires: Wires, relays: Relays) -> None:
    old, new = state(1, finished=1), state(2, finished=2)
    first, (source,) = meet(wires, old)
    seen = [0]

    def move(unit: Unit) -> bytes:
        seen[0] += chunks(unit)
        if chunks(unit) and seen[0] == 3:
            source.held = new
            raise Cut
        return unit.data

    relays.hook = move
    fetched = first.fetch(0, [1]).result()
    assert any(same_values(fetched, {**each, "fragment": 0}) for each in (old, new))
    assert same_values(first.fetch(0, [1]).result(), {**new, "fragment": 0})


def test_all_are_named_with_their_reasons(wires: Wires) -> None:
    first, _ = meet(wires, {}, {}, {}, round_timeout_s=2.0, silence_s=2.0)
    wires.transports[1].publish(None)  # type: ignore[arg-type]  # as before the first time
    wires.transports[2].publish(lambda fragment: {}[fragment])
    never = threading.Event()
    wires.transports[3].publish(lambda fragment: {"x": never.wait(30)})
    with pytest.raises(TransportError, match=r"replica 1: it has published nothing; replica 2: KeyError: 0") as caught:
        first.fetch(0, [1, 2]).result()
    assert caught.value.replicas == (1, 2)
    with pytest.raises(TransportError, match=r"none provided it within 2 s \(replica 3: it has not answered"):
        first.fetch(0, [3]).result()
    never.set()
    with pytest.raises(TransportError, match="no such other member"):
        first.fetch(0, [7]).result()


# What donors may not do.

Message = dict[str, Any]


def zeros(chunk: Message) -> Message:
    return {**chunk, "data": bytes(len(chunk["data"]))}


def entries(*paths_and_values: Any) -> Callable[[Message], Message]:
    """Offer a state of these entries."""
    return lambda offer: {**offer, "entries": paths_and_values}


def tensor(shape: list[int], dtype: str = "torch.uint8") -> Callable[[Message], Message]:
    return entries([["a"], {"type": "tensor", "dtype": dtype, "shape": shape}])


LIES: dict[str, tuple[str, Callable[[Message], Message], str]] = {
    "other bytes": ("chunk", zeros, "it does not match the digest"),
    "another place": ("chunk", lambda m: {**m, "offset": 7}, "bytes at 7 arrived where byte 0"),
    "too much": ("chunk", lambda m: {**m, "data": 20 * m["data"]}, "was announced, more than the limit"),
    "nothing": ("chunk", lambda m: {**m, "data": b""}, "of length >= 1"),
    "another answer": ("offer", lambda m: {"kind": "what"}, "unreadable message"),
    "another digest": ("offer", lambda m: {**m, "snapshot": "0" * 16}, "matching regex"),
    "another size": ("offer", lambda m: {**m, "bytes": m["bytes"] + 1}, "announces .* bytes, but its tensors"),
    "no path": ("offer", entries([[], 1]), "of length >= 1"),
    "a value that holds others": ("offer", entries([["a"], 1], [["a", "b"], 2]), "has two values"),
    "a huge shape": ("offer", tensor([1 << 30, 1 << 30]), "excessive shape"),
    "another type": ("offer", tensor([1], "torch.bool"), "'torch.bool'"),
    "many entries": ("offer", entries(*([[str(n)], 0] for n in range(5000))), "of length <= 4096"),
    "infinity": ("offer", entries([["a"], math.inf]), "whose a is inf"),
}


def test_a_donor_that_lies_is_survived_and_named(wires: Wires, relays: Relays) -> None:
    first, sources = meet(wires, state(), state(), state())
    liar = wires.transports[1].address.port
    for kind, change, words in LIES.values():

        def lies(unit: Unit, kind: str = kind, change: Callable[[Message], Message] = change) -> bytes:
            if unit.kind == "fetch" and unit.answers and unit.port == liar:
                message = unframe(unit.data)
                if message["kind"] == kind:
                    return frame(change(message))
            return unit.data

        relays.hook = lies
        assert same_values(first.fetch(0, [1, 2, 3]).result(), {**sources[0].held, "fragment": 0}), words
        with pytest.raises(TransportError, match=f"replica 1: .*{words}"):
            first.fetch(0, [1]).result()


def test_what_is_not_finite_is_refused_and_named(wires: Wires) -> None:
    bad, words = state(numel=5), "global_params, slots.momentum hold NaN or infinity"
    bad["global_params"][3], bad["slots"]["momentum"][3] = -math.inf, math.nan
    first, sources = meet(wires, bad, bad, state())
    with pytest.raises(TransportError, match=f"replica 1: its {words}"):
        first.fetch(0, [1]).result()
    assert same_values(first.fetch(0, [1, 2, 3]).result(), {**sources[2].held, "fragment": 0})


def test_more_than_expected_is_refused_before_it_comes(wires: Wires) -> None:
    first, _ = meet(wires, state())
    with pytest.raises(TransportError, match=f"at most {SIZE - 1} are expected"):
        first.fetch(0, [1], expected_bytes=SIZE - 1).result()
    assert not first.fetched_bytes
    assert first.fetch(0, [1], expected_bytes=SIZE).result()


def test_a_state_that_nobody_would_take_is_refused_by_its_donor(wires: Wires) -> None:
    first, (source,) = meet(wires, {})
    for value in (torch.zeros(1, dtype=torch.complex64), math.nan, [1], {1}, 1 << 70):
        source.held = {"global_params": value}
        with pytest.raises(TransportError, match="replica 1: its state can't be sent: "):
            first.fetch(0, [1]).result()


# What fetchers may not do.


def ask(fragment: Any = 0, snapshot: Any = "", **more: Any) -> bytes:
    return frame({"kind": "fetch", "fragment": fragment, "after": 0, "snapshot": snapshot, **more})


def heard(stranger: Any) -> Message:
    data = stranger.recv(8)
    size = 8 + int.from_bytes(data[4:8], "big")
    while len(data) < size:
        data += stranger.recv(size - len(data))
    return unframe(data)


def test_a_request_that_is_none_ends_its_connection_only(wires: Wires) -> None:
    first, (source,) = meet(wires, state(numel=100))
    for fragment, offset in [(-1, 0), ("0", 0), (0, -1), (0, 800), (0, 1e3)]:
        with closing(stranger_at(wires.transports[1].address)) as stranger:
            stranger.sendall(ask())
            stranger.sendall(ask(fragment, heard(stranger)["snapshot"], offset=offset))
            assert stranger.recv(1) == b""
    with closing(stranger_at(wires.transports[1].address)) as stranger:
        stranger.sendall(ask(0, "feed" * 16, offset=0))
        refused = heard(stranger)
    assert (refused["reason"], refused["for_good"]) == ("its state has changed in the meantime", False)
    assert same_values(first.fetch(0, [1]).result(), {**source.held, "fragment": 0})


def test_a_few_are_served_at_once_and_the_others_come_again(wires: Wires) -> None:
    first, (source,) = meet(wires, state())
    with ExitStack() as leaving:
        for _ in range(20):
            stranger = leaving.enter_context(closing(stranger_at(wires.transports[1].address)))
            stranger.sendall(ask())
            answer = heard(stranger)
        assert not answer["for_good"]
        assert "it is serving 4 others" in answer["reason"]
        fetching = first.fetch(0, [1])
        assert not fetching.done()
    assert same_values(fetching.result(30), {**source.held, "fragment": 0})
    assert source.copies == 1, "one copy for all"


def test_nobody_keeps_a_donor_on_an_old_state_for_longer_than_it_takes_to_send(wires: Wires) -> None:
    """A stranger begins to read a snapshot, which is more than the kernel buffers, and stops."""
    first, (source,) = meet(wires, state(numel=2_000_000), round_timeout_s=5.0)
    with closing(stranger_at(wires.transports[1].address)) as stranger:
        stranger.sendall(ask())
        stranger.sendall(ask(snapshot=heard(stranger)["snapshot"]))
        assert stranger.recv(1)
        source.held = state(1)
        with closing(stranger_at(wires.transports[1].address)) as other:
            other.sendall(ask())
            assert "still sending an earlier state" in heard(other)["reason"]
        with suppress(TransportError):  # it may end just before the donor has a new one
            first.fetch(0, [1]).result()
        assert same_values(first.fetch(0, [1]).result(), {**source.held, "fragment": 0})


def test_a_snapshot_that_was_replaced_takes_no_memory(wires: Wires) -> None:
    """A timer had kept each for half a minute: one copy more with each round after which a fetcher asked."""
    first, (source,) = meet(wires, {})
    copies = list[Callable[[], object]]()
    for _ in range(5):
        copies.append(weakref.ref(values := np.zeros(1000, np.float32)))
        source.held = {"global_params": torch.from_numpy(values)}
        del values
        first.fetch(0, [1]).result()
    gc.collect()
    assert sum(copy() is not None for copy in copies) <= 2, "the last one, and maybe the one before it"


def test_a_donor_goes_on_while_its_state_is_copied(wires: Wires) -> None:
    """It exchanges a round, although the copy has to wait for the training thread."""
    first, donor = wires.meet(2)
    copying, exchanged = threading.Event(), threading.Event()
    donor.publish(lambda fragment: {"exchanged": copying.set() or exchanged.wait(30)})
    fetching = first.fetch(0, [1])
    assert copying.wait(30)
    assert exchange([first, donor], [contribution(m) for m in range(2)])[0].contributors == (0, 1)
    exchanged.set()
    assert fetching.result(30) == {"exchanged": True}
