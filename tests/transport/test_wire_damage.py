"""Damage on the wire between whole transports: a payload arrives as it was sent, or the round is void for all."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from diloco.algorithm import Contribution, RoundId, make_codec, weighted_mean
from diloco.errors import ReplicaLostError, RoundVoidError, TransportError
from diloco.protocol import Average
from diloco.transport import PeerTransport
from tests.transport.relays import PART, Cut, Relays, Unit, part, unframe
from tests.transport.wires import Wires, at_once

LIMIT_S = 30.0
NUMEL = 300_000


def contribution(replica: int, outer_step: int = 0, codec: str = "float32") -> Contribution:
    """Return a contribution of many parts."""
    encoder, generator = make_codec(codec), torch.Generator().manual_seed(10 * outer_step + replica)
    payload = encoder.encode(torch.randn(NUMEL, generator=generator))
    return Contribution(
        round=RoundId(0, outer_step), replica=replica, codec=encoder, numel=NUMEL, payload=payload, digest="d"
    )


def check_round(transports: Sequence[PeerTransport], outer_step: int = 0, codec: str = "float32") -> list[Average]:
    """Exchange one round, and check its bits."""
    given = [contribution(each.replica, outer_step, codec) for each in transports]
    pending = [each.average(one) for each, one in zip(transports, given, strict=True)]
    averages = [each.wait() for each in pending]
    expected = weighted_mean(given).values
    assert all(torch.equal(each.values, expected) for each in averages)
    return averages


def one_of_them_soon(transports: Sequence[PeerTransport], first: int = 0) -> None:
    """Exchange rounds until one is committed; a round may be void, for all."""
    for outer_step in range(first, first + 4):
        results = at_once([partial(attempt, each, outer_step) for each in transports])
        assert len({type(each) for each in results}) == 1, results
        if isinstance(results[0], Average):
            given = [contribution(each.replica, outer_step) for each in transports]
            assert all(torch.equal(each.values, weighted_mean(given).values) for each in results)
            return
        assert isinstance(results[0], RoundVoidError), results
    raise AssertionError("no round was committed")


def attempt(transport: PeerTransport, outer_step: int) -> Average:
    return transport.average(contribution(transport.replica, outer_step)).wait()


@pytest.mark.parametrize("codec", ["float32", "fp4"])
def test_what_a_broken_connection_lost_is_sent_again(wires: Wires, relays: Relays, codec: str) -> None:
    """Payload connections are cut again and again, in both directions."""
    cuts, lock = [0, 0], threading.Lock()

    def cut(unit: Unit) -> bytes:
        with lock:
            if unit.is_part and unit.number % 3 == 2 and cuts[unit.answers] < 3:
                cuts[unit.answers] += 1
                raise Cut
        return unit.data

    transports = wires.meet(3)
    relays.hook = cut
    for outer_step in range(3):
        check_round(transports, outer_step, codec)
    assert sum(cuts) >= 3
    assert relays.opened.count("link") > 3, "connections were opened again"
    assert [each.view.id for each in transports] == [0] * 3


def test_what_a_connection_that_is_no_longer_wanted_had_not_delivered_is_sent_again(
    wires: Wires, relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view grows while payloads travel, so that one connection has to do to each member."""
    monkeypatch.delattr(socket, "TCP_INFO")  # of unknown length, a path gets many connections, as a long one does
    grown, opened, waiting = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)

    def hold(unit: Unit) -> bytes:
        if unit.kind == "link" and unit.number == 0 and unit.answers:
            opened.release()
        if unit.is_part and not grown.is_set():
            waiting.release()
            grown.wait(LIMIT_S)
        return unit.data

    relays.hook = hold
    transports = wires.meet(2)
    assert all(opened.acquire(timeout=LIMIT_S) for _ in range(32))
    pending = [each.average(contribution(each.replica)) for each in transports]
    assert all(waiting.acquire(timeout=LIMIT_S) for _ in range(32))
    for each in transports:
        members = [*range(100)]
        del members[each.replica]
        each.connections.post(each.links.want, members)
        each.connections.call(asyncio.sleep(0))  # until that has been done
    grown.set()
    expected = weighted_mean([contribution(0), contribution(1)]).values
    assert all(torch.equal(each.wait().values, expected) for each in pending)
    assert [len(link.stripes) for each in transports for link in each.connections.peers.values()] == [1, 1]


