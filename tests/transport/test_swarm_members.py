"""Which peers may be members of a swarm, and how a swarm is founded."""

from __future__ import annotations

import asyncio
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.errors import ConfigurationError, RendezvousError
from diloco.transport import (
    Address,
    Admission,
    Connected,
    PeerStreams,
    PeerTransport,
    Search,
    join,
    load_identity,
    new_secret,
    number_of,
    pack,
)
from tests.transport.contract import contribution, exchange
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, LIMIT_S, Swarms, wait_for_members
from tests.transport.wires import at_once

pytestmark = HIVEMIND_LEAVES_CONNECTIONS

PATIENCE = {"rendezvous_timeout_s": 2.0}


@pytest.fixture(scope="module")
def lasting(keys: Path) -> Iterator[Swarms]:
    """Swarms of peers that several tests share and do not change."""
    made = Swarms(keys)
    yield made
    made.close()


@pytest.fixture(scope="module")
def member(lasting: Swarms) -> PeerTransport:
    """The only peer of its run; peers that search for it found another swarm or are rejected."""
    return lasting.peer(0, facts={"codec": "fp4"}).transport


@pytest.fixture(scope="module")
def standing(lasting: Swarms) -> PeerTransport:
    """A running peer, through which all runs can be found."""
    return lasting.peer(7, run="a standing peer of another run").transport


# Identities.


def test_a_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    made = load_identity(tmp_path / "deep" / "identity.key")
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert load_identity(made.path).peer_id == made.peer_id
    assert [each.name for each in made.path.parent.iterdir()] == ["identity.key"]
    assert 0 <= number_of(made.peer_id) < 1 << 28


def test_a_key_that_others_can_read_is_refused(keys: Path, tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(load_identity(keys / "0.key").path.read_bytes())
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"changed by others \(mode 640\)\. Run chmod 600 on it"):
        load_identity(path)


def test_a_file_that_is_no_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(b"no key")
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="holds no usable private key"):
        load_identity(path)


# BootstrapElection and joining.


def test_a_peer_to_which_nobody_can_open_a_connection_is_a_full_member(swarms: Swarms) -> None:
    first = swarms.peer(0).transport
    hidden = swarms.peer(1, [first], hidden=True)
    join(hidden, LIMIT_S)
    third = swarms.peer(2, [first])
    join(third, LIMIT_S)  # it has to connect to the hidden peer, too
    transports = [first, hidden.transport, third.transport]
    for transport in transports:
        wait_for_members(transport, 3)
        transport.tick()
    averages = exchange(transports, [contribution(m) for m in range(3)])
    assert all(torch.equal(average.values, averages[0].values) for average in averages)
    assert averages[0].contributors == (0, 1, 2)
    seen = swarms.look(9, [first])
    told = {each.number: (each.problem, *(each.status[name] for name in ("words", "members", "step"))) for each in seen}
    steps = {each.replica: each.step for each in transports}
    expected = {m: ("", f"of peer {m}", [0, 1, 2], steps[m]) for m in range(3)}
    assert told == expected, "an observer gets the status of the hidden peer, too"


