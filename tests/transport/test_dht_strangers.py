"""What a node of the DHT that nobody invited can do to the others: store a small record of its own, for a while."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from diloco.errors import RendezvousError, TransportError
from diloco.transport import Admission, Node, NodePlace, PeerRecord, load_identity, new_secret, owner_of, run_peer
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, LOOPBACK, Swarms

pytestmark = HIVEMIND_LEAVES_CONNECTIONS

ENGINE = load_identity.__globals__["load_engine"]()
DHT = sys.modules[ENGINE.DHTNode.__module__]
DOOR = sys.modules[sys.modules[Node.__module__].Door.__module__]
ADMISSION = Admission("run", new_secret())
KEY = ENGINE.DHTID.generate(source=ADMISSION.dht_key)
YEARS_S, DAY_S, HALF_AN_HOUR_S = 1e9, 86_400.0, 1800.0


class Network:
    """A member that has the secret, a relay that has not, and a stranger, which has a key of its own."""

    def __init__(self, keys: Path, member: Node, relay: Node, stranger: Node) -> None:
        self.member, self.relay, self.stranger = member, relay, stranger
        self.keys = keys

    async def store(self, at: Node, *, subkey: bytes = b"", expires_s: float = 0.0, data: bytes = b"x") -> bool:
        """Have the stranger store a record that its key signs; return whether it was taken."""
        protocol, own = self.stranger._dht.protocol, subkey or self.stranger._subkey
        record = self.record(own, expires_s or ENGINE.clock.now_s() + HALF_AN_HOUR_S, data)
        peer = ENGINE.PeerID.from_base58(at.peer_id)
        (taken,) = await protocol.call_store(peer, [KEY], [record.value], record.expiration_time, subkeys=[own])
        return bool(taken)

    def record(self, subkey: bytes, expires_s: float, data: bytes) -> Any:
        dumps = ENGINE.DHTProtocol.serializer.dumps
        record = DHT.DHTRecord(KEY.to_bytes(), dumps(subkey), dumps(data), expires_s)
        signer = ENGINE.RSASignatureValidator(load_identity(self.keys / "7.key").private_key)
        return dataclasses.replace(record, value=signer.sign_value(record))


@asynccontextmanager
async def network(keys: Path) -> AsyncIterator[Network]:
    nodes: list[Node] = []
    for number in (5, 6, 7):
        known = tuple([address for node in nodes for address in await node.addresses()])
        place = NodePlace(join=known, listen=LOOPBACK, map_ports=False, public=True)
        nodes.append(await Node.start(load_identity(keys / f"{number}.key"), place))
    member, relay, stranger = nodes
    try:
        await member.announce(ADMISSION, PeerRecord(5, "swarm"))
        yield Network(keys, member, relay, stranger)
    finally:
        for node in reversed(nodes):
            await node.close()


def in_network(keys: Path, check: Callable[[Network], Awaitable[None]]) -> None:
    async def run() -> None:
        async with network(keys) as found:
            await check(found)

    asyncio.run(run())


def test_a_stranger_stores_nothing_under_a_key_that_is_not_exactly_its_own(keys: Path) -> None:
    """Before, one key signed any number of records, so that the run's entry became larger than a message."""

    async def check(net: Network) -> None:
        own = net.stranger._subkey
        for subkey in (b"1" + own, own + b"1", own[:-1] + b" comment]", net.member._subkey, b"nobody's"):
            assert not await net.store(net.relay, subkey=subkey), subkey
        assert await net.store(net.relay)
        assert await net.store(net.relay), "its next announcement takes the place of the last"
        assert len(net.relay._dht.protocol.storage.get(KEY).value) == 2

    in_network(keys, check)


def test_members_keep_no_record_of_who_has_not_the_secret_and_one_elsewhere_hides_no_other(keys: Path) -> None:
    async def check(net: Network) -> None:
        assert not await net.store(net.member)
        assert await net.store(net.relay), "a relay can't check the proof"
        await net.stranger.close()
        net.member._dht.protocol.storage = DHT.RecordStore("me")
        assert [each.number for each in await net.relay.find(ADMISSION)] == [5]

    in_network(keys, check)