def test_what_arrives_before_the_last_header_is_kept(wires: Wires, relays: Relays) -> None:
    """Replica 0 lacks the header of replica 2, which replica 1 has: it knows the plan and sends."""
    transports = wires.meet(3)
    rank_of, early = {each.address.port: each.replica for each in transports}, threading.Event()

    def hold_header(unit: Unit) -> bytes:
        ends = (unit.rank, rank_of.get(unit.port))
        if unit.kind == "hello" and unit.number > 1 and (ends if unit.answers else ends[::-1]) == (0, 2):
            assert unframe(unit.data)["kind"] != "header" or early.wait(LIMIT_S)
        return unit.data

    def arrived(*part: Any) -> None:
        store(*part)
        early.set()

    link = transports[0].links.by_rank[1]
    store, link.arrived = link.arrived, arrived  # type: ignore[method-assign] # to know when it has happened
    relays.hook = hold_header
    check_round(transports)
    assert early.is_set()


def test_a_connection_that_holds_back_what_it_was_given_is_given_no_more(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One other carries all of it as soon as it has room, of which nothing tells but the kernel's counters."""
    monkeypatch.delattr(socket, "TCP_INFO")  # of unknown length, a path gets many connections, as a long one does
    transports = wires.meet(2)
    check_round(transports)
    free = [next(iter(link.stripes.values())) for each in transports for link in each.links.by_rank.values()]
    stripe_class, looks, used = type(free[0]), iter(range(1000)), set[Any]()
    counters, write = stripe_class.counters, stripe_class.write

    def held_back(stripe: Any) -> Any:
        return counters(stripe)._replace(unsent=0 if stripe in free and next(looks) > 20 else 1 << 20)

    def watched(stripe: Any, part: Any) -> None:
        used.add(stripe)
        write(stripe, part)

    monkeypatch.setattr(stripe_class, "counters", held_back)
    monkeypatch.setattr(stripe_class, "write", watched)
    check_round(transports, 1)
    assert used == set(free)


def test_a_void_round_costs_no_more_than_was_sent_of_it_and_an_early_payload_waits_at_its_sender(
    wires: Wires, relays: Relays
) -> None:
    sent = [0]

    def count(unit: Unit) -> bytes:
        sent[0] += len(unit.data) * unit.is_part
        return unit.data

    transports = wires.meet(2)
    relays.hook = count
    check_round(transports)
    of_one, early = sent[0], transports[0].average(contribution(0, 1))
    void = transports[1].average(replace(contribution(1, 1), withdrawn="it was not finite"))
    for each in (early, void):
        with pytest.raises(RoundVoidError, match="it was not finite"):
            each.wait()
    check_round(transports, 2)
    assert sent[0] < 2.2 * of_one, "two good rounds, and at most a tenth of each direction's payload of the void one"


def test_what_nobody_acknowledges_is_freed_two_rounds_later_and_lifts_the_pace(wires: Wires, relays: Relays) -> None:
    transports = wires.meet(2)
    relays.hook = lambda unit: b"" if unit.kind == "link" and unit.number and unit.data[:1] == b"A" else unit.data
    numbers = np.ones(NUMEL, dtype=np.float32)
    freed, payload = weakref.ref(numbers), torch.from_numpy(numbers).view(torch.uint8)
    (link,) = transports[0].connections.peers.values()
    link.pace.bits_per_s = 1e6
    pending = transports[0].average(replace(contribution(0), payload=payload)), transports[1].average(contribution(1))
    del numbers, payload
    for each in pending:
        each.wait()
    del pending, each
    for outer_step in (1, 2, 3):
        check_round(transports, outer_step)
    gc.collect()
    assert freed() is None
    assert link.pace.bits_per_s == math.inf


def compressed(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def bomb(size: int) -> bytes:
    """Return a small frame of many zeros, made without them."""
    frame = zstandard.ZstdCompressor().compressobj(size=size)
    return b"".join([*(frame.compress(bytes(1 << 20)) for _ in range(size >> 20)), frame.flush()])


def changed(data: bytes, body: bytes | None = None, **fields: Any) -> bytes:
    """Return a part with other fields, or another body."""
    names = ("kind", "tag", "total", "start")
    given = dict(zip(names, PART.unpack_from(data), strict=False)) | fields
    return part(data[PART.size :] if body is None else body, **given)


def injected(*parts: bytes) -> Callable[[bytes], bytes]:
    return lambda data: b"".join([*parts, data])


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "a message of a gigabyte": lambda data: changed(data, total=1 << 30),
    "a message of another size": lambda data: changed(data, total=NUMEL * 4 + 1),
    "a part of four gigabytes": lambda data: data[:17] + b"\xff" * 4 + data[21:],
    "a part outside of its message": lambda data: changed(data, start=1 << 31),
    "a part that overlaps the next one": lambda data: changed(data, start=1),
    "a part of one byte": lambda data: changed(data, data[PART.size : PART.size + 1]),
    "a kind that is none": lambda data: changed(data, kind=b"?"),
    "an acknowledgement of nothing": lambda data: PART.pack(b"A", 77, 0, 0, 0) + data,
    "a round that is none": lambda data: changed(data, tag=1 << 40),
    "many messages that nobody has asked for": injected(
        *(part(b"x", tag=n, total=100_000, start=99_999) for n in range(1000, 3000))
    ),
    "no compressed frame": lambda data: changed(data, b"any bytes", kind=b"Z"),
    "a compressed frame that was cut": lambda data: changed(data, compressed(bytes(1000))[:-1], kind=b"Z"),
    "two compressed frames": lambda data: changed(data, 2 * compressed(bytes(1000)), kind=b"Z"),
    "a compressed frame of unknown size": lambda data: changed(
        data, compressed(bytes(1000), write_content_size=False), kind=b"Z"
    ),
    "an empty compressed frame": lambda data: changed(data, compressed(b""), kind=b"Z"),
    "a bomb": lambda data: changed(data, bomb(1 << 28), kind=b"Z"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_no_part_of_a_payload_takes_more_memory_than_documented_or_stops_the_run(
    wires: Wires, relays: Relays, case: str
) -> None:
    """The first part is replaced. The round is right or void, and a later one is right."""
    before: list[bytes] = []

    def attack(unit: Unit) -> bytes:
        if unit.is_part and not before:
            before.append(unit.data)
            return HOSTILE[case](unit.data)
        return unit.data

    transports = wires.meet(2, round_timeout_s=2.0, silence_s=2.0, continue_without_lost=True)
    relays.hook = attack
    tracemalloc.start()
    try:
        one_of_them_soon(transports)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert before
    assert peak_bytes < 100 << 20, "what two transports and a relay need"
    assert [each.view.members for each in transports] == [(0, 1)] * 2


# Control connections.


def outcome(transport: PeerTransport, contributors: int = 0) -> Average | TransportError:
    """Take part in rounds until one has so many contributors, or this replica is told that it may not."""
    for outer_step in range(1, 100):
        try:
            average = attempt(transport, outer_step)
        except RoundVoidError:
            continue
        except TransportError as error:
            return error
        if len(average.contributors) == contributors:
            return average
    raise AssertionError("they went on")


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("survive", [True, False], ids=["continue", "stop"])
def test_a_cut_network_never_has_two_histories(wires: Wires, relays: Relays, victim: int, *, survive: bool) -> None:
    """Nothing reaches or leaves one of three, and no connection ends; later the network heals."""
    transports = wires.meet(3, continue_without_lost=survive, heartbeat_s=0.1, silence_s=1.0)
    check_round(transports)
    whole, rank_of = threading.Event(), {each.address.port: each.replica for each in transports}

    def hold_back(unit: Unit) -> bytes:
        if victim in (unit.rank, rank_of.get(unit.port)):
            assert whole.wait(LIMIT_S)
        return unit.data

    relays.hook = hold_back
    others = [each for each in transports if each.replica != victim]
    with ThreadPoolExecutor() as threads:
        alone = threads.submit(outcome, transports[victim])
        results = [*threads.map(outcome, others, [2 if survive else 0] * 2)]
        whole.set()
        assert isinstance(alone.result(), ReplicaLostError)
    if survive:
        assert torch.equal(results[0].values, results[1].values)
        assert [each.failure for each in others] == [None, None]
    else:
        assert all(isinstance(each, ReplicaLostError) and each.replicas == (victim,) for each in results), results


def test_a_payload_connection_that_can_not_be_made_costs_one_of_the_two(wires: Wires, relays: Relays) -> None:
    def refuse(unit: Unit) -> bytes:
        if unit.kind == "link" and {unit.rank, rank_of[unit.port]} == {0, 1}:
            raise Cut
        return unit.data

    transports = wires.meet(3, continue_without_lost=True, heartbeat_s=0.1, silence_s=0.5, rendezvous_timeout_s=1.0)
    rank_of = {each.address.port: each.replica for each in transports}
    relays.hook = refuse
    outcomes = at_once([partial(outcome, each, 2) for each in transports])
    (lost,) = [replica for replica, each in enumerate(outcomes) if isinstance(each, TransportError)]
    assert lost in (0, 1)
    one, other = [each for each in outcomes if isinstance(each, Average)]
    assert torch.equal(one.values, other.values)


def test_nor_does_one_count_that_ends_with_what_comes_with_its_request(wires: Wires, relays: Relays) -> None:
    def spoil(unit: Unit) -> bytes:
        is_request = unit.kind == "link" and unit.number == 0 and not unit.answers
        return unit.data + part(b"", kind=b"?", total=0) if is_request else unit.data

    relays.hook = spoil
    transports = wires.meet(2, heartbeat_s=0.1, silence_s=0.5, rendezvous_timeout_s=3.0)
    errors = at_once([partial(outcome, each) for each in transports])
    assert all(isinstance(each, ReplicaLostError) for each in errors), errors