def test_a_member_that_cannot_be_reached_is_tried_again_until_it_is_none_or_answers(
    swarms: Swarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member may just have ended without the others having noticed."""
    first = swarms.peer(0).transport
    second = swarms.peer(1, [first])
    join(second, LIMIT_S)
    opened, failed = PeerStreams.open, []

    async def unreachable(streams: PeerStreams, address: Address) -> Any:
        if address == second.transport.address and len(failed) < 2:
            failed.append(address)
            raise OSError("nobody there")
        return await opened(streams, address)

    monkeypatch.setattr(PeerStreams, "open", unreachable)
    theirs = second.transport.connections.streams
    monkeypatch.setattr(theirs, "calls_back_at", lambda entry: None)  # it does not connect back either
    third = swarms.peer(2, [first], silence_s=1.0)
    assert (third.joining, len(failed)) == (True, 2)
    monkeypatch.undo()
    join(third, LIMIT_S)
    wait_for_members(first, 3)


def test_only_those_on_the_list_who_have_the_secret_may_come(swarms: Swarms, keys: Path) -> None:
    allowed = frozenset(load_identity(keys / f"{number}.key").peer_id for number in (0, 1, 3))
    ours = new_secret()
    first = swarms.peer(0, secret=ours, allowed=allowed).transport
    assert swarms.peer(1, [first], secret=ours, allowed=allowed).joining
    for number, secret in ((2, ours), (3, new_secret())):
        with pytest.raises(RendezvousError, match=r"no member could be joined within 2 s: .* rejected this peer"):
            swarms.peer(number, [first], secret=secret, **PATIENCE)
    assert first.view.members == (0,)


def refuses_for_good(member: PeerTransport) -> None:
    """Make a member refuse every request for its table, with a reason that contains control characters."""

    async def refuse(message: Any, blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack({"kind": "refused", "reason": "\x1b[2Jgo away", "for_good": True}))
        await reader.read(1)

    member.connections.services["table"] = refuse


def test_one_member_that_refuses_for_good_keeps_nobody_out(swarms: Swarms) -> None:
    """This holds even if it is the first member, to which all joiners are sent."""
    members = swarms.meet(2)
    for liar, joiner in ((0, 2), (1, 3)):
        services = members[liar].connections.services
        honest = services["table"]
        refuses_for_good(members[liar])
        connected = swarms.peer(joiner, members)
        assert connected.joining
        join(connected, LIMIT_S)
        wait_for_members(members[1 - liar], joiner + 1)
        services["table"] = honest


def test_where_all_refuse_the_joiner_says_why_without_escapes(
    swarms: Swarms, member: PeerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member.connections, "services", dict(member.connections.services))
    refuses_for_good(member)
    with pytest.raises(RendezvousError, match=r"refuses: \\x1b\[2Jgo away\.") as caught:
        swarms.peer(1, [member])
    assert str(caught.value).isprintable()


def test_another_run_is_another_world(swarms: Swarms, member: PeerTransport) -> None:
    other = swarms.peer(1, [member], run="another", **PATIENCE)
    assert not other.joining, "it founded a swarm of its own run"
    assert other.transport.view.members == (1,)
    assert member.view.members == (0,)


def test_settings_that_differ_are_refused_in_one_sentence(swarms: Swarms, member: PeerTransport) -> None:
    with pytest.raises(RendezvousError, match=r"refuses: replica 0 \(.*\) has codec = fp4 and replica 1 .* = int8"):
        swarms.peer(1, [member], facts={"codec": "int8"}, **PATIENCE)


def test_a_number_that_is_taken_is_refused(member: PeerTransport, keys: Path) -> None:
    (keys / "other-0").mkdir(exist_ok=True)
    other = Swarms(keys / "other-0")
    try:
        with pytest.raises(RendezvousError, match=r"replica 0 is .* already; choose another number"):
            other.peer(0, [member], facts={"codec": "fp4"}, **PATIENCE)
    finally:
        other.close()


def test_a_member_of_another_swarm_of_the_run_joins_this_one_unless_it_is_further(
    swarms: Swarms, member: PeerTransport
) -> None:
    comes: dict[str, Any] = {"swarm": "0123456789abcdef", "facts": {"codec": "fp4"}, **PATIENCE}
    with pytest.raises(RendezvousError, match="of step 30, which the others do not have"):
        swarms.peer(1, [member], held_step=30, **comes)
    assert swarms.peer(2, [member], **comes).joining


def test_a_fresh_start_is_no_replacement_for_a_swarm_that_was_there(swarms: Swarms, standing: PeerTransport) -> None:
    """The record of a swarm outlives its last member, and only a peer with a checkpoint may found the swarm again."""
    gone = swarms.peer(0, [standing], run="gone")
    assert not gone.joining
    gone.transport.close()
    with pytest.raises(RendezvousError, match="has had a swarm within the last half hour"):
        swarms.peer(1, [standing], run="gone", **PATIENCE)
    again = swarms.peer(2, [standing], run="gone", held_step=120, **PATIENCE)
    assert not again.joining


def test_of_those_who_look_at_once_one_founds_the_swarm(
    swarms: Swarms, standing: PeerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"run": "at once", "join_window_s": 3.0}
    steps = {1: 30, 2: 50, 3: 50}
    find, all_stand = Search.find, threading.Barrier(len(steps))

    async def look(search: Search) -> Any:
        await asyncio.to_thread(all_stand.wait, LIMIT_S)
        return await find(search)

    monkeypatch.setattr(Search, "find", look)
    found = at_once([lambda m=m: swarms.peer(m, [standing], held_step=steps[m], **options) for m in steps])
    assert [each.joining for each in found] == [True, False, True], "the lowest peer with the newest step founds it"
    assert {each.swarm for each in found} == {found[1].swarm}


def test_who_was_farther_than_the_swarm_does_not_take_over_its_state_unasked(swarms: Swarms) -> None:
    """The founder resumed from an older checkpoint than another peer's, whose work would be lost."""
    first = swarms.peer(0, held_step=30)
    first.transport.step = 40
    with pytest.raises(RendezvousError, match=r"is at step 40, and the newest checkpoint of replica 1 is of step 50"):
        swarms.peer(1, [first.transport], held_step=50, **PATIENCE)
    as_far = swarms.peer(1, [first.transport], held_step=40)
    assert (as_far.joining, as_far.table.step, as_far.table.founded_step) == (True, 40, 30)
    member = swarms.peer(2, [first.transport], held_step=50, held_swarm=first.swarm)
    assert member.joining, "the swarm is the one that it was a member of"


def test_who_ended_while_it_looked_is_not_waited_for(swarms: Swarms, standing: PeerTransport) -> None:
    """Its record stays and claims a newer step."""
    with pytest.raises(RendezvousError):
        swarms.peer(1, [standing], run="ended", held_step=90, join_window_s=60.0, rendezvous_timeout_s=0.1)
    began_s = time.monotonic()
    assert not swarms.peer(2, [standing], run="ended", held_step=50, silence_s=1.0).joining
    assert time.monotonic() - began_s > 1.0


def test_who_waits_for_one_that_looks_and_does_not_begin_is_told_whom(swarms: Swarms, standing: PeerTransport) -> None:
    looks = {"join_window_s": 60.0}
    waiting = at_once(
        [
            lambda: swarms.peer(1, [standing], run="held", held_step=90, **looks, rendezvous_timeout_s=6.0),
            lambda: swarms.peer(2, [standing], run="held", held_step=50, rendezvous_timeout_s=3.5),
            lambda: swarms.peer(3, [standing], run="fresh", **looks, rendezvous_timeout_s=6.0),
            lambda: swarms.peer(4, [standing], run="fresh", **looks, rendezvous_timeout_s=3.5),
        ]
    )
    assert "replica 1 of run 'held', which has a checkpoint of step 90, is also searching for" in str(waiting[1])
    assert "replica 3 of run 'fresh', which has no checkpoint, is also searching for the others" in str(waiting[3])


def test_a_peer_waits_for_the_one_that_it_is_to_enter_through(swarms: Swarms, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer may be starting or briefly unreachable; if it never answers, the error names it."""
    first = swarms.peer(0).transport
    known = swarms.addresses_of(first)
    first.close()
    with pytest.raises(RendezvousError, match=r"the network can't be entered through|no peer answers at"):
        swarms.peer_at(1, known, **PATIENCE)
    where = [address.rpartition("/p2p/")[0] for address in known]

    def later() -> Connected:
        asked.wait(LIMIT_S)
        return swarms.peer(0, held_step=10, listen=where)

    asked = threading.Event()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: asked.set())  # an attempt takes long enough
    monkeypatch.setattr("diloco.transport.hivemind.connect.time", clock)
    found = at_once([later, lambda: swarms.peer_at(1, known)])
    assert [each.joining for each in found] == [False, True]


def test_a_proof_is_of_no_use_to_somebody_else() -> None:
    secret = new_secret()
    admission = Admission("run", secret)
    proof = admission.proof("a", "b")
    assert admission.accepts(proof, "a", "b")
    for prover, verifier in (("b", "a"), ("c", "b"), ("a", "c")):
        assert not admission.accepts(proof, prover, verifier)
    for other in (Admission("run", new_secret()), Admission("other", secret), Admission("run")):
        assert not other.accepts(proof, "a", "b")