@pytest.mark.parametrize("expires_s", [YEARS_S, 2 * DAY_S, -2 * DAY_S, float("inf"), float("nan")])
def test_nobody_chooses_for_how_long_its_record_is_kept(
    keys: Path, expires_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Authors chose it: 31 years were accepted. What is of today is kept for half an hour, whatever its clock says."""

    async def check(net: Network) -> None:
        now_s, storage = ENGINE.clock.now_s(), net.relay._dht.protocol.storage
        assert not await net.store(net.relay, expires_s=now_s + expires_s)
        for off_s in (0.9 * DAY_S, -0.9 * DAY_S):
            assert await net.store(net.relay, expires_s=now_s + off_s)
        elapsed_s = DHT.elapsed_s
        for later_s, count in ((0.9 * HALF_AN_HOUR_S, 2), (1.1 * HALF_AN_HOUR_S, 0)):
            monkeypatch.setattr(DHT, "elapsed_s", lambda later_s=later_s: elapsed_s() + later_s)
            assert (len(storage.get(KEY).value) if count else storage.get(KEY)) == (count or None)

    in_network(keys, check)


def test_a_full_store_costs_no_more_than_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each record that came or was asked for went through all of them, in the control thread."""
    compared: list[object] = []

    class Seconds(float):
        """A time that notes when it is compared."""

        def __add__(self, other: float) -> Seconds:
            return Seconds(float(self) + other)

        def __lt__(self, other: float) -> bool:
            compared.append(self)
            return float(self) < other

        def __ge__(self, other: float) -> bool:
            return not self < other

    storage, now_s = DHT.RecordStore("me"), 0.0
    monkeypatch.setattr(DHT, "elapsed_s", lambda: Seconds(now_s))
    keys = [ENGINE.DHTID.generate(source=bytes([number])) for number in range(100)]
    for number in range(2_000):
        assert storage.keep(keys[number % 100], b"%d" % number, b"x", 1.0, f"peer {number // 100}")
    compared.clear()
    assert len(storage.get(keys[0]).value) == 20
    assert storage.keep(keys[0], b"0", b"y", 1.0, "peer 0")
    assert len(compared) == 2
    now_s = 1.1 * HALF_AN_HOUR_S
    assert storage.get(keys[0]) is None
    assert (storage.num_bytes, storage._records) == (0, {}), "all are old, whatever their order under their keys"


def test_a_relay_keeps_nothing_of_those_who_asked_at_its_door_and_few_who_say_nothing(keys: Path) -> None:
    """Before, each who had asked took a descriptor for ever, and nothing bounded those who did not say a word."""

    async def check() -> None:
        ready = asyncio.get_running_loop().create_future()
        place = NodePlace(listen=LOOPBACK, map_ports=False, public=True)
        relay = asyncio.create_task(run_peer(keys / "5.key", place, ready.set_result))
        address = (await ready)[0]
        node = await Node.start(load_identity(keys / "6.key"), NodePlace(join=(address,), listen=(), map_ports=False))

        async def stream() -> Any:
            return await node.open(address.rpartition("/p2p/")[2], (address,), "diloco/door/1")

        async def settled(most: int) -> bool:
            with suppress(TimeoutError):
                async with asyncio.timeout(10):
                    while len(os.listdir("/proc/self/fd")) > most:
                        await asyncio.sleep(0.02)
            return len(os.listdir("/proc/self/fd")) <= most

        try:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(20):
                assert (await DOOR.knock(await stream(), ADMISSION, node.peer_id)).is_relay
            assert await settled(before + 2)
            silent = [await stream() for _ in range(40)]  # each has an end of its own in this process
            assert await settled(before + len(silent) + 12)
        finally:
            await node.close()
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)

    asyncio.run(check())


