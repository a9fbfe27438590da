"""Damage on the wire between whole transports: a payload arrives as it was sent, or the round is void for all."""

from __future__ import annotations

import gc
import itertools
import math
import socket
import struct
import sys
import threading
import time
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
from diloco.errors import ConfigurationError, ReplicaLostError, RoundVoidError, TransportError
from diloco.protocol import Average, Rules
from diloco.transport import PeerTransport
from tests.transport.contract import exchange
from tests.transport.relays import PART, Cut, Relays, Unit, part
from tests.transport.wires import Wires, at_once

LIMIT_S = 30.0
NUMEL = 300_000


def contribution(replica: int, outer_step: int = 0, codec: str = "float32", numel: int = NUMEL) -> Contribution:
    """Return a contribution of many parts."""
    encoder, generator = make_codec(codec), torch.Generator().manual_seed(10 * outer_step + replica)
    payload = encoder.encode(torch.randn(numel, generator=generator))
    return Contribution(
        round=RoundId(0, outer_step), replica=replica, codec=encoder, numel=numel, payload=payload, digest="d"
    )


def check_round(transports: Sequence[PeerTransport], outer_step: int = 0, codec: str = "float32") -> list[Average]:
    """Exchange one round, and check its bits."""
    given = [contribution(each.replica, outer_step, codec) for each in transports]
    pending = [each.average(one) for each, one in zip(transports, given, strict=True)]
    averages = [each.wait() for each in pending]
    expected = weighted_mean(given).values
    assert all(torch.equal(each.values, expected) for each in averages)
    return averages


def outcome(transport: PeerTransport, contributors: int = 0, first: int = 1) -> Average | TransportError:
    """Take part in rounds until one has so many contributors, or this replica is told that it may not."""
    for outer_step in range(first, first + 100):
        try:
            average = transport.average(contribution(transport.replica, outer_step)).wait()
        except RoundVoidError:
            continue
        except TransportError as error:
            return error
        if len(average.contributors) == contributors:
            return average
    raise AssertionError("they went on")


def test_what_a_broken_connection_lost_is_sent_again(wires: Wires, relays: Relays) -> None:
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
        check_round(transports, outer_step, "fp4" if outer_step else "float32")
    assert sum(cuts) >= 3
    assert relays.opened.count("link") > 3, "connections were opened again"
    assert [each.view.id for each in transports] == [0] * 3


