"""The founder of a swarm ejects a member while it runs, and the others go on with another secret."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from diloco.cli import main
from diloco.errors import ConfigurationError, EjectedError, RendezvousError, ReplicaLostError
from diloco.private_files import create_private
from diloco.protocol import MessageError, Store, decode, encode
from diloco.transport import (
    Address,
    Admission,
    NodePlace,
    Order,
    PeerStreams,
    PeerTransport,
    join,
    load_identity,
    new_secret,
    read_secret,
)
from tests.transport.contract import contribution, exchange
from tests.transport.relays import frame
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, LIMIT_S, Swarms, wait_for_members

pytestmark = HIVEMIND_LEAVES_CONNECTIONS
RUN = "ejections"


def last_order(transport: PeerTransport) -> Order:
    order: Order = decode(transport.order, Order)
    return order


def test_the_founder_ejects_a_member_of_a_running_swarm(
    swarms: Swarms, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, and a member that is not the founder. Then the ejected one returns with all that it knows."""
    old = new_secret()
    create_private(tmp_path / "old", old.encode())
    peers = swarms.meet(4, run=RUN, secret=old, min_replicas=3)
    ids = [load_identity(swarms.key(number)).peer_id for number in range(4)]
    for name, number in (("founder", 0), ("another", 1)):
        (tmp_path / name).mkdir()
        shutil.copy(swarms.key(number), tmp_path / name / "identity.key")

    def eject(number: int, file: str, secret: str, by: str = "founder") -> tuple[int, str]:
        at = swarms.addresses_of(peers[1])[0]
        words = f"secret {tmp_path / file} --eject {ids[number]} --founder {tmp_path / by} --run {RUN} --join {at}"
        code = main([*words.split(), "--secret-file", str(tmp_path / secret)])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    code, words = eject(3, "new", "old", by="another")
    assert code == 1
    assert f"it is signed by {ids[1]}, and the founder is {ids[0]}" in words
    assert not (tmp_path / "new").exists()

    code, words = eject(3, "new", "old")
    assert (code, f"no longer admit {ids[3]}" in words) == (0, True), words
    for transport in peers[:3]:
        wait_for_members(transport, 3)
        assert transport.reason.startswith(f"the founder {ids[0]} has ejected a member; replica 3 is lost")
        transport.tick()
    averages = exchange(peers[:3], [contribution(m) for m in range(3)])
    assert all(torch.equal(average.values, averages[0].values) for average in averages)
    said = f"{ids[3]} was ejected from run '{RUN}' by its founder {ids[0]} \\(order 1\\)"
    with pytest.raises(EjectedError, match=said):
        peers[3].average(contribution(3)).wait()

    new, quick = read_secret(tmp_path / "new", "new"), {"run": RUN, "rendezvous_timeout_s": 2.0}
    with pytest.raises(EjectedError, match=said):
        swarms.peer(3, [peers[0]], secret=old, **quick)
    swarms.key(3).with_suffix(".order").unlink()
    for known in (old, new):
        with pytest.raises(RendezvousError, match=r"rejected this peer: .* was ejected"):
            swarms.peer(3, [peers[0]], secret=known, **quick)
    code, words = eject(2, "newer", "new")
    assert (code, "without replica 2, too few of replicas 0, 1, 2 would be left to continue" in words) == (1, True)

    joiner = swarms.peer(4, [peers[0]], run=RUN, secret=new, min_replicas=3)
    join(joiner, LIMIT_S)
    members = [*peers[:3], joiner.transport]
    for transport in members:
        wait_for_members(transport, 4)
    first = last_order(peers[1])
    assert last_order(joiner.transport) == first, "it was told what the others know"
    assert (first.version, first.ejected, first.secret) == (1, (ids[3],), new)
    code, words = eject(1, "newer", "new")
    assert (code, "it is to be ejected itself" in words) == (1, True)

    code, words = eject(2, "newer", "new")
    assert code == 0, words
    for transport in (peers[0], peers[1], joiner.transport):
        wait_for_members(transport, 3)
        assert last_order(transport).ejected == (ids[3], ids[2])
    for sent in (first, replace(first, version=3, key=b"another"), replace(first, version=3)):
        peers[0].connections.post(peers[0].connections.send, 1, Store("order", encode(sent)))
    peers[1].tick()
    with pytest.raises(ReplicaLostError):  # 1 has hung up on the forger, and two are too few
        peers[1].average(contribution(1, outer_step=1)).wait()
    assert last_order(peers[1]).version == 2, "neither an older order nor another one's counts"


async def answers(swarms: Swarms, member: PeerTransport, number: int, admission: Admission, *sent: Any) -> list[bytes]:
    """Open a stream for each message, then send one after the other, and return the answers."""
    at = NodePlace(join=swarms.addresses_of(member), listen=(), map_ports=False)
    streams = PeerStreams(load_identity(swarms.key(number)), at, admission)
    await streams.listen(lambda *_: asyncio.sleep(0))
    there = Address(load_identity(swarms.key(member.replica)).peer_id, 0)
    try:
        opened, read = [await streams.open(there) for _ in sent], []
        for message, (reader, writer) in zip(sent, opened, strict=True):
            writer.write(frame(message))
            read.append(await asyncio.wait_for(reader.read(1 << 14), LIMIT_S))
        return read
    finally:
        await streams.close()


