"""Which route the payloads of a swarm take."""

from __future__ import annotations

import pytest

from diloco.transport import Address, PeerStreams, PeerTransport, join, parse_address
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import nobody_at
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, LIMIT_S, Swarms, wait_for_members

pytestmark = HIVEMIND_LEAVES_CONNECTIONS


def over_libp2p(transports: list[PeerTransport]) -> bool:
    """Return whether payloads go over libp2p, where a second stripe would be useless."""
    return any(peer.single for each in transports for peer in each.connections.peers.values())


@pytest.mark.parametrize("hidden", [False, True], ids=["both listen", "one listens"])
def test_payloads_go_directly_where_one_can_reach_the_other(swarms: Swarms, hidden: bool) -> None:
    one = swarms.peer(0).transport
    connected = swarms.peer(1, [one], hidden=hidden)
    join(connected, LIMIT_S)
    both = [one, connected.transport]
    for each in both:
        wait_for_members(each, 2)
        each.tick()
    exchange(both, [contribution(m) for m in range(2)])
    assert not over_libp2p(both)


def test_nothing_is_said_to_somebody_else_at_the_address_of_a_peer(swarms: Swarms) -> None:
    """The key decides who is who, not the address: over libp2p the peer itself is reached."""
    streams = [each.connections.streams for each in swarms.meet(2)]
    one, other = streams
    assert isinstance(one, PeerStreams)
    assert isinstance(other, PeerStreams)
    call = swarms.transports[0].connections.call
    there = Address("127.0.0.1", other.port)
    assert call(one.open_directly(other.node.peer_id, [there]))
    with nobody_at() as nowhere:
        for places in ([], [nowhere], [parse_address("nobody.invalid:1")], [Address("127.0.0.1", one.port)]):
            with pytest.raises(OSError, match="no direct connection"):
                call(one.open_directly(other.node.peer_id, places))


def test_a_place_that_is_no_address_is_left_out(swarms: Swarms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the place that a member named ended all members of lower rank, as an internal error of their own."""
    monkeypatch.setattr(PeerStreams, "places_for_payloads", lambda self, addresses: ("nowhere", "a:b", ":1", ""))
    both = swarms.meet(2)
    exchange(both, [contribution(m) for m in range(2)])
    assert [each.failure for each in both] == [None, None]
    assert over_libp2p(both)
