"""The same run gives the same bits on every transport (invariant 5), in local and in global parameters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from diloco.algorithm import AlphaMerge, Codec, Contribution, SyncSchedule, Uplink, make_codec
from diloco.events import Event, RoundCommitted
from diloco.protocol import Average
from diloco.transport import InProcessTransport, PeerTransport, Transport
from tests.outer.test_golden_digests import Case, Replica
from tests.transport.contract import contribution
from tests.transport.wires import Wires, at_once

STEPS = 28


def trained(transports: Sequence[Transport], codec: Codec | str, **more: Any) -> list[str]:
    """Train a replica in a thread on each of the transports, and return the digests of their parameters."""
    schedule = SyncSchedule(inner_steps=7, num_fragments=3, overlap_steps=2)
    case = Case("", schedule=schedule, arguments={"codec": codec, "merge": AlphaMerge(0.5), **more})

    def live(transport: Transport) -> str:
        replica = Replica(transport.replica, transport, case)
        with replica.diloco:
            replica.train_alone(STEPS)
        return replica.digest()

    return at_once([partial(live, each) for each in transports])


def in_process(num_replicas: int, codec: Codec | str, **more: Any) -> list[str]:
    hub = InProcessTransport(num_replicas)
    return trained([hub.endpoint(m) for m in hub.view.members], codec, **more)


def over_sockets(num_replicas: int, codec: Codec | str, **more: Any) -> tuple[list[str], list[int]]:
    """Train over TCP, and return also the bytes that each replica has sent."""
    wires = Wires()
    try:
        transports = wires.meet(num_replicas, piece_bytes=512)  # small payloads are divided into several pieces, too
        return trained(transports, codec, **more), [each.sent_bytes for each in transports]
    finally:
        wires.close()


INT8 = make_codec("int8", block_size=32)


@pytest.mark.parametrize(("codec", "means"), [("float32", {}), (INT8, {"mean_codec": INT8})])
def test_a_replica_with_a_slow_uplink_owns_less_from_the_second_round_on(
    codec: Codec | str, means: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process all own equal parts."""
    slow, fast = Uplink(20_000_000, full=True), Uplink(200_000_000)
    monkeypatch.setattr(PeerTransport, "uplink", property(lambda self: slow if self.replica == 1 else fast))
    digests, sent_bytes = over_sockets(4, codec, **means)
    assert digests == in_process(4, codec, **means)
    assert sent_bytes[1] < 0.8 * min(sent_bytes[0], *sent_bytes[2:])


def test_slow_uplinks_make_all_choose_the_same_means_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, among fewer replicas than encode their means otherwise."""
    events: list[Event] = []
    monkeypatch.setattr(PeerTransport, "uplink", property(lambda self: Uplink(1000 + self.replica)))
    digests, _ = over_sockets(4, "fp4", on_event=events.append)
    (choice,) = {event.choice for event in events if isinstance(event, RoundCommitted)} - {""}
    assert "means are sent in fp4. In measurements this changed the loss by at most 0.23 %" in choice
    assert digests != in_process(4, "fp4")


@pytest.mark.parametrize(("round_trip_s", "codec"), [(0.0, ""), (0.3, "int8")])
def test_round_trips_leave_less_time_for_bytes_and_a_slow_step_no_more(
    round_trip_s: float, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take 1 s but for one: in 10 of them an uplink can carry three contributions, an all-gather, in 9.7 s."""
    now_s, numel = [0.0], 1 << 16
    rate = int(8 * (3 * make_codec("fp4").payload_bytes(numel) + 300) / 9.7)
    monkeypatch.setattr(PeerTransport, "uplink", property(lambda self: Uplink(rate)))
    monkeypatch.setattr(sys.modules[PeerTransport.__module__], "elapsed_s", lambda: now_s[0])
    wires = Wires()
    try:
        transports = wires.meet(4)
        link = next(iter(transports[0].links.by_rank.values())).link
        counters = link.counters()._replace(round_trip_s=round_trip_s)
        monkeypatch.setattr(type(link), "counters", lambda self: counters)
        for step_s in (1.0, 1.0, 60.0, 1.0):
            now_s[0] += step_s
            for transport in transports:
                transport.tick()
        made = [replace(contribution(m, codec="fp4", mean="auto"), numel=numel, transfer_steps=10.0) for m in range(4)]
        made = [replace(each, payload=each.codec.encode(torch.ones(numel))) for each in made]
        averages = at_once([partial(average, *pair) for pair in zip(transports, made, strict=True)])
    finally:
        wires.close()
    for each in averages:
        assert bool(each.choice) == bool(codec), each
        assert f"means are sent in {codec}" in each.choice or not codec


def average(transport: Transport, given: Contribution) -> Average:
    return transport.average(given).wait()