@pytest.mark.parametrize("host", ["9.9.9.9; sh", "$(sh)", "fe80::1%$(sh)", "tcp"])
def test_a_door_that_says_no_address_for_a_host_is_not_believed(host: str) -> None:
    """Before, its words became part of a command that the user is told to run."""
    with pytest.raises(ValueError, match="IP"):
        DOOR.Doorplate(1, trains=True, seen_at=host)
    assert DOOR.Doorplate(1, trains=True, seen_at="2001:db8::9").seen_at


def test_a_node_that_is_told_of_made_up_nodes_notes_none_and_sends_them_nothing(keys: Path) -> None:
    """Before, each was sent all that the peer stored: 2,057 times as many bytes as it had received."""

    async def check(net: Network) -> None:
        protocol, relay = net.stranger._dht.protocol, net.relay._dht.protocol
        peer, sent = ENGINE.PeerID.from_base58(net.relay.peer_id), list[object]()
        with mock.patch.object(ENGINE.DHTProtocol, "call_store", side_effect=sent.append):
            for _ in range(20):
                told = ENGINE.dht_pb2.NodeInfo(node_id=ENGINE.DHTID.generate(source=os.urandom(20)).to_bytes())
                await protocol.get_stub(peer).rpc_ping(ENGINE.dht_pb2.PingRequest(peer=told), timeout=9)
            await asyncio.sleep(0)
        assert not sent
        assert {*map(str, relay.routing_table.peer_id_to_uid)} == {net.member.peer_id, net.stranger.peer_id}
        made_up = {ENGINE.DHTID.generate(source=b"1"): peer}
        answer = {KEY: (None, {DHT.node_id_of(peer): peer} | made_up)}
        with mock.patch.object(DHT.protocol.DHTProtocol, "call_find", mock.AsyncMock(return_value=answer)):
            ((_, nodes),) = (await protocol.call_find(peer, [KEY])).values()
        assert list(nodes.values()) == [peer]

    in_network(keys, check)


def test_a_node_that_names_each_to_itself_ends_no_search(keys: Path) -> None:
    """Before, any node could end all look-ups and announcements, with an AssertionError."""

    async def check(net: Network) -> None:
        member, table = ENGINE.PeerID.from_base58(net.member.peer_id), net.stranger._dht.protocol.routing_table
        asked = mock.Mock(return_value=[(DHT.node_id_of(member), member)])
        with mock.patch.object(table, "get_nearest_neighbors", asked):
            await net.member.announce(ADMISSION, PeerRecord(5, "swarm"))
            assert await net.member.find(ADMISSION) == []
        assert asked.called
        assert [each.number for each in await net.relay.find(ADMISSION)] == [5]

    in_network(keys, check)


def test_what_a_node_asks_all_the_time_is_not_answered_all_the_time(keys: Path) -> None:
    async def check(net: Network) -> None:
        protocol, peer = net.stranger._dht.protocol, ENGINE.PeerID.from_base58(net.relay.peer_id)
        keys_asked = [ENGINE.DHTID.generate(source=bytes([each])) for each in range(50)]
        assert await protocol.call_find(peer, keys_asked) is None, "a search asks for one"
        assert await protocol.call_find(peer, [KEY]) is not None
        net.relay._dht.protocol._requests._most = 0
        assert await protocol.call_find(peer, [KEY]) is None
        assert not await net.store(net.relay)

    in_network(keys, check)