@pytest.mark.parametrize("number", [3, 2])
def test_who_was_admitted_with_the_old_secret_gets_no_further(swarms: Swarms, number: int) -> None:
    """Otherwise a peer that keeps connections to the members, maybe under another name, is told the new secret."""
    old, (founder, liar) = (
        Admission(f"silent {number}", new_secret()),
        [load_identity(swarms.key(number)) for number in (0, 3)],
    )
    member = swarms.peer(0, run=old.run, secret=old.secret).transport
    order = Order.sign(founder, old, liar.peer_id, new_secret(), None)
    hello = {"kind": "hello", "rank": number, "address": load_identity(swarms.key(number)).peer_id}
    sent = hello, {"kind": "govern", "order": order}, hello, {"kind": "govern"}
    greeting, governed, *late = asyncio.run(answers(swarms, member, number, old, *sent))
    assert b"greeting" in greeting
    assert b"governed" in governed
    assert late == [b"", b""]
    assert last_order(member) == order
    assert number not in member.connections.connected


def test_an_order_that_another_one_has_overtaken_is_refused(swarms: Swarms) -> None:
    """Two commands at once sign two orders of one version, of which one counts. The other must not seem to."""
    old, founder = Admission("overtaken", new_secret()), load_identity(swarms.key(0))
    member = swarms.peer(0, run=old.run, secret=old.secret).transport
    orders = [Order.sign(founder, old, "QmLiar", new_secret(), None) for _ in range(2)]
    orders.sort(key=lambda order: order.dht_key)
    overtaken, counts = [{"kind": "govern", "order": order} for order in orders]
    (first,) = asyncio.run(answers(swarms, member, 3, old, counts))
    new = Admission(old.run, orders[1].secret)
    again, other = asyncio.run(answers(swarms, member, 3, new, counts, overtaken))
    assert b"governed" in first
    assert b"governed" in again
    assert b"refused" in other
    assert last_order(member) == orders[1]


@pytest.fixture(scope="module")
def order(keys: Path) -> Order:
    return Order.sign(load_identity(keys / "0.key"), Admission("run", new_secret()), "QmLiar", new_secret(), None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *(({name: value}, "it was changed after it had been signed")
          for name, value in (("ejected", ("QmHonest",)), ("version", 2), ("run", "another"), ("signature", b""))),
        *(({"secret": secret}, "its secret is not the signed one") for secret in (new_secret(), "")),
    ],
    ids=range(6),  # each run has other secrets
)  # fmt: skip
def test_an_order_that_was_changed_is_none(order: Order, fields: dict[str, Any], words: str) -> None:
    assert not order.problem("run", order.founder, "QmHonest")
    assert replace(order, **fields).problem("run", order.founder, "QmHonest") == words


def test_only_the_founder_orders_and_only_who_stays_is_told_the_secret(order: Order, keys: Path) -> None:
    assert "and the founder is QmOther" in order.problem("run", "QmOther", "QmHonest")
    assert "it is for run run" in order.problem("another", order.founder, "QmHonest")
    assert not order.public.problem("run", order.founder, "QmLiar")
    assert order.public.secret == ""
    founder, newer = load_identity(keys / "0.key"), Admission("run", new_secret())
    admission = order.applied(newer)
    with pytest.raises(ConfigurationError, match="It can't eject itself"):
        Order.sign(founder, admission, founder.peer_id, new_secret(), order)
    assert not admission.admits("QmLiar")
    assert admission.secret == newer.secret, "a secret that the order does not replace is newer"


def test_of_two_orders_of_one_version_all_use_the_secret_of_the_later_one(order: Order, keys: Path) -> None:
    old = Admission("run", new_secret())
    orders = [Order.sign(load_identity(keys / "0.key"), old, "QmLiar", new_secret(), None) for _ in range(2)]
    assert orders[1].applied(orders[0].applied(old), orders[0]).secret == orders[1].secret


def test_an_order_names_identities_alone_and_no_more_than_others_read(order: Order, keys: Path) -> None:
    founder, admission = load_identity(keys / "0.key"), Admission("run", new_secret())
    for peer in ("\x1b[2J", "", "QmLiar\n", "Qm" * 99):
        with pytest.raises(ConfigurationError, match="is no identity of a peer"):
            Order.sign(founder, admission, peer, new_secret(), None)
        with pytest.raises(MessageError):
            decode(encode(replace(order, ejected=(peer,))), Order)
    often = replace(order, replaced=order.replaced * 64)
    with pytest.raises(ConfigurationError, match="changed its secret 64 times"):
        Order.sign(founder, admission, "QmLiar", new_secret(), often)