def test_a_payload_over_many_connections_arrives_as_it_was_sent(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_INFO")  # of unknown length, a path gets many connections, as a long one does
    transports = wires.meet(2)
    for outer_step in range(3):
        check_round(transports, outer_step, "fp4")
    assert all(len(peer.link.stripes) > 1 for each in transports for peer in each.connections.peers.values())


def test_the_number_of_stripes_follows_the_view_while_payloads_are_sent(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the stripes that end had not delivered is sent over the others."""
    monkeypatch.delattr(socket, "TCP_INFO")
    transports = wires.meet(2)
    peers = [each.connections.peers[1 - each.replica].link for each in transports]
    outer_steps = itertools.count()
    for others, stripes in ((1, 32), (4, 8), (1, 32)):
        ended = [stripe.ended for peer in peers for stripe in peer.stripes.values()]
        step = next(outer_steps)
        given = [contribution(each.replica, step) for each in transports]
        pending = [each.average(one) for each, one in zip(transports, given, strict=True)]
        for transport in transports:  # the other members are none of this test
            ranks = [1 - transport.replica, *range(10, 9 + others)]
            transport.connections.post(transport.links.want, ranks)
        averages = [each.wait() for each in pending]
        assert all(torch.equal(each.values, weighted_mean(given).values) for each in averages), step
        for _ in range(100):
            check_round(transports, next(outer_steps))
            if [len(peer.stripes) for peer in peers] == [stripes] * 2:
                break
        assert [len(peer.stripes) for peer in peers] == [stripes] * 2
        assert sum(each.done() for each in ended) == max(0, len(ended) - 2 * stripes)
    assert [each.failure for each in transports] == [None, None]


def test_a_stripe_whose_kernel_holds_back_what_it_was_given_takes_nothing_and_keeps_its_pace(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "TCP_INFO")
    transports = wires.meet(2)
    for outer_step in range(3):
        check_round(transports, outer_step)
    (peer,) = (each.link for each in transports[0].connections.peers.values())
    slow, *others = peer.stripes.values()
    assert others
    paces = list[tuple[Any, int, int]]()

    def write(stripe: Any, usual: Callable[[Any], None], part: Any) -> None:
        told = (
            stripe._socket.getsockopt(socket.SOL_SOCKET, 47, struct.calcsize("L")) if sys.platform == "linux" else b""
        )
        paces.append((stripe, peer._needed, int.from_bytes(told, sys.byteorder)))
        usual(part)

    for stripe in peer.stripes.values():
        monkeypatch.setattr(stripe, "write", partial(write, stripe, stripe.write))
    monkeypatch.setattr(slow, "counters", lambda: type(others[0].counters())(unsent=1 << 30))
    peer.pace.bits_per_s = peer.pace.seen_bits_per_s = 80e6
    check_round(transports, 3)
    assert slow not in [stripe for stripe, *_ in paces]
    if sys.platform == "linux":
        _, needed, bytes_per_s = paces[0]
        assert bytes_per_s == int(80e6 / needed / 8)


def test_a_flood_of_small_parts_is_read_slowly(wires: Wires) -> None:
    """Hundreds of thousands fit into what is read at a time, and nothing else was heard meanwhile."""
    transports = wires.meet(2)
    check_round(transports)
    (peer,) = (each.link for each in transports[0].connections.peers.values())
    (stripe,) = peer.stripes.values()
    data = b"".join(part(b"x", tag=number, total=1) for number in range(20_000))

    async def flood() -> int:
        before = peer.received_bytes
        stripe.get_buffer(-1)[: len(data)] = data
        stripe.buffer_updated(len(data))
        return peer.received_bytes - before

    assert 8000 < transports[0].connections.call(flood()) < 16_000, "as many as there are messages in a round"
    check_round(transports, 1)


def test_small_parts_that_come_early_take_little_more_memory_than_large_ones(wires: Wires) -> None:
    """Each took 650 bytes, and was counted as 256."""
    transports, tag = wires.meet(2), 1 << 40
    peer, stripe = transports[0].connections.peers[1].link, sys.modules["diloco.transport.connections.stripe"]

    async def arrive() -> None:
        peer.open_round(tag, 1 << 24)
        for number in range(1 << 18):
            peer.arrived(stripe.Head(b"D", tag << 17 | number % (1 << 17), 1 << 20, number, 1), memoryview(b"x"))

    tracemalloc.start()
    with pytest.raises(TransportError, match="more arrived early for a round"):
        transports[0].connections.call(arrive())
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 16 << 20


def test_who_reads_no_acknowledgements_has_them_pile_up_on_no_stripe(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member could send many small parts, and take as much memory as it sent."""
    transports = wires.meet(2)
    check_round(transports)
    (link,) = (each.link for each in transports[0].connections.peers.values())
    (stripe,) = link.stripes.values()
    monkeypatch.setattr(stripe.transport, "get_write_buffer_size", lambda: 1 << 20)
    check_round(transports, 1)
    assert stripe.ended.result() == "the other side does not read what it is told"
    assert link.stripes


def test_a_void_round_costs_only_what_was_sent_and_an_early_payload_waits_at_its_sender(
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


@pytest.mark.parametrize("max_norm", [None, 1e9], ids=["reduce-scatter", "all-gather"])
def test_a_payload_that_no_mean_contains_is_neither_sent_nor_awaited(
    wires: Wires, relays: Relays, max_norm: float | None
) -> None:
    """That of a replica that has just joined, and is still fetching the state."""
    transports, sent = wires.meet(3), [0, 0, 0]
    transports[2].connections.machine.rounds.joined = True
    rank_of = {each.address.port: each.replica for each in transports}

    def count(unit: Unit) -> bytes:
        if unit.is_part:
            sent[rank_of[unit.port] if unit.answers else unit.rank] += len(unit.data) - PART.size
        return unit.data

    relays.hook = count
    given = [replace(contribution(m), buffers=torch.tensor([1.0 + m]), max_norm=max_norm) for m in range(3)]
    averages = exchange(transports, given)
    expected = weighted_mean(given[:2]).values
    for each in averages:
        assert each.contributors == (0, 1)
        assert torch.equal(each.values, expected)
        assert each.buffers.tolist() == [1.5]
    slices = 0 if max_norm else 2 * 4 * NUMEL // 3
    assert sent[2] == slices, "its slice of the mean"
    assert sent[0] == sent[1] == 2 * (4 * NUMEL // (1 if max_norm else 3) + 4) + slices


def test_what_nobody_acknowledges_is_freed_two_rounds_later_and_lifts_the_pace(
    wires: Wires, relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = wires.meet(2)
    relays.hook = lambda unit: b"" if unit.kind == "link" and unit.number and unit.data[:1] == b"A" else unit.data
    numbers = np.ones(NUMEL, dtype=np.float32)
    freed, payload = weakref.ref(numbers), torch.from_numpy(numbers).view(torch.uint8)
    (link,) = (each.link for each in transports[0].connections.peers.values())
    link.pace.bits_per_s = 1e6
    pending = transports[0].average(replace(contribution(0), payload=payload)), transports[1].average(contribution(1))
    del numbers, payload
    for each in pending:
        each.wait()
    del pending, each
    monkeypatch.setattr(type(link.stripes[0]), "MOST_FORGOTTEN", 9)
    for outer_step in (1, 2, 3):
        check_round(transports, outer_step)
    gc.collect()
    assert freed() is None
    assert link.pace.bits_per_s == math.inf
    assert link.uses > 1, "what is kept of the parts of a stripe is bounded"


def test_pieces_of_a_payload_of_any_size_and_buffers_are_told_apart(wires: Wires) -> None:
    """Before, the number of a piece had no more room in its tag from 34 GB on. A half has more values than numbers."""
    transports = wires.meet(2, piece_bytes=1, round_timeout_s=100.0)
    given = [replace(contribution(m, numel=132_000), buffers=torch.tensor([1.0 + m])) for m in range(2)]
    for average in exchange(transports, given):
        assert torch.equal(average.values, weighted_mean(given).values)
        assert average.buffers is not None
        assert average.buffers.tolist() == [1.5]
    with pytest.raises(ConfigurationError, match="The model's buffers have 1073741828 bytes"):
        transports[0].average(replace(contribution(0, 1), buffers=torch.empty((1 << 28) + 1)))


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


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "a message of a gigabyte": lambda data: changed(data, total=1 << 30),
    "a part of four gigabytes": lambda data: data[:17] + b"\xff" * 4 + data[21:],
    "a part outside of its message": lambda data: changed(data, start=1 << 31),
    "a part that overlaps the next one": lambda data: changed(data, start=1),
    "a part of one byte": lambda data: changed(data, data[PART.size : PART.size + 1]),
    "a kind that is none": lambda data: changed(data, kind=b"?"),
    "an acknowledgement of nothing": lambda data: PART.pack(b"A", 77, 0, 0, 0) + data,
    "a round that is none": lambda data: changed(data, tag=1 << 40),
    "many messages that nobody has asked for": lambda data: b"".join(
        [*(part(b"x", tag=n, total=100_000, start=99_999) for n in range(1000, 3000)), data]
    ),
    "no compressed frame": lambda data: changed(data, b"any bytes", kind=b"Z"),
    "two compressed frames": lambda data: changed(data, 2 * compressed(bytes(1000)), kind=b"Z"),
    "a compressed frame of unknown size": lambda data: changed(
        data, compressed(bytes(1000), write_content_size=False), kind=b"Z"
    ),
    "a bomb": lambda data: changed(data, bomb(1 << 28), kind=b"Z"),
}


def test_no_part_of_a_payload_takes_more_memory_than_documented_or_stops_the_run(wires: Wires, relays: Relays) -> None:
    """The first part of a round is replaced. That round is right or void, and a later one is right."""
    attacks, lock = list[Callable[[bytes], bytes]](), threading.Lock()

    def attack(unit: Unit) -> bytes:
        with lock:
            changes = attacks.pop() if unit.is_part and attacks else bytes
        return changes(unit.data)

    transports = wires.meet(2, round_timeout_s=2.0, silence_s=2.0, continue_without_lost=True)
    relays.hook, outer_step = attack, 0
    for case, changes in HOSTILE.items():
        attacks.append(changes)
        tracemalloc.start()
        try:
            averages = at_once([partial(outcome, each, 2, outer_step + 1) for each in transports])
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert not attacks, case
        assert peak_bytes < 100 << 20, f"{case}: what two transports and a relay need"
        outer_step = averages[0].round.outer_step
        expected = weighted_mean([contribution(m, outer_step) for m in range(2)]).values
        assert all(torch.equal(each.values, expected) for each in averages), case
        assert [each.view.members for each in transports] == [(0, 1)] * 2, case


def overlapping(data: bytes) -> bytes:
    """Return a part as two, of the same size together, of which the second begins before the first ends."""
    body, start = data[PART.size :], PART.unpack_from(data)[3]
    half = len(body) // 2
    return changed(data, body[:half]) + changed(data, body[half - 1 : -1], start=start + half - 1)


WRONG: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "of another size": (lambda data: changed(data, total=NUMEL * 8), "2400000 bytes arrived where"),
    "whose parts overlap": (overlapping, "overlap"),
    "in parts of one byte": (lambda data: changed(data, data[PART.size : PART.size + 1]), "a part of 1 bytes"),
    "damaged before it was compressed": (lambda data: changed(data, b"any bytes", kind=b"Z"), "is damaged"),
    "of a kind that is none": (lambda data: changed(data, kind=b"?"), "an invalid part of kind b'?'"),
}
"""What all parts of a member become, and why its messages are refused."""


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_who_always_sends_wrong_messages_is_named_and_excluded(
    wires: Wires,
    relays: Relays,
    monkeypatch: pytest.MonkeyPatch,
    changes: Callable[[bytes], bytes],
    words: str,
    *,
    early: bool,
) -> None:
    """Before, nobody was blamed: all rounds were void for ever. ``early``: they come before it is known who sends."""
    monkeypatch.setattr(sys.modules["diloco.transport.connections.links"], "_RETRY_PART", 1000)  # dial again at once
    transports = wires.meet(3, continue_without_lost=True)
    rank_of, spoilt = {each.address.port: each.replica for each in transports}, threading.Event()

    def spoil(unit: Unit) -> bytes:
        ends = unit.rank, rank_of[unit.port]
        sender, receiver = reversed(ends) if unit.answers else ends
        if early and unit.kind == "hello" and (sender, receiver) == (0, 1) and b"header" in unit.data:
            spoilt.wait(1.0)
            spoilt.clear()
        if not (unit.is_part and sender == 2):
            return unit.data
        spoilt.set()
        return changes(unit.data)

    relays.hook = spoil
    outcomes = at_once([partial(outcome, each, 2) for each in transports])
    assert isinstance(outcomes[2], ReplicaLostError)
    assert torch.equal(outcomes[0].values, outcomes[1].values)
    for each in transports[:2]:
        assert each.view.members == (0, 1)
        reason = each.connections.machine.rounds.reason
        assert "replica 2 has spoilt at least 3 recent rounds" in reason
        assert words in reason


# Control connections.


@pytest.mark.skipif(sys.platform != "linux", reason="no clock of others goes on")
def test_a_machine_that_slept_until_the_others_had_ended_does_not_go_on_alone(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock stands still meanwhile, so they seemed to have ended just now: it made a second history."""
    first, second = wires.meet(2, continue_without_lost=True)
    check_round([first, second])
    now_s = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: now_s(clock) + 3600.0)
    monkeypatch.setattr(Rules, "guard_s", 4.0)  # it waits for the other one, and gives up
    first.close()
    error = outcome(second)
    assert isinstance(error, ReplicaLostError)
    assert error.replicas == (0,)
    assert "may be continuing without replica 1" in str(error)


@pytest.mark.parametrize(("victim", "survive"), [(0, True), (2, False)], ids=["continue", "stop"])
def test_a_cut_network_never_has_two_histories(wires: Wires, relays: Relays, victim: int, *, survive: bool) -> None:
    """Nothing reaches or leaves one of three, and no connection ends; later the network heals."""
    transports = wires.meet(3, continue_without_lost=survive)
    check_round(transports)
    whole, rank_of = threading.Event(), {each.address.port: each.replica for each in transports}

    def hold_back(unit: Unit) -> bytes:
        if victim in (unit.rank, rank_of.get(unit.port)):
            assert whole.wait(LIMIT_S)
        return unit.data

    relays.hook = hold_back
    for each in transports:  # as if it were so for long; within a short limit a busy machine would lose others, too
        heard_s = each.connections.machine.roster.heard_s
        cut_off = {victim} if each.replica != victim else {*heard_s}
        each.connections.post(heard_s.update, dict.fromkeys(cut_off, -math.inf))
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


@pytest.mark.parametrize("is_opened", [False, True])
def test_a_payload_connection_that_ends_at_once_costs_one_of_the_two(
    wires: Wires, relays: Relays, *, is_opened: bool
) -> None:
    """It can't be made again, or ends with what comes with its request."""

    def spoil(unit: Unit) -> bytes:
        if unit.kind != "link" or {unit.rank, rank_of[unit.port]} != {0, 1}:
            return unit.data
        if not is_opened or unit.is_part:
            raise Cut
        is_request = unit.number == 0 and not unit.answers
        return unit.data + part(b"", kind=b"?", total=0) if is_request else unit.data

    transports = wires.meet(3, continue_without_lost=True)
    rank_of = {each.address.port: each.replica for each in transports}
    check_round(transports)  # so that those of the other pairs are open, and are not waited for
    relays.hook = spoil
    for each in transports:  # heartbeats may take as long as usual
        each.connections.rules = replace(each.rules, silence_s=2.0)
    outcomes = at_once([partial(outcome, each, 2) for each in transports])
    (lost,) = [replica for replica, each in enumerate(outcomes) if isinstance(each, TransportError)]
    assert lost in (0, 1)
    one, other = [each for each in outcomes if isinstance(each, Average)]
    assert torch.equal(one.values, other.values)