def test_records_take_no_more_memory_than_they_may_and_small_ones_stay() -> None:
    """Before, the memory of a process grew by 266 MB in 25 s."""
    store, keys = DHT.RecordStore("me"), [ENGINE.DHTID.generate(source=bytes([each])) for each in range(40)]
    honest = [f"honest {each}".encode() for each in range(100)]
    for subkey in honest:
        assert store.keep(keys[0], subkey, bytes(700), 1.0, subkey.decode())
    for number in range(400):
        for key in keys:
            subkey = f"stranger {number}".encode()
            store.keep(key, subkey, bytes(8000), 1.0, subkey.decode())
        assert store.num_bytes <= DHT.MAX_BYTES
        assert sum(map(len, store.get(keys[0]).value.data)) < DHT.MAX_KEY_BYTES
    packed = ENGINE.DHTProtocol.serializer.dumps(store.get(keys[0]).value)
    assert len(packed) < 2 << 20, "half of the largest message"
    assert {*honest} <= {*store.get(keys[0]).value.data}
    one = DHT.RecordStore("me")
    taken = [one.keep(key, b"one", bytes(8000), 1.0, "one") for key in keys]
    assert (any(taken), all(taken)) == (True, False)
    assert one.num_bytes <= DHT.MAX_OWNER_BYTES
    assert all(one.keep(keys[0], b"one", bytes(8000), each, "one") for each in range(100)), "it announces itself again"


def test_whoever_has_a_key_with_a_comment_owns_no_second_subkey(keys: Path) -> None:
    subkey = ENGINE.RSASignatureValidator(load_identity(keys / "7.key").private_key).local_public_key
    assert owner_of(subkey) == load_identity(keys / "7.key").peer_id
    with pytest.raises(ValueError, match="more than a key"):
        owner_of(subkey[:-1] + b" me@home]")


# What follows from it.


def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no node answer what it is asked for in the DHT, as where an answer is too large for a message."""
    monkeypatch.setattr(ENGINE.DHTProtocol, "call_find", mock.AsyncMock(return_value=None))


def test_nobody_founds_on_a_look_up_that_failed(swarms: Swarms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it was taken for a look-up that had found nobody, and the joiner founded a second swarm after 8 s."""
    first = swarms.peer(0, secret=ADMISSION.secret).transport
    silent(monkeypatch)
    assert swarms.peer(2, [first], secret=ADMISSION.secret).joining, "the peer that it names is asked directly"
    with pytest.raises(RendezvousError, match=r"no member of run 'another' was found within 3 s: no node .* answers"):
        swarms.peer(3, [first], run="another", founds=True, rendezvous_timeout_s=3.0)


@pytest.mark.parametrize("ahead_s", [1e12, -1e9, 1.1 * DAY_S, -1.1 * DAY_S])
def test_an_entrance_of_another_day_is_refused_and_beside_another_one_it_is_ignored(
    swarms: Swarms, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies(monkeypatch, load_identity(swarms.key(1)).peer_id, ahead_s)
    first = swarms.peer(0, secret=ADMISSION.secret).transport
    second = swarms.peer(1, [first], secret=ADMISSION.secret).transport
    with pytest.raises(TransportError, match=r"differs from this machine's by more than a day\. Set the clock"):
        swarms.peer(2, [second], secret=ADMISSION.secret)
    assert swarms.peer(2, [second, first], secret=ADMISSION.secret).joining


@pytest.mark.parametrize("ahead_s", [23 * 3600.0, -23 * 3600.0])
def test_no_clock_of_another_machine_is_believed(
    swarms: Swarms, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all records looked expired to who had come in through a peer that lied about the time."""
    lies(monkeypatch, load_identity(swarms.key(1)).peer_id, ahead_s)
    first = swarms.peer(0, secret=ADMISSION.secret).transport
    entrance = swarms.peer(1, [first], run="another", founds=True).transport
    before_s = ENGINE.clock.now_s() - time.time()
    assert swarms.peer(2, [entrance], secret=ADMISSION.secret).joining
    assert abs(ENGINE.clock.now_s() - time.time() - before_s) < 1.0


def lies(monkeypatch: pytest.MonkeyPatch, peer_id: str, ahead_s: float) -> None:
    """Have one peer tell another time than that of this machine."""
    usual = ENGINE.DHTProtocol.rpc_ping

    async def rpc_ping(self: Any, request: Any, context: Any) -> Any:
        answer = await usual(self, request, context)
        if str(self.p2p.peer_id) == peer_id:
            answer.dht_time += ahead_s
        return answer

    monkeypatch.setattr(ENGINE.DHTProtocol, "rpc_ping", rpc_ping)
