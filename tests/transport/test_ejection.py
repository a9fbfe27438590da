"""The founder of a swarm ejects a member while it runs, and the others go on with another secret."""

from __future__ import annotations

import asyncio
import io
import shutil
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace

from diloco.cli import main
from diloco.errors import ConfigurationError, EjectedError, RendezvousError, TransportError
from diloco.private_files import create_private
from diloco.protocol import MessageError, decode, encode
from diloco.transport import (
    Address,
    Admission,
    Identity,
    NodePlace,
    Order,
    PeerTransport,
    StatusClient,
    join,
    load_identity,
    new_secret,
    read_secret,
)
from diloco.waiting import in_thread
from tests.transport.contract import contribution, exchange
from tests.transport.relays import frame
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, Swarms, answer_to
from tests.transport.wires import LIMIT_S, wait_for_members

pytestmark = HIVEMIND_LEAVES_CONNECTIONS
RUN = "ejections"


def last_order(transport: PeerTransport) -> Order:
    order: Order = decode(transport.order, Order)
    return order


def test_the_founder_ejects_a_member_of_a_running_swarm(
    swarms: Swarms, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, and a member that is not the founder. Then the ejected one returns with the new secret."""
    old = new_secret()
    create_private(tmp_path / "old", old.encode())
    peers = swarms.meet(3, run=RUN, secret=old, min_replicas=2)
    ids = [load_identity(swarms.key(number)).peer_id for number in range(3)]
    (tmp_path / "founder").mkdir()
    shutil.copy(swarms.key(0), tmp_path / "founder" / "identity.key")

    def eject(number: int, file: str, secret: str, answer: str = "yes") -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        words = f"secret {tmp_path / file} --eject {ids[number]} --founder {tmp_path / 'founder'} --run {RUN}"
        at = swarms.addresses_of(peers[1 - number % 2])[0]
        code = main([*words.split(), "--join", at, "--secret-file", str(tmp_path / secret)])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    for answer in ("no\n", ""):  # "" is the end of the input
        code, words = eject(2, "new", "old", answer)
        assert (code, f"the order ejects {ids[2]}" in words, "No order was given" in words) == (1, True, True), words
        assert not (tmp_path / "new").exists()
    code, words = eject(2, "new", "old")
    assert (code, f"no longer admit {ids[2]}" in words) == (0, True), words
    for transport in peers[:2]:
        wait_for_members(transport, 2)
        assert transport.connections.machine.rounds.reason.startswith(
            f"the founder {ids[0]} has ejected a member; replica 2 is lost"
        )
        transport.tick()
    averages = exchange(peers[:2], [contribution(m) for m in range(2)])
    assert torch.equal(averages[0].values, averages[1].values)
    said = f"{ids[2]} was ejected from run '{RUN}' by its founder {ids[0]} \\(order 1\\)"
    with pytest.raises(EjectedError, match=said):
        peers[2].average(contribution(2)).wait()

    code, words = eject(1, "newer", "new")
    assert (code, "without replica 1, too few of replicas 0, 1 would be left to continue" in words) == (1, True), words
    assert not (tmp_path / "newer").exists()
    new, quick = read_secret(tmp_path / "new", "new"), {"run": RUN, "rendezvous_timeout_s": 2.0}
    with pytest.raises(EjectedError, match=said):
        swarms.peer(2, [peers[0]], secret=old, **quick)
    swarms.key(2).with_suffix(".order").unlink()
    with pytest.raises(RendezvousError, match="or the founder has ejected it"):
        swarms.peer(2, [peers[0]], secret=new, **quick)
    for transport in peers[:2]:
        assert (last_order(transport).ejected, last_order(transport).secret) == ((ids[2],), new)


class Members:
    """What peers answer to who asks for the founder's last order, and which of them were sent a new one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Order | Exception | None) -> None:
        self.answers, self.asked = answers, list[str]()
        self.given: dict[str, Order] = {}
        monkeypatch.setattr(sys.modules[StatusClient.__module__], "question", self._question)

    async def _question(self, stream: object, place: Address, asked: Any, *_: object) -> object:
        self.asked.append(place.host)
        answer = self.answers[place.host]
        if isinstance(answer, Exception):
            raise answer
        if asked.order is not None:
            self.given[place.host] = asked.order
        return mock.Mock(order=answer)

    def eject(self, peer: str, founder: Identity, admission: Admission, file: Path) -> tuple[str, ...]:
        """Have them eject a peer, and return all that the person was shown."""
        shown = list[str]()
        at = NodePlace(join=tuple(f"/ip4/9.9.9.9/tcp/1/p2p/{name}" for name in self.answers))
        client = StatusClient(mock.Mock(place=at, open=mock.AsyncMock()), admission)
        assert asyncio.run(client.eject(peer, founder, file, lambda ejected: not shown.extend(ejected)))
        return tuple(shown)


@pytest.fixture
def founder(keys: Path, tmp_path: Path) -> Identity:
    """Its folder is its own, as orders are kept beside the key."""
    (tmp_path / "founder").mkdir()
    key = load_identity(keys / "0.key").path  # made once for all tests, which takes a while
    return load_identity(Path(shutil.copy(key, tmp_path / "founder" / "identity.key")))


ADMISSION = Admission("run", new_secret())


def test_the_next_address_is_asked_where_the_first_is_of_no_member(
    founder: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a peer that was just joining ended the command, which said that another one was to be asked."""
    joins = RendezvousError("QmJoins refuses: it isn't a member of the swarm at present. Ask another peer.")
    members = Members(monkeypatch, QmJoins=joins, QmMember=None)
    assert members.eject("QmLiar", founder, ADMISSION, tmp_path / "new") == ("QmLiar",)
    assert members.asked == ["QmJoins", "QmMember", "QmMember"]
    assert read_secret(tmp_path / "new", "new")


def test_who_is_asked_whether_to_give_an_order_can_interrupt_instead(
    founder: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the command waited for the answer after Ctrl-C, too."""
    members, asked, answered = Members(monkeypatch, QmMember=None), threading.Event(), threading.Event()
    at = NodePlace(join=("/ip4/9.9.9.9/tcp/1/p2p/QmMember",))
    client = StatusClient(mock.Mock(place=at, open=mock.AsyncMock()), ADMISSION)

    def agree(ejected: tuple[str, ...]) -> bool:
        asked.set()
        return answered.wait(2 * LIMIT_S)

    async def interrupted() -> None:
        ejecting = asyncio.ensure_future(client.eject("QmLiar", founder, tmp_path / "new", agree))
        await asyncio.wrap_future(in_thread(asked.wait, "asked"))
        ejecting.cancel()
        await asyncio.wait([ejecting])

    in_thread(lambda: asyncio.run(interrupted()), "command").result(LIMIT_S)
    answered.set()
    assert not members.given
    assert not (tmp_path / "new").exists()


def forged(order: Order, **fields: Any) -> Order:
    return replace(order, **{"signature": b"", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"ejected": ("QmHonest", "QmOther")},
        {"ejected": ()},
        {"version": 63},
        {"run": "another"},
        {"replaced": ("x",) * 64},
        {"key": b"none"},
    ],
    ids=range(6),
)
def test_the_founder_signs_nothing_that_only_a_member_says(
    founder: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """A member could have honest peers ejected, earlier ejections undone, or make this order the last one ever."""
    first = Order.sign(founder, ADMISSION, "QmFirst", new_secret(), None)
    members = Members(monkeypatch, QmForger=forged(first, **fields), QmMember=first.public)
    assert members.eject("QmLiar", founder, ADMISSION, tmp_path / "new") == ("QmFirst", "QmLiar")
    assert (members.given["QmMember"].ejected, members.given["QmMember"].version) == (("QmFirst", "QmLiar"), 2)
    assert "QmForger" not in members.given
    alone = Members(monkeypatch, QmForger=forged(first, **fields))
    with pytest.raises(TransportError, match="none of the founder's"):
        alone.eject("QmLater", founder, ADMISSION, tmp_path / "newer")
    assert not (tmp_path / "newer").exists()


def test_a_member_that_forgets_orders_undoes_none_and_who_is_ejected_gets_no_secret(
    founder: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The founder's orders are kept beside its key, whether its peer runs or not."""
    Members(monkeypatch, QmMember=None).eject("QmFirst", founder, ADMISSION, tmp_path / "1")
    members = Members(monkeypatch, QmFirst=None, QmSecond=None, QmForgets=None)
    assert members.eject("QmSecond", founder, ADMISSION, tmp_path / "2") == ("QmFirst", "QmSecond")
    assert set(members.asked) == set(members.given) == {"QmForgets"}
    newer = Order.sign(founder, ADMISSION, "QmForgets", new_secret(), members.given["QmForgets"])
    later = Members(monkeypatch, QmForgets=None, QmMember=newer.public)
    later.eject("QmLast", founder, ADMISSION, tmp_path / "3")
    assert list(later.given) == ["QmMember"], "another member knew that the first has been ejected"
    with pytest.raises(TransportError, match="QmLast is ejected itself"):
        Members(monkeypatch, QmLast=None).eject("QmLast", founder, ADMISSION, tmp_path / "4")


def test_a_member_follows_the_newest_order_and_tells_nobody_who_has_the_old_secret(swarms: Swarms) -> None:
    """Otherwise a peer that keeps connections to the members, maybe under another name, is told the new secret.

    Two commands at once sign two orders of one version, of which one counts. The other must not seem to.
    """
    founder, me, silent = (load_identity(swarms.key(number)) for number in range(3))
    old, there = Admission("orders", new_secret()), Address(me.peer_id, 0)
    member = swarms.peer(1, run=old.run, secret=old.secret, held_swarm=f"{founder.peer_id}.0").transport
    orders = [Order.sign(founder, old, "QmLiar", new_secret(), None) for _ in range(2)]
    overtaken, counts = sorted(orders, key=lambda order: order.dht_key)
    newest = Order.sign(founder, Admission(old.run, counts.secret), "QmLater", new_secret(), counts)
    hello = {"kind": "hello", "rank": 2, "address": silent.peer_id}

    async def talk() -> None:
        async def govern(order: Order) -> bytes:
            return await answer_to(await streams.open(there), {"kind": "govern", "order": order})

        async with swarms.stranger(2, member, old) as streams:
            assert b"it is signed by" in await govern(Order.sign(silent, old, "QmLiar", new_secret(), None))
            opened = [await streams.open(there) for _ in range(3)]
            reader, writer = opened[0]
            writer.write(frame(hello))
            assert b"greeting" in await reader.read(1 << 14)
            # once this is answered, the connection has been registered
            assert b"to be ejected itself" in await govern(Order.sign(founder, old, me.peer_id, new_secret(), None))
            assert 2 in member.connections.connected
            assert b"governed" in await govern(counts)
            assert [await answer_to(opened[1], hello), await answer_to(opened[2], {"kind": "govern"})] == [b"", b""]
            assert 2 not in member.connections.connected
            streams.admit_by(Admission(old.run, counts.secret))
            assert b"governed" in await govern(counts)
            assert b"it follows a newer order" in await govern(overtaken)
            assert last_order(member) == counts
            assert b"governed" in await govern(newest)

    asyncio.run(talk())
    joiner = swarms.peer(3, [member], run=old.run, secret=newest.secret)
    join(joiner, LIMIT_S)
    assert last_order(joiner.transport) == newest, "it was told what the others know"
    take = member.connections.receivers["order"]
    for other in (counts, replace(newest, version=3, key=b"another")):
        take(3, encode(other))
    with pytest.raises(MessageError, match="it passed on an order, but it was changed after"):
        take(3, encode(replace(newest, version=3)))
    assert last_order(member) == newest, "neither an older order nor another one's counts"
    assert (newest.version, newest.ejected) == (2, ("QmLiar", "QmLater"))


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
    orders = [Order.sign(founder, newer, "QmLiar", new_secret(), None) for _ in range(2)]
    applied = orders[1].applied(orders[0].applied(newer), orders[0])
    assert applied.secret == orders[1].secret, "of two orders of one version all use the secret of the later one"


def test_an_order_names_identities_alone_and_no_more_than_others_read(order: Order, keys: Path) -> None:
    founder, admission = load_identity(keys / "0.key"), Admission("run", new_secret())
    for peer in ("\x1b[2J", "", "QmLiar\n", "Qm" * 99):
        with pytest.raises(ConfigurationError, match="isn't the identity of a peer"):
            Order.sign(founder, admission, peer, new_secret(), None)
        with pytest.raises(MessageError):
            decode(encode(replace(order, ejected=(peer,))), Order)
    with pytest.raises(MessageError):
        decode(encode(replace(order, version=1 << 53)), Order)
    often = replace(order, version=64)
    with pytest.raises(ConfigurationError, match="changed its secret 64 times"):
        Order.sign(founder, admission, "QmLiar", new_secret(), often)
